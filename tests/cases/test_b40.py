"""B40: a submodule is used twice in one backward, its hook fires once per use or its bucket leaves
after the first contribution, and the second one is lost.

Both contributions count, with the smallest buckets and in different checkpointed segments too.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import rig
from tests.cases.modes import (
    TINY,
    Reference,
    Room,
    assert_reductions,
    assert_traffic,
    assert_weights,
    num_units,
    run,
    traffic,
    usual,
)
from tests.harness import RankContext, distributed


class TwoHeads(nn.Module):
    """An encoder applied to x1 and x2: loss = main(e1) + aux(e2)."""

    def __init__(self, segments: str) -> None:
        super().__init__()
        self.rooms = nn.ModuleList([Room(5, 2.0), Room(5, 3.0), Room(5, 1.0)])
        self.segments = segments

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        encoder, main, aux = self.rooms
        if self.segments == "plain":
            return (main(encoder(x1)) + aux(encoder(x2))).sum()
        reentrant = self.segments == "reentrant"
        first = checkpoint(lambda x: main(encoder(x)), x1, use_reentrant=reentrant)
        second = checkpoint(lambda x: aux(encoder(x)), x2, use_reentrant=reentrant)
        return (first + second).sum()


class Cycle(nn.Module):
    """A, B, C, A, B, C."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = nn.ModuleList([Room(3, 2.0), Room(3, 1.0), Room(3, 3.0)])

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        for room in [*self.rooms, *self.rooms]:
            x1 = room(x1)
        return (x1 * x2).sum()


def loss_of(module: nn.Module, rank: int, k: int, *, numel: int = 5) -> Tensor:
    x1 = torch.arange(float(numel), requires_grad=True)
    x2 = (x1.detach() - rig.x_of(rank, k)).requires_grad_()
    loss: Tensor = module(x1 + rank, x2)
    return loss


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "armed"])
@pytest.mark.parametrize("segments", ["plain", "non_reentrant", "reentrant"])
@distributed(world_size=2)
def test_an_encoder_used_twice(ctx: RankContext, stage: int, mode: str, segments: str) -> None:
    reference = Reference(TwoHeads("plain"), ctx.world_size)
    reference.backward(loss_of, 2)
    model = TwoHeads(segments)
    engine = rig.start(ctx, model, stage, zero=TINY)
    assert num_units(engine) == 3
    mark = engine.ledger.mark()
    run(engine, mode, [partial(loss_of, _Called(engine), ctx.rank, k) for k in range(2)])
    engine.step()
    if mode != "bare":
        assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
    else:
        # Each reentrant segment is a backward of its own, which the encoder leaves complete.
        per_backward = 4 if segments == "reentrant" else 3
        reductions = 2 * per_backward if stage >= 2 else 3
        assert_reductions(ctx, engine, stage, mark, reductions, _bare_gathers(segments))
    assert_weights(engine, reference.after_sgd())


def _bare_gathers(segments: str) -> int:
    """Fewest gathers of two backwards at stage 3: four rooms run forward, three backward.

    Both reentrant segments run their two rooms forward again, and then backward on their own.
    """
    return 2 * (4 + 3 if segments != "reentrant" else 4 + 4 + 4)


class _Called(nn.Module):
    """An engine where a module is expected."""

    def __init__(self, engine: Callable[..., Tensor]) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *args: Tensor) -> Tensor:
        return self.engine(*args)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=3)
def test_a_cycle_of_blocks(ctx: RankContext, stage: int, mode: str) -> None:
    loss = partial(loss_of, numel=3)
    reference = Reference(Cycle(), ctx.world_size)
    reference.backward(loss, 2)
    model = Cycle()
    engine = rig.start(ctx, model, stage, zero=TINY)
    assert num_units(engine) == 3
    mark = engine.ledger.mark()
    run(engine, mode, [partial(loss, _Called(engine), ctx.rank, k) for k in range(2)])
    engine.step()
    if mode == "bare":
        reductions = 3 * (2 if stage >= 2 else 1)  # once per backward, although used twice
        assert_reductions(ctx, engine, stage, mark, reductions, 2 * (6 + 3))
    else:
        assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=3))
    assert_weights(engine, reference.after_sgd())
