"""B01: with one backward configured per step, each backward counts as the boundary and the next
overwrites what it published, so only the last backward's gradient reaches the step.

N backwards without any context must be summed just as inside one.
"""

import itertools

import pytest

from tests import rig
from tests.cases.modes import MODES, assert_traffic, during, house, run, scope, usual
from tests.harness import RankContext, distributed


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("declared", [None, 1])
@distributed(world_size=2)
def test_every_backward_reaches_the_step(
    ctx: RankContext, stage: int, declared: int | None
) -> None:
    config = {} if declared is None else {"gradient_accumulation_steps": declared}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    total = 0.0
    for mode, backwards in itertools.product(MODES, (2, 1, 4)):
        with during(mode, backwards):
            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, range(backwards)))
            engine.step()
            wanted = usual(ctx, engine, stage, mode, backwards, declared=declared)
            assert_traffic(engine, mark, wanted)
            total += rig.expected(ctx.world_size, backwards)
            rig.assert_change(engine, total)
            rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[1, 3, 4])
def test_on_any_number_of_ranks(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, rig.House(), stage)
    mark = engine.ledger.mark()
    run(engine, "bare", house(engine, ctx.rank, range(2)))
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, "bare", 2))
    rig.assert_change(engine, rig.expected(ctx.world_size, 2))
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_plain_loss_backward_is_the_same(ctx: RankContext, stage: int, mode: str) -> None:
    engine = rig.start(ctx, rig.House(), stage)
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
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
