"""B42: a weight is shared by several reentrant checkpoints, its hook fires once per segment, and
the gradient is marked ready twice, reduced too early, or lost.

Nothing is decided by the end of a nested backward: the sum is right at every stage, in every way.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from tests import rig
from tests.cases.modes import (
    TINY,
    Reference,
    assert_reductions,
    assert_traffic,
    assert_weights,
    num_units,
    run,
    scope,
    usual,
)
from tests.harness import RankContext, distributed

WIDTH = 3


class Shared(nn.Module):
    """One linear layer, used in every segment; ``kind`` is plain, non_reentrant or reentrant.

    flat: two checkpoints in a row. nested: a checkpoint inside a checkpoint, both with a use.
    """

    def __init__(self, kind: str, shape: str) -> None:
        super().__init__()
        self.kind = kind
        self.shape = shape
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)])
        with torch.no_grad():
            for layer in self.layers:
                for param in layer.parameters():
                    param.copy_((torch.arange(float(param.numel())) % 4 - 1).view_as(param))

    def forward(self, x: Tensor) -> Tensor:
        shared, head = self.layers
        if self.shape == "flat":
            for _ in range(2):
                x = self._segment(lambda h: torch.relu(shared(h)), x)
        else:
            x = self._segment(self._outer, x)
        loss: Tensor = head(x).sum()
        return loss

    def _outer(self, x: Tensor) -> Tensor:
        shared = self.layers[0]
        inner = self._segment(lambda h: torch.relu(shared(h)), x)
        return torch.relu(shared(inner))

    def _segment(self, body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.kind == "plain":
            return body(x)
        return checkpoint(body, x, use_reentrant=self.kind == "reentrant")


def data(rank: int, k: int) -> Tensor:
    x = torch.arange(2.0 * WIDTH).view(2, WIDTH) % 4 - 1 + rank + k
    return x.requires_grad_()


def loss_of(module: nn.Module, rank: int, k: int) -> Tensor:
    loss: Tensor = module(data(rank, k))
    return loss


def uses(kind: str) -> int:
    """Backwards, the outermost or nested ones, that one backward of the engine gives the layer."""
    return 2 if kind == "reentrant" else 1


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window", "armed"])
@pytest.mark.parametrize("kind", ["non_reentrant", "reentrant"])
@pytest.mark.parametrize("shape", ["flat", "nested"])
@distributed(world_size=2)
def test_a_weight_shared_by_checkpoints(
    ctx: RankContext, stage: int, mode: str, kind: str, shape: str
) -> None:
    reference = Reference(Shared("plain", shape), ctx.world_size)
    reference.backward(loss_of, 2)
    assert all(grad.abs().sum() > 0 for grad in reference.gradients().values())
    engine = rig.start(ctx, Shared(kind, shape), stage, zero=TINY)
    mark = engine.ledger.mark()
    run(engine, mode, [partial(loss_of, engine.module, ctx.rank, k) for k in range(2)])
    engine.step()
    _assert_counts(ctx, engine, stage, mode, mark, kind)
    assert_weights(engine, reference.after_sgd())


def _assert_counts(
    ctx: RankContext, engine: onefold.Engine, stage: int, mode: str, mark: object, kind: str
) -> None:
    """In a scope one reduction per unit; bare at stages 2-3 one per unit and (nested) backward."""
    if mode != "bare":
        assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
        return
    names = [unit.slots[0].name for unit in engine.plan.units]
    shared = sum("layers.0" in name for name in names)
    per_backward = shared * uses(kind) + num_units(engine) - shared
    reductions = 2 * per_backward if stage >= 2 else num_units(engine)
    assert_reductions(ctx, engine, stage, mark, reductions, gathers=2 * (2 + 1) + 2 * 2)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("shape", ["flat", "nested"])
@distributed(world_size=2)
def test_a_nested_backward_disarms(ctx: RankContext, stage: int, shape: str) -> None:
    """Armed, nothing leaves inside the last backward once a nested one has been seen in it."""
    engine = rig.start(ctx, Shared("reentrant", shape), stage, zero=TINY)
    with engine.coalesce_grad_reduction(backwards=1):
        mark = engine.ledger.mark()
        engine.backward(engine(data(ctx.rank, 0)))
        inside = sum(rig.counts(engine, mark).values())
        assert inside <= num_units(engine) - 1, "a shared weight left inside the backward"
    engine.step()
    reference = Reference(Shared("plain", shape), ctx.world_size)
    reference.backward(loss_of, 1)
    wanted = usual(ctx, engine, stage, "armed", 1)
    if stage == 3:
        del wanted["all_gather"]  # gathered at the entry, before the mark
    assert_traffic(engine, mark, wanted)
    assert_weights(engine, reference.after_sgd())


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "no_sync"])
@distributed(world_size=3)
def test_plain_loss_backward(ctx: RankContext, stage: int, mode: str) -> None:
    """One loss.backward() over two reentrant segments ends twice for autograd, never as a whole."""
    reference = Reference(Shared("plain", "flat"), ctx.world_size)
    reference.backward(loss_of, 2)
    engine = rig.start(ctx, Shared("reentrant", "flat"), stage)
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        for k in range(2):
            engine(data(ctx.rank, k)).backward()
    engine.step()
    _assert_counts(ctx, engine, stage, mode, mark, "reentrant")
    assert_weights(engine, reference.after_sgd())
