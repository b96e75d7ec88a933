"""B05: an adapter inherits a no_sync that does nothing, so every backward is "the last" and clears
what came before it.

Each of the n backwards contributes, however the loop enters the scopes, and inside of one the
engine does keep: nothing is reduced.
"""

import pytest

import onefold
from tests import rig
from tests.cases.modes import (
    SCOPES,
    TINY,
    Rooms,
    assert_rooms,
    assert_traffic,
    num_units,
    scope,
    traffic,
)
from tests.harness import RankContext, distributed


def keeps(engine: onefold.Engine) -> bool:
    """The engine's own flag."""
    return bool(engine._transaction.keeper.units)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=2)
def test_a_loop_that_leaves_the_last_one_outside(ctx: RankContext, stage: int, mode: str) -> None:
    """All but the last in a scope of their own, as adapters' loops do."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    total = 0.0
    for backwards in (3, 5, 7):
        mark = engine.ledger.mark()
        for k in range(backwards - 1):
            with scope(engine, mode, 2):  # armed says two, so that the only one is not the last
                before = rig.counts(engine, mark)
                before.pop("all_gather", None)
                assert keeps(engine)
                engine.backward(engine(rig.x_of(ctx.rank, k)))
                after = rig.counts(engine, mark)
                after.pop("all_gather", None)
                assert after == before, "reduced inside the scope"
            assert not keeps(engine)
        engine.backward(engine(rig.x_of(ctx.rank, backwards - 1)))
        engine.step()
        # A window's end reduces where gradients are Shard; what is left goes with the last one.
        times = backwards if stage >= 2 and mode != "no_sync" else 1
        gathers = 2 * (backwards - 1) + 2 * 2
        assert_traffic(
            engine, mark, traffic(ctx, engine, stage, reductions=2 * times, gathers=gathers)
        )
        total += rig.expected(ctx.world_size, backwards)
        assert_rooms(engine, [total, 2 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=2)
def test_the_flag_follows_the_scopes(ctx: RankContext, stage: int, mode: str) -> None:
    engine = rig.start(ctx, rig.House(), stage)
    assert not keeps(engine)
    with scope(engine, mode, 1):
        assert keeps(engine)
        with scope(engine, mode, 1):
            assert keeps(engine)
        assert keeps(engine)
        engine.backward(engine(rig.x_of(ctx.rank, 0)))
    assert not keeps(engine)
    engine.step()
    rig.assert_change(engine, rig.expected(ctx.world_size, 1))
    assert num_units(engine) == 1
