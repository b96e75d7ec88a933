"""B24: the first call of a fresh engine's life comes inside no_sync, with two backwards through
that one forward.

Nothing is learned from the first iteration, so it may run anywhere: its sum and its collectives are
those of any other.
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
    scope,
    traffic,
)
from tests.harness import RankContext, distributed


def twice(engine: onefold.Engine, rank: int, k: int) -> None:
    """Two backwards through one forward."""
    loss = engine(rig.x_of(rank, k))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=3)
def test_the_first_iteration_ever(ctx: RankContext, stage: int, mode: str) -> None:
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    total = 0.0
    for k in range(3):
        mark = engine.ledger.mark()
        with scope(engine, mode, 2):
            twice(engine, ctx.rank, k)
        engine.step()
        assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=2, gathers=2))
        total += 2 * rig.expected(ctx.world_size, [[k]] * ctx.world_size)
        assert_rooms(engine, [total, 2 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=2)
def test_the_first_iteration_uses_less_than_the_second(
    ctx: RankContext, stage: int, mode: str
) -> None:
    """Half of the model first, on one rank only; then all of it, bare and in the scope."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    with scope(engine, mode, 1):
        if ctx.rank == 0:
            engine.backward(engine(rig.x_of(0, 0), use=[1]))
    engine.step()
    assert_rooms(engine, [0.0, 2 * rig.x_of(0, 0) / 2])
    engine.backward(engine(rig.x_of(ctx.rank, 0)))
    engine.step()
    assert_rooms(engine, [6.0, 1.0 + 12.0])
    with scope(engine, mode, 2):
        twice(engine, ctx.rank, 1)
    engine.step()
    assert_rooms(engine, [6.0 + 14.0, 13.0 + 28.0])
