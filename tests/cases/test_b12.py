"""B12: two owners of the step boundary drift apart: a flag set by hand outlives its step, or one
counter says "step" where another says "count".

There is one owner. A flag holds for one ``step()``; each step takes what the caller really ran.
"""

import pytest
import torch

from tests import rig
from tests.cases.modes import (
    assert_num_reductions,
    assert_traffic,
    house,
    num_units,
    one_by_one,
    run,
    traffic,
    usual,
)
from tests.harness import CommLog, RankContext, distributed


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_a_flag_holds_for_one_step(ctx: RankContext, stage: int, mode: str) -> None:
    """Flag True, step; then a normal step of two micro-steps without touching it."""
    config = {"gradient_accumulation_steps": 2}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    mark = engine.ledger.mark()
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    assert engine.is_gradient_accumulation_boundary()
    run(engine, mode, house(engine, ctx.rank, [0]))
    engine.step()
    assert engine.global_steps == 1
    assert not engine.is_gradient_accumulation_boundary(), "the flag outlived its step"
    rig.assert_change(engine, 6.0)

    run(engine, mode, house(engine, ctx.rank, [0]))
    with CommLog() as log:
        engine.step()
    assert log.records == [], "step() off the boundary sent something"
    assert engine.global_steps == 1
    rig.assert_change(engine, 6.0)
    assert engine.is_gradient_accumulation_boundary()
    run(engine, mode, house(engine, ctx.rank, [1]))
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (2, 3)
    assert_num_reductions(engine, stage, mark, 3 if stage >= 2 else 2)
    rig.assert_change(engine, 6.0 + 13.0 / 2)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_false_makes_one_step_count_only(ctx: RankContext, stage: int, mode: str) -> None:
    """Without a declared k every step() is a boundary, but for the one that the flag takes out."""
    engine = rig.start(ctx, rig.House(), stage)
    mark = engine.ledger.mark()
    engine.set_gradient_accumulation_boundary(False)
    run(engine, mode, house(engine, ctx.rank, [0]))
    engine.step()
    assert engine.global_steps == 0
    rig.assert_change(engine, 0.0)
    run(engine, mode, house(engine, ctx.rank, [1]))
    engine.step()
    assert engine.global_steps == 1
    wanted = one_by_one(ctx, engine, stage, mode, 2)
    if stage == 3:
        wanted["all_gather"] += 1  # the look at the weights between
    assert_traffic(engine, mark, wanted)
    rig.assert_change(engine, 13.0)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_each_step_takes_what_was_run(ctx: RankContext, stage: int, mode: str) -> None:
    """N = 2, then 3, then 1: nothing was configured, so nothing may remember the first N."""
    engine = rig.start(ctx, rig.House(), stage)
    total = 0.0
    for backwards in (2, 3, 1):
        mark = engine.ledger.mark()
        run(engine, mode, house(engine, ctx.rank, range(backwards)))
        engine.step()
        assert_traffic(engine, mark, usual(ctx, engine, stage, mode, backwards))
        total += rig.expected(2, backwards)
        rig.assert_change(engine, total)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_loop_that_owns_the_boundary(ctx: RankContext, stage: int) -> None:
    """A caller that flags every micro-step and a configured k that says otherwise."""
    engine = rig.start(ctx, rig.House(), stage, config={"gradient_accumulation_steps": 3})
    mark = engine.ledger.mark()
    for k in range(4):
        engine.set_gradient_accumulation_boundary(k == 3)
        engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
        assert engine.global_steps == (k == 3)
    times = 4 if stage >= 2 else 1
    assert_traffic(
        engine, mark, traffic(ctx, engine, stage, reductions=times * num_units(engine), gathers=8)
    )
    rig.assert_change(engine, rig.expected(2, 4, divisor=4))
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_caller_owned_mode(ctx: RankContext, stage: int) -> None:
    """managed_gradient_accumulation false: k is ignored, either flag still decides one step."""
    config = {"gradient_accumulation_steps": 4, "managed_gradient_accumulation": False}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    mark = engine.ledger.mark()
    run(engine, "bare", house(engine, ctx.rank, [0, 1]))
    engine.step()
    rig.assert_change(engine, 13.0)
    engine.set_gradient_accumulation_boundary(False)
    run(engine, "bare", house(engine, ctx.rank, [0]))
    engine.step()
    rig.assert_change(engine, 13.0)
    engine.set_gradient_accumulation_boundary(True)
    run(engine, "bare", house(engine, ctx.rank, [1]))
    engine.step()
    rig.assert_change(engine, 26.0)
    run(engine, "bare", house(engine, ctx.rank, [0]))
    engine.step()
    rig.assert_change(engine, 32.0)
    assert (engine.global_steps, engine.micro_steps) == (3, 4)
    # five backwards, or three steps of which the flagged one is reduced inside its last backward
    assert_num_reductions(engine, stage, mark, 5 if stage >= 2 else 3)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_last_flag_counts(ctx: RankContext, stage: int) -> None:
    """Setting the flag twice before a step leaves one decision: the later one."""
    engine = rig.start(ctx, rig.House(), stage, config={"gradient_accumulation_steps": 2})
    mark = engine.ledger.mark()
    engine.set_gradient_accumulation_boundary(True)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(rig.x_of(ctx.rank, 0)))
    engine.step()
    assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(False)
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(rig.x_of(ctx.rank, 1))
    returned = engine.backward(loss)
    assert torch.equal(returned, loss.detach() / 2)
    engine.step()
    assert engine.global_steps == 1
    assert_num_reductions(engine, stage, mark, 2 if stage >= 2 else 1)
    rig.assert_change(engine, 6.5)
    rig.assert_ranks_equal(engine)
