"""B15: overlap learns in the first step how often a parameter becomes ready, and then waits for
backwards that never come, or sends before the last one, when the next step has another number.

Every step stands for itself: right, and reduced once per unit, whatever N was before.
"""

import itertools

import pytest

from tests import rig
from tests.cases.modes import (
    MODES,
    TINY,
    Rooms,
    assert_rooms,
    assert_traffic,
    during,
    house,
    num_units,
    run,
    traffic,
    usual,
)
from tests.harness import RankContext, distributed

NUMBERS = (2, 1, 3, 2)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[2, 3])
def test_every_number_of_backwards(ctx: RankContext, stage: int) -> None:
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY)
    assert num_units(engine) == 3
    total = 0.0
    for mode, backwards in itertools.product(MODES, NUMBERS):
        with during(mode, backwards):
            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, range(backwards)))
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, backwards))
            total += rig.expected(ctx.world_size, backwards)
            assert_rooms(engine, [total, 2 * total, 3 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_last_backward_takes_the_reductions_along(ctx: RankContext, stage: int) -> None:
    """Overlap is on: they leave inside the declared last backward, and not before it."""
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY)
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    for backwards in NUMBERS:
        with engine.coalesce_grad_reduction(backwards=backwards):
            mark = engine.ledger.mark()
            for k in range(backwards):
                assert rig.counts(engine, mark) == {}, f"sent before backward {k} of {backwards}"
                engine.backward(engine(rig.x_of(ctx.rank, k)))
            assert rig.counts(engine, mark) == {kind: 3}
        assert rig.counts(engine, mark) == {kind: 3}
        engine.step()
    total = sum(rig.expected(2, backwards) for backwards in NUMBERS)
    assert_rooms(engine, [total, 2 * total, 3 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_flag_arms_one_step_only(ctx: RankContext, stage: int) -> None:
    """The last backward of a step marked by the flag; the next step without a mark."""
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY)
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    for is_marked in (True, False, True):
        with engine.coalesce_grad_reduction():
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            if is_marked:
                engine.set_gradient_accumulation_boundary(True)
            mark = engine.ledger.mark()
            engine.backward(engine(rig.x_of(ctx.rank, 1)))
            assert rig.counts(engine, mark) == ({kind: 3} if is_marked else {})
        engine.step()
        assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=0))
    assert_rooms(engine, [3 * 13.0, 6 * 13.0, 9 * 13.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_wrong_number_is_right_all_the_same(ctx: RankContext, stage: int) -> None:
    """Two are declared, and 2, 1, 3, 2 come: fewer go at the end, the surplus goes once more."""
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY)
    total = 0.0
    for backwards in NUMBERS:
        mark = engine.ledger.mark()
        with engine.coalesce_grad_reduction(backwards=2):
            for k in range(backwards):
                engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
        reductions = 3 if backwards <= 2 else 6
        assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=reductions, gathers=3))
        total += rig.expected(2, backwards)
        assert_rooms(engine, [total, 2 * total, 3 * total])
