"""B26: reducing "on the last chunk only" is wrong where the last chunk reaches no trainable
parameter: no hook fires, and nothing is reduced; on one rank only, the others wait for ever.

What is reduced is decided by what is pending, not by which backward came last.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import (
    MODES,
    SCOPES,
    TINY,
    Room,
    assert_reductions,
    assert_traffic,
    assert_weights,
    during,
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


def losses_of(engine: onefold.Engine, rank: int, columns: list[str]) -> list[Callable[[], Tensor]]:
    """One loss per column; x requires a gradient, so that a frozen one has a backward too."""
    xs = [torch.tensor(rig.x_of(rank, k), requires_grad=True) for k in range(len(columns))]
    return [partial(engine, x, column) for x, column in zip(xs, columns, strict=True)]


def wanted_weights(gradient: float) -> dict[str, Tensor]:
    return {
        "rooms.0.w": torch.full((3,), -gradient),
        "rooms.1.w": torch.full((17,), -gradient),
        "frozen.w": torch.full((5,), 2.0),
    }


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[2, 3])
def test_the_last_backward_is_frozen_on_every_rank(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, Columns(), stage, zero=TINY)
    assert num_units(engine) == 2
    assert num_units(engine, trainable=False) == 3
    for steps, mode in enumerate(MODES, start=1):
        with during(mode):
            mark = engine.ledger.mark()
            run(engine, mode, losses_of(engine, ctx.rank, ["trainable", "trainable", "frozen"]))
            engine.step()
            if mode == "bare":
                # Every forward and every backward of the model holds the root block with the
                # frozen room; two of three use the rooms.
                gathers = 3 * 2 + 2 * 2 * 2
                assert_reductions(ctx, engine, stage, mark, 4 if stage >= 2 else 2, gathers)
            else:
                assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=2, gathers=3))
            gradient = rig.expected(ctx.world_size, 2)
            assert_weights(engine, wanted_weights(steps * gradient))


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=[2, 4])
def test_the_last_backward_is_frozen_on_one_rank(ctx: RankContext, stage: int, mode: str) -> None:
    engine = rig.start(ctx, Columns(), stage, zero=TINY)
    total = 0.0
    for frozen_rank in (0, 1):
        with during("rank", frozen_rank):
            mark = engine.ledger.mark()
            last = "frozen" if ctx.rank == frozen_rank else "trainable"
            run(engine, mode, losses_of(engine, ctx.rank, ["trainable", last]))
            engine.step()
            # Also if the reductions of the other ranks had left inside their last backward.
            assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=2, gathers=3))
            every = [[0] if rank == frozen_rank else [0, 1] for rank in range(ctx.world_size)]
            total += rig.expected(ctx.world_size, every)
            assert_weights(engine, wanted_weights(total))


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_nothing_trainable_at_all(ctx: RankContext, stage: int) -> None:
    """A step whose every backward is frozen sends no gradient and moves nothing."""
    engine = rig.start(ctx, Columns(), stage, zero=TINY)
    for mode in MODES:
        with during(mode):
            mark = engine.ledger.mark()
            run(engine, mode, losses_of(engine, ctx.rank, ["frozen", "frozen"]))
            engine.step()
            gathers = 2 * 2 if mode == "bare" else 3
            wanted = traffic(ctx, engine, stage, reductions=0, gathers=gathers)
            assert_traffic(engine, mark, wanted)
            assert_weights(engine, wanted_weights(0.0))
