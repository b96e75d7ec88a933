"""B13: the loss is divided by the configured accumulation count although the window was shorter.

The rule: without a declared k backwards are summed; with one the sum is divided by the micro-steps
really taken. Never by the configured number.
"""

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import (
    MODES,
    assert_num_reductions,
    assert_traffic,
    house,
    one_by_one,
    run,
    scope,
    usual,
)
from tests.harness import RankContext, distributed

CONFIGURED, TAKEN = 4, 3


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=2)
def test_a_short_step_divides_by_what_was_taken(ctx: RankContext, stage: int, mode: str) -> None:
    config = {"gradient_accumulation_steps": CONFIGURED}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    mark = engine.ledger.mark()
    for k in range(TAKEN):
        if k == TAKEN - 1:
            engine.set_gradient_accumulation_boundary(True)
        run(engine, mode, house(engine, ctx.rank, [k]))
        engine.step()
    assert engine.global_steps == 1
    if mode != "armed":  # a flag arms as well as a declared number; then two backwards are armed
        assert_traffic(engine, mark, one_by_one(ctx, engine, stage, mode, TAKEN))
    # TAKEN: 42 over 2 ranks and 3 micro-steps is 7; over the configured 4 it would be 5.25
    rig.assert_change(engine, rig.expected(2, TAKEN, divisor=TAKEN))
    rig.assert_ranks_equal(engine)
    # and the next, full, step by its own four
    for k in range(CONFIGURED):
        run(engine, mode, house(engine, ctx.rank, [k]))
        engine.step()
    assert engine.global_steps == 2
    total = rig.expected(2, TAKEN, divisor=TAKEN) + rig.expected(2, CONFIGURED, divisor=CONFIGURED)
    rig.assert_change(engine, total)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_the_sum_where_nothing_is_configured(ctx: RankContext, stage: int, mode: str) -> None:
    engine = rig.start(ctx, rig.House(), stage)
    mark = engine.ledger.mark()
    run(engine, mode, house(engine, ctx.rank, range(3)))
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 3))
    rig.assert_change(engine, 21.0)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_micro_steps_are_counted_not_backwards(ctx: RankContext, stage: int, mode: str) -> None:
    """Micro-steps of 2, 0 and 1 backwards: divided by W times 3; backwards within one are added."""
    engine = rig.start(ctx, rig.House(), stage, config={"gradient_accumulation_steps": 3})
    mark = engine.ledger.mark()
    for ks in ([0, 1], [], [2]):
        run(engine, mode, house(engine, ctx.rank, ks))
        engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    as_they_go = 3 if mode == "bare" else 2  # a window without a backward sends nothing
    assert_num_reductions(engine, stage, mark, as_they_go if stage >= 2 else 1)
    rig.assert_change(engine, 7.0)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["bare", "window"])
@distributed(world_size=2)
def test_the_caller_may_leave_the_division_out(ctx: RankContext, stage: int, mode: str) -> None:
    """scale_wrt_gas=False: the sum, and the loss comes back as it was."""
    engine = rig.start(ctx, rig.House(), stage, config={"gradient_accumulation_steps": 3})
    w = engine.module.get_parameter("w")
    with engine.full_parameters(), torch.no_grad():
        w.fill_(1.0)
    start = torch.tensor(float(w.numel()))
    mark = engine.ledger.mark()
    for k in range(3):
        x = rig.x_of(ctx.rank, k)
        with scope(engine, mode, 1):
            returned = engine.backward(engine(x), scale_wrt_gas=False)
        assert torch.equal(returned, start * x)
        engine.step()
    rig.assert_change(engine, 21.0, start_value=1.0)
    for k in range(3):  # and the default again in the next step
        with scope(engine, mode, 1):
            engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
    assert_num_reductions(engine, stage, mark, 6 if stage >= 2 else 2)
    rig.assert_change(engine, 28.0, start_value=1.0)
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_one_divisor_per_step(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, rig.House(), stage, config={"gradient_accumulation_steps": 2})
    mark = engine.ledger.mark()
    engine.backward(engine(rig.x_of(ctx.rank, 0)))
    engine.step()
    with pytest.raises(onefold.StateError, match="scale_wrt_gas"):
        engine.backward(engine(rig.x_of(ctx.rank, 1)), scale_wrt_gas=False)
    engine.backward(engine(rig.x_of(ctx.rank, 1)))
    engine.step()
    assert_num_reductions(engine, stage, mark, 2 if stage >= 2 else 1)
    rig.assert_change(engine, 6.5)
    rig.assert_ranks_equal(engine)
