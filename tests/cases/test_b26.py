"""B26: reducing "on the last chunk only" is wrong where the last chunk reaches no trainable
parameter: no hook fires, and nothing is reduced; on one rank only, the others wait for ever.

What is reduced is decided by what is pending, not by which backward came last.
"""

import pytest
import torch
from torch import Tensor, nn

from tests import rig
from tests.cases.modes import (
    MODES,
    SCOPES,
    TINY,
    Room,
    assert_traffic,
    assert_weights,
    num_units,
    run,
    traffic,
)
from tests.harness import RankContext, distributed


class Columns(nn.Module):
    """A trainable column of two rooms and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = nn.ModuleList([Room(3), Room(17)])
        self.frozen = Room(5, 2.0)
        self.frozen.w.requires_grad_(False)

    def forward(self, x: Tensor, column: str) -> Tensor:
        if column == "frozen":
            return self.frozen(x).sum()
        return torch.stack([room(x).sum() for room in self.rooms]).sum()


def losses_of(engine, rank: int, columns: list[str]):
    """One loss per column; x requires a gradient, so that a frozen one has a backward too."""
    xs = [torch.tensor(rig.x_of(rank, k), requires_grad=True) for k in range(len(columns))]
    return [lambda x=x, c=c: engine(x, c) for x, c in zip(xs, columns, strict=True)]


def wanted_weights(gradient: float) -> dict[str, Tensor]:
    return {
        "rooms.0.w": torch.full((3,), -gradient),
        "rooms.1.w": torch.full((17,), -gradient),
        "frozen.w": torch.full((5,), 2.0),
    }


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=[2, 3])
def test_the_last_backward_is_frozen_on_every_rank(
    ctx: RankContext, stage: int, mode: str
) -> None:
    engine = rig.start(ctx, Columns(), stage, zero=TINY)
    assert num_units(engine) == 2
    assert num_units(engine, trainable=False) == 3
    mark = engine.ledger.mark()
    run(engine, mode, losses_of(engine, ctx.rank, ["trainable", "trainable", "frozen"]))
    engine.step()
    is_bare = mode == "bare"
    times = 2 if is_bare and stage >= 2 else 1
    # The frozen room is the root block's: each forward of the model holds it, and so does each
    # backward; two of three use the rooms.
    gathers = (3 * 2 + 2 * 2 * 2) if is_bare else 3
    wanted = traffic(ctx, engine, stage, reductions=2 * times, gathers=gathers)
    assert_traffic(engine, mark, wanted)
    assert_weights(engine, wanted_weights(rig.expected(ctx.world_size, 2)))


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("frozen_rank", [0, 1])
@distributed(world_size=[2, 3])
def test_the_last_backward_is_frozen_on_one_rank(
    ctx: RankContext, stage: int, mode: str, frozen_rank: int
) -> None:
    engine = rig.start(ctx, Columns(), stage, zero=TINY)
    mark = engine.ledger.mark()
    last = "frozen" if ctx.rank == frozen_rank else "trainable"
    run(engine, mode, losses_of(engine, ctx.rank, ["trainable", last]))
    engine.step()
    # The rank whose last backward reached nothing sends no second time, nor does another.
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=2, gathers=3))
    every = [[0] if rank == frozen_rank else [0, 1] for rank in range(ctx.world_size)]
    assert_weights(engine, wanted_weights(rig.expected(ctx.world_size, every)))


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=2)
def test_nothing_trainable_at_all(ctx: RankContext, stage: int, mode: str) -> None:
    """A step whose every backward is frozen sends no gradient and moves nothing."""
    engine = rig.start(ctx, Columns(), stage, zero=TINY)
    mark = engine.ledger.mark()
    run(engine, mode, losses_of(engine, ctx.rank, ["frozen", "frozen"]))
    engine.step()
    gathers = 2 * 2 if mode == "bare" else 3
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=0, gathers=gathers))
    assert_weights(engine, wanted_weights(0.0))
