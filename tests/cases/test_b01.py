"""B01: with one backward configured per step, each backward counts as the boundary and the next
overwrites what it published, so only the last backward's gradient reaches the step.

N backwards without any context must be summed just as inside one.
"""

from typing import Any

import pytest

from tests import rig
from tests.cases.modes import MODES, assert_traffic, house, run, usual
from tests.harness import RankContext, distributed


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backwards", [1, 2, 4])
@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 1}], ids=["unset", "one"])
@distributed(world_size=[2, 3])
def test_every_backward_reaches_the_step(
    ctx: RankContext, stage: int, mode: str, backwards: int, config: dict[str, Any]
) -> None:
    engine = rig.start(ctx, rig.House(), stage, config=config)
    mark = engine.ledger.mark()
    run(engine, mode, house(engine, ctx.rank, range(backwards)))
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, mode, backwards))
    rig.assert_change(engine, rig.expected(ctx.world_size, backwards))
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_plain_loss_backward_is_the_same(ctx: RankContext, stage: int, mode: str) -> None:
    engine = rig.start(ctx, rig.House(), stage)
    mark = engine.ledger.mark()
    if mode == "bare":
        for loss in house(engine, ctx.rank, range(2)):
            loss().backward()
    else:
        with engine.coalesce_grad_reduction():
            for loss in house(engine, ctx.rank, range(2)):
                loss().backward()
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
    rig.assert_change(engine, 13.0)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_rig_sees_a_lost_backward(ctx: RankContext, stage: int) -> None:
    """Negative control: dropping the first backward on purpose gives the 7 of the fault."""
    engine = rig.start(ctx, rig.House(), stage)
    first, last = house(engine, ctx.rank, range(2))
    engine.backward(first())
    engine.zero_grad()
    engine.backward(last())
    engine.step()
    rig.assert_change(engine, 7.0)
    rig.assert_ranks_equal(engine)
