"""B21: a context restores "on" instead of what was before, or reduces on its way out of an error,
so that all ranks step on a partial gradient.

An inner scope's end changes nothing for the outer one. Leaving a window by an exception drops the
step on all ranks, step() refuses until a backward has run again, and the next step is clean.
"""

from collections.abc import Callable
from functools import partial

import pytest

import onefold
from tests import rig
from tests.cases.modes import (
    MODES,
    SCOPES,
    TINY,
    Rooms,
    assert_rooms,
    assert_traffic,
    during,
    house,
    run,
    scope,
    traffic,
    usual,
)
from tests.harness import RankContext, distributed


class Boom(Exception):
    """What a body raises."""


def error_of(body: Callable[[], None]) -> Exception | None:
    """What ``body`` raises, if anything."""
    try:
        body()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("outer", ["no_sync", "window"])
@distributed(world_size=2)
def test_after_an_inner_scope_the_outer_one_still_keeps(
    ctx: RankContext, stage: int, outer: str
) -> None:
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    for steps, inner in enumerate(SCOPES, start=1):
        with during(inner):
            mark = engine.ledger.mark()
            with scope(engine, outer, 3):
                inside = engine.ledger.mark()
                with scope(engine, inner, 1):
                    engine.backward(engine(rig.x_of(ctx.rank, 0)))
                engine.backward(engine(rig.x_of(ctx.rank, 1)))
                with scope(engine, inner, 1):
                    pass
                engine.backward(engine(rig.x_of(ctx.rank, 2)))
                assert rig.counts(engine, inside) == {}
            engine.step()
            assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=2, gathers=2))
            assert_rooms(engine, [steps * 21.0, steps * 42.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("raising", ["rank 0", "rank 1", "all"])
@distributed(world_size=3)
def test_a_window_that_failed(ctx: RankContext, stage: int, raising: str) -> None:
    """After backward 1 of 2 some rank raises and its loop catches it."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    total = 0.0
    for mode in ("window", "armed"):
        with during(mode):
            _fail_once(ctx, engine, mode, raising)
            with pytest.raises(onefold.StateError, match="aborted"):
                engine.step()
            assert_rooms(engine, [total, 2 * total])

            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, range(2)))
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
            total += rig.expected(ctx.world_size, 2)
            assert_rooms(engine, [total, 2 * total])


def _fail_once(ctx: RankContext, engine: onefold.Engine, mode: str, raising: str) -> None:
    raises = raising in (f"rank {ctx.rank}", "all")

    def body() -> None:
        with scope(engine, mode, 2):
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            if raises:
                raise Boom("data ran out")
            engine.backward(engine(rig.x_of(ctx.rank, 1)))

    error = error_of(body)
    if raises:
        assert type(error) is Boom, f"the window replaced the error by {error!r}"
    else:
        assert isinstance(error, onefold.WindowAborted), f"{error!r}"
        assert error.rank == (0 if raising != "rank 1" else 1)
        assert "Boom: data ran out" in str(error)
        assert error.dropped_backwards == 2
    assert engine.last_window is not None
    assert engine.last_window.outcome == "aborted"


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_nested_window_dooms_the_outermost(ctx: RankContext, stage: int) -> None:
    """The error was caught inside the outer window: its end tells everybody, rank 0 too."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)

    def failing() -> None:
        with engine.coalesce_grad_reduction(backwards=1):
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            if ctx.rank == 0:
                raise Boom

    def body() -> None:
        with engine.coalesce_grad_reduction():
            assert (error_of(failing) is not None) == (ctx.rank == 0)
            engine.backward(engine(rig.x_of(ctx.rank, 1)))

    with pytest.raises(onefold.WindowAborted, match="Boom"):
        body()
    assert_rooms(engine, [0.0, 0.0])
    mark = engine.ledger.mark()
    run(engine, "window", house(engine, ctx.rank, range(2)))
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, "window", 2))
    assert_rooms(engine, [13.0, 26.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_no_sync_that_was_left_by_an_error(ctx: RankContext, stage: int) -> None:
    """Its end decides nothing, also by an error: whole backwards stay, and the state is restored.

    The loop made up for it by itself: the other rank ran both backwards inside.
    """
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    mark = engine.ledger.mark()
    try:
        with engine.no_sync():
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            if ctx.rank == 0:
                raise Boom
            engine.backward(engine(rig.x_of(ctx.rank, 1)))
    except Boom:
        pass
    with engine.no_sync():
        if ctx.rank == 0:
            engine.backward(engine(rig.x_of(ctx.rank, 1)))
    engine.step()
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=2, gathers=2 * 2))
    assert_rooms(engine, [13.0, 26.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_window_in_no_sync_that_failed(ctx: RankContext, stage: int) -> None:
    """Nothing tells the other rank at once: step() refuses everywhere until zero_grad()."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    try:
        with engine.no_sync(), engine.coalesce_grad_reduction():
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            if ctx.rank == 0:
                raise Boom
    except Boom:
        assert ctx.rank == 0
    with pytest.raises(onefold.StateError, match="Boom"):
        engine.step()
    assert_rooms(engine, [0.0, 0.0])
    engine.zero_grad()
    mark = engine.ledger.mark()
    run(engine, "window", house(engine, ctx.rank, range(2)))
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, "window", 2))
    assert_rooms(engine, [13.0, 26.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_backward_that_raised(ctx: RankContext, stage: int) -> None:
    """It has left partial sums; catching its error inside the body does not make them whole."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    total = 0.0
    for mode in MODES:
        with during(mode):
            error = error_of(partial(_broken_backward, ctx, engine, mode))
            if mode in ("window", "armed"):
                assert isinstance(error, onefold.WindowAborted), f"{error!r}"
            else:
                assert error is None
            with pytest.raises(onefold.StateError):
                engine.step()
            assert_rooms(engine, [total, 2 * total])
            engine.zero_grad()
            mark = engine.ledger.mark()
            run(engine, mode, house(engine, ctx.rank, range(2)))
            engine.step()
            assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
            total += 13.0
            assert_rooms(engine, [total, 2 * total])


def _broken_backward(ctx: RankContext, engine: onefold.Engine, mode: str) -> None:
    def fail(_grad: object) -> None:
        raise Boom

    with scope(engine, mode, 2):
        engine.backward(engine(rig.x_of(ctx.rank, 0)))
        loss = engine(rig.x_of(ctx.rank, 1))
        loss.register_hook(fail)
        with pytest.raises(Boom):
            engine.backward(loss)
