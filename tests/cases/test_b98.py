"""B98. A loop that never calls the finalizer: step() itself must reduce, or refuse while a scope is
open; it may never step on unreduced gradients.
"""

from collections.abc import Callable

import pytest

from onefold import StateError
from tests.cases.wire_formula import SCOPES, assert_wire, run_house, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import (
    STAGES,
    House,
    assert_change,
    assert_ranks_equal,
    counts,
    expected,
    start,
    x_of,
)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", ["bare", "window", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_step_is_complete(ctx: RankContext, stage: int, mode: str) -> None:
    """Through the engine, and through the optimizer, as a plain torch loop does."""
    engine = start(ctx, House(), stage)
    calls: list[Callable[[], object]] = [engine.step, engine.optimizer.step]
    for steps, step in enumerate(calls, start=1):
        mark = engine.ledger.mark()
        run_house(ctx, engine, mode, 2)
        step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
        assert_change(engine, steps * expected(ctx.world_size, 2))
    assert_ranks_equal(engine)
    assert engine.global_steps == 2


@distributed()
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_scope_left_open(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, House(), stage)
    mark = engine.ledger.mark()
    left_open = scope(engine, mode, 2)
    left_open.__enter__()
    for k in range(2):
        engine.backward(engine(x_of(ctx.rank, k)))
        name = "no_sync" if mode == "no_sync" else "coalesce_grad_reduction"
        with pytest.raises(StateError, match=name):
            engine.step()
        with pytest.raises(StateError, match=name):
            engine.optimizer.step()
    assert engine.global_steps == engine.micro_steps == 0
    left_open.__exit__(None, None, None)
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
    assert_change(engine, expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_the_boundary_is_never_declared(ctx: RankContext, stage: int) -> None:
    """The caller owns the boundary and forgets it: every step() is one, and every one is whole."""
    config = {"gradient_accumulation_steps": 4, "managed_gradient_accumulation": False}
    engine = start(ctx, House(), stage, config=config)
    for steps in range(1, 3):
        run_house(ctx, engine, "bare", 2)
        engine.step()
        assert_change(engine, steps * expected(ctx.world_size, 2))
    assert_ranks_equal(engine)
