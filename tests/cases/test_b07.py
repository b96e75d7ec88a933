"""B07: what was reduced already is taken for the local accumulator and reduced again, so that the
old part grows by the number of ranks with every backward.

However often reductions happen between two steps, the sum is linear in the backwards.
"""

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
    one_by_one,
    run,
    traffic,
)
from tests.harness import RankContext, distributed

BACKWARDS = 6


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("explicitly", [False, True], ids=["at_step", "reduce_gradients"])
@distributed(world_size=2)
def test_growth_is_linear(ctx: RankContext, stage: int, explicitly: bool) -> None:
    """Each backward in a with-block of its own; with reduce_gradients() after each, or not."""
    engine = rig.start(ctx, Rooms(3, 5), stage, zero=TINY)
    assert num_units(engine) == 2
    total = 0.0
    for mode in MODES:
        with during(mode):
            mark = engine.ledger.mark()
            for k in range(BACKWARDS):
                run(engine, mode, house(engine, ctx.rank, [k]))
                if explicitly:
                    engine.reduce_gradients()
            engine.step()
            wanted = one_by_one(ctx, engine, stage, mode, BACKWARDS)
            if explicitly:
                gathers = 2 * BACKWARDS * (2 if mode == "bare" else 1)
                wanted = traffic(ctx, engine, stage, reductions=2 * BACKWARDS, gathers=gathers)
            assert_traffic(engine, mark, wanted)
            total += rig.expected(ctx.world_size, BACKWARDS)
            assert_rooms(engine, [total, 2 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[2, 3])
def test_the_average_is_right_after_each_reduction(ctx: RankContext, stage: int) -> None:
    """The growth itself, seen through full_grad: linear at every point, not only at the end."""
    engine = rig.start(ctx, rig.House(), stage)
    w = engine.module.get_parameter("w")
    for k in range(BACKWARDS):
        engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.reduce_gradients()
        found = engine.full_grad(w)
        wanted = rig.expected(ctx.world_size, k + 1)
        assert found is not None
        assert set(found.tolist()) == {wanted}, f"after backward {k}: {found}, expected {wanted}"
        engine.reduce_gradients()  # nothing is pending: the sum is not divided or added again
        again = engine.full_grad(w)
        assert again is not None
        assert set(again.tolist()) == {wanted}
    engine.step()
    rig.assert_change(engine, rig.expected(ctx.world_size, BACKWARDS))
    rig.assert_ranks_equal(engine)
