"""B57: with embeddings gathered from all ranks the gradient is lost, or off by the number of ranks.

Scale rule: the gather's backward hands a row the sum of what all ranks' losses want of it, and the
engine averages over ranks. So each rank's loss may be the mean over its own rows, or the whole
batch's loss on every rank: both give the gradient of the mean over the whole batch, with no factor
W anywhere, and a temperature that every rank uses in its loss fits the same rule.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.gradcache import Encode, columns
from tests.cases.modes import assert_num_reductions, num_units, scope
from tests.harness import RankContext, distributed

BACKWARDS = 3
Gather = Callable[[Tensor], Tensor]


class Towers(nn.Module):
    """Two towers and a learned temperature, which is a scalar without dimensions."""

    def __init__(self, temperature: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.queries = Encode(1)
        self.documents = Encode(2)
        self.temperature = nn.Parameter(torch.full(temperature, 0.7, dtype=torch.float64))

    def forward(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Two columns of tokens ``[B, T]`` -> two of embeddings ``[B, width]``, and the factor."""
        return self.queries(queries), self.documents(documents), self.temperature.exp()


class OwnGather(torch.autograd.Function):
    """Forward gathers; backward sums over ranks what they want of this rank's rows."""

    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def own_gather(rows: Tensor) -> Tensor:
    found: Tensor = OwnGather.apply(rows)
    return found


def torch_gather(rows: Tensor) -> Tensor:
    import torch.distributed.nn.functional as distributed_functional

    return torch.cat(distributed_functional.all_gather(rows))


def lost_gather(rows: Tensor) -> Tensor:
    """The bug: a gather without a backward, and this rank's own rows put back in."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


GATHERS: dict[str, Gather] = {"own": own_gather, "torch": torch_gather}


def info_nce(queries: Tensor, documents: Tensor, factor: Tensor, first: int = 0) -> Tensor:
    """Both directions where all queries are given, else rows ``first ..`` against all documents."""
    scores = queries @ documents.T * factor
    labels = torch.arange(first, first + len(queries))
    loss = F.cross_entropy(scores, labels)
    return (loss + F.cross_entropy(scores.T, labels)) / 2 if len(scores) == len(scores.T) else loss


def local_loss(model: Any, ctx: RankContext, gather: Gather, kind: str, key: int) -> Tensor:
    """This rank's loss: over its own rows, or over everything, as on every other rank."""
    queries, documents, factor = model(*columns(ctx, key))
    if kind == "whole":
        return info_nce(gather(queries), gather(documents), factor)
    return info_nce(queries, gather(documents), factor, first=ctx.rank * len(queries))


def whole_loss(model: nn.Module, ctx: RankContext, kind: str, key: int) -> Tensor:
    """The same of all ranks in one process."""
    batches = [columns(ctx, key, rank) for rank in range(ctx.world_size)]
    queries, documents, factor = model(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    if kind == "whole":
        return info_nce(queries, documents, factor)
    parts = queries.chunk(ctx.world_size)
    losses = [
        info_nce(part, documents, factor, first=rank * len(part)) for rank, part in enumerate(parts)
    ]
    return torch.stack(losses).mean()


def reference_gradients(ctx: RankContext, kind: str, towers: nn.Module) -> dict[str, Tensor]:
    for key in range(BACKWARDS):
        whole_loss(towers, ctx, kind, key).backward()
    named = towers.named_parameters()
    return {name: param.grad for name, param in named if param.grad is not None}


def run(
    engine: onefold.Engine, mode: str, losses: list[Callable[[], Tensor]]
) -> dict[str, Tensor | None]:
    """The averaged gradient of every parameter, before any optimizer has read it."""
    with scope(engine, mode, len(losses)):
        for loss in losses:
            engine.backward(loss())
    engine.reduce_gradients()
    return {name: engine.full_grad(param) for name, param in engine.module.named_parameters()}


def assert_gradients(found: dict[str, Tensor | None], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        own = found[name]
        assert own is not None, name
        # the rounding of fp64 sums of some hundred terms of order 1, in another order
        torch.testing.assert_close(own, tensor, rtol=1e-12, atol=1e-12, msg=f"{name} differs")


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window", "armed"])
@pytest.mark.parametrize("kind", ["rows", "whole"])
@pytest.mark.parametrize("gather", GATHERS)
@distributed(world_size=2)
def test_gathered(ctx: RankContext, stage: int, mode: str, kind: str, gather: str) -> None:
    wanted = reference_gradients(ctx, kind, Towers((1,)))
    engine = rig.start(ctx, Towers((1,)), stage)
    losses = [
        partial(local_loss, engine, ctx, GATHERS[gather], kind, key) for key in range(BACKWARDS)
    ]
    mark = engine.ledger.mark()
    found = run(engine, mode, losses)  # type: ignore[arg-type]
    times = BACKWARDS if mode == "bare" and stage >= 2 else 1
    assert_num_reductions(engine, stage, mark, times * num_units(engine))
    assert_gradients(found, wanted)
    engine.step()
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("kind", ["rows", "whole"])
@distributed(world_size=3)
def test_on_three_ranks(ctx: RankContext, kind: str) -> None:
    wanted = reference_gradients(ctx, kind, Towers((1,)))
    engine = rig.start(ctx, Towers((1,)), 3)
    losses = [partial(local_loss, engine, ctx, own_gather, kind, key) for key in range(BACKWARDS)]
    assert_gradients(run(engine, "window", losses), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_temperature_without_dimensions(ctx: RankContext, stage: int) -> None:
    """As CLIP has it: ``nn.Parameter(torch.tensor(0.7))``."""
    wanted = reference_gradients(ctx, "rows", Towers())
    engine = rig.start(ctx, Towers(), stage)
    for mode in ("bare", "window", "armed"):
        losses = [
            partial(local_loss, engine, ctx, own_gather, "rows", key) for key in range(BACKWARDS)
        ]
        assert_gradients(run(engine, mode, losses), wanted)  # type: ignore[arg-type]
        engine.zero_grad()
    engine.backward(local_loss(engine, ctx, own_gather, "rows", 0))
    engine.step()
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
def test_a_gather_without_a_backward_is_noticed(ctx: RankContext) -> None:
    """Negative control: with the bug the documents' gradient is another one."""
    wanted = reference_gradients(ctx, "rows", Towers((1,)))
    engine = rig.start(ctx, Towers((1,)), 2)
    losses = [
        partial(local_loss, engine, ctx, lost_gather, "rows", key) for key in range(BACKWARDS)
    ]
    found = run(engine, "window", losses)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="documents"):
        assert_gradients(found, wanted)
