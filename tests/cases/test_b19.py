"""B19: a context around backward only, or around forward only, does not do what it says, because
the wrapper decides when forward runs.

Where backward runs decides, whatever the forward did, at every stage.
"""

import pytest
import torch
from torch import Tensor, nn

from tests import rig
from tests.cases.modes import (
    SCOPES,
    TINY,
    Reference,
    Room,
    assert_traffic,
    assert_weights,
    num_units,
    scope,
    traffic,
)
from tests.harness import RankContext, distributed


class Chain(nn.Module):
    """A product of weights, so that backward reads what forward read: 2 * 3 * 1 * x."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = nn.ModuleList(Room(5, start) for start in (2.0, 3.0, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        for room in self.rooms:
            x = room(x)
        return x.sum()


def data(rank: int, k: int) -> Tensor:
    return torch.arange(5.0) + rig.x_of(rank, k)


def loss_of(module: nn.Module, rank: int, k: int) -> Tensor:
    loss: Tensor = module(data(rank, k))
    return loss


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=3)
def test_forward_outside_backward_inside(ctx: RankContext, stage: int, mode: str) -> None:
    """Kept: nothing is reduced inside, and the whole step is one reduction per unit."""
    reference = Reference(Chain(), ctx.world_size)
    reference.backward(loss_of, 2)
    engine = rig.start(ctx, Chain(), stage, zero=TINY)
    assert num_units(engine) == 3
    mark = engine.ledger.mark()
    losses = [engine(data(ctx.rank, k)) for k in range(2)]
    gathers = rig.counts(engine, mark).get("all_gather", 0)
    assert gathers == (6 if stage == 3 else 0)
    with scope(engine, mode, 2):
        inside = engine.ledger.mark()
        engine.backward(losses[0])
        assert rig.counts(engine, inside) == {}
        engine.backward(losses[1])
    engine.step()
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=6 + 3))
    assert_weights(engine, reference.after_sgd())


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=3)
def test_forward_inside_backward_outside(ctx: RankContext, stage: int, mode: str) -> None:
    """Not kept: at stages 2-3 each of the bare backwards is reduced as it goes."""
    reference = Reference(Chain(), ctx.world_size)
    reference.backward(loss_of, 2)
    engine = rig.start(ctx, Chain(), stage, zero=TINY)
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        losses = [engine(data(ctx.rank, k)) for k in range(2)]
    for loss in losses:
        engine.backward(loss)
    times = 2 if stage >= 2 else 1
    early = {} if stage < 2 else {"reduce_scatter": 3 * times}
    found = rig.counts(engine, mark)
    found.pop("all_gather", None)
    assert found == early
    engine.step()
    # stage 3: three units for the scope, and for each of two backwards
    wanted = traffic(ctx, engine, stage, reductions=3 * times, gathers=3 + 2 * 3)
    assert_traffic(engine, mark, wanted)
    assert_weights(engine, reference.after_sgd())


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=2)
def test_one_of_each(ctx: RankContext, stage: int, mode: str) -> None:
    """Crossed: forward 0 outside with backward 0 inside, forward 1 inside with backward 1 after."""
    reference = Reference(Chain(), ctx.world_size)
    reference.backward(loss_of, 2)
    engine = rig.start(ctx, Chain(), stage, zero=TINY)
    mark = engine.ledger.mark()
    first = engine(data(ctx.rank, 0))
    with scope(engine, mode, 1):
        second = engine(data(ctx.rank, 1))
        engine.backward(first)
    engine.backward(second)
    engine.step()
    # A window flushes at its end at stages 2-3, and an armed one reduces at once at stages 0-1;
    # the bare backward, or step(), is the other.
    times = 2 if (stage >= 2 and mode != "no_sync") or mode == "armed" else 1
    wanted = traffic(ctx, engine, stage, reductions=3 * times, gathers=3 + 3 + 3)
    assert_traffic(engine, mark, wanted)
    assert_weights(engine, reference.after_sgd())
