"""B23: synchronisation is switched off and never on again: two backwards, a step, and the weights
have not moved, without a message.

A scope that is still open at step() is refused by name, nothing is lost by that, and every way out
of a scope leaves the engine as it was.
"""

import contextlib

import pytest

import onefold
from tests import rig
from tests.cases.modes import (
    SCOPES,
    TINY,
    Rooms,
    assert_num_reductions,
    assert_rooms,
    during,
    num_units,
    scope,
)
from tests.harness import RankContext, distributed


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=2)
def test_left_open(ctx: RankContext, stage: int, mode: str) -> None:
    """step(), optimizer.step() and reduce_gradients() raise; leaving the scope mends it."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    opened = contextlib.ExitStack()
    opened.enter_context(scope(engine, mode, 3))  # armed for a third that does not come
    for k in range(2):
        engine.backward(engine(rig.x_of(ctx.rank, k)))
    mark = engine.ledger.mark()
    for call in (engine.step, engine.optimizer.step, engine.reduce_gradients):
        with pytest.raises(onefold.StateError, match="with-block"):
            call()
    assert rig.counts(engine, mark) == {}
    assert engine.global_steps == 0
    opened.close()
    engine.step()
    assert_rooms(engine, [13.0, 26.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", SCOPES)
@distributed(world_size=2)
def test_every_way_out_switches_it_on_again(ctx: RankContext, stage: int, mode: str) -> None:
    """Afterwards a bare backward reduces as it goes at stages 2-3, and a step moves the weights."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    for steps, way_out in enumerate(["end", "break", "error"], start=1):
        with during(way_out), contextlib.suppress(KeyError):
            for _ in range(2):
                with scope(engine, mode, 2):
                    engine.backward(engine(rig.x_of(ctx.rank, 5)))
                    if way_out == "break":
                        break
                    if way_out == "error":
                        raise KeyError
        engine.zero_grad()
        mark = engine.ledger.mark()
        for k in range(2):
            engine.backward(engine(rig.x_of(ctx.rank, k)))
        assert_num_reductions(engine, stage, mark, 2 * num_units(engine) if stage >= 2 else 0)
        engine.step()
        assert_rooms(engine, [13.0 * steps, 26.0 * steps])
