"""B21: a context restores "on" instead of what was before, or reduces on its way out of an error,
so that all ranks step on a partial gradient.

An inner scope's end changes nothing for the outer one. Leaving a window by an exception drops the
step on all ranks, step() refuses until a backward has run again, and the next step is clean.
"""

import pytest

import onefold
from tests import rig
from tests.cases.modes import (
    MODES,
    TINY,
    Rooms,
    assert_rooms,
    assert_traffic,
    house,
    run,
    scope,
    traffic,
    usual,
)
from tests.harness import RankContext, distributed


class Boom(Exception):
    """What a body raises."""


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("outer", ["no_sync", "window"])
@pytest.mark.parametrize("inner", ["no_sync", "window", "armed"])
@distributed(world_size=2)
def test_after_an_inner_scope_the_outer_one_still_keeps(
    ctx: RankContext, stage: int, outer: str, inner: str
) -> None:
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
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
    assert_rooms(engine, [21.0, 42.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["window", "armed"])
@pytest.mark.parametrize("raising", ["rank 0", "rank 1", "all"])
@distributed(world_size=[2, 3])
def test_a_window_that_failed(ctx: RankContext, stage: int, mode: str, raising: str) -> None:
    """After backward 1 of 2 some rank raises and its loop catches it."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    raises = raising in (f"rank {ctx.rank}", "all")
    try:
        with scope(engine, mode, 2):
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            if raises:
                raise Boom("data ran out")
            engine.backward(engine(rig.x_of(ctx.rank, 1)))
    except Boom:
        assert raises
    except onefold.WindowAborted as error:
        assert not raises
        assert error.rank == (0 if raising != "rank 1" else 1)
        assert "Boom: data ran out" in str(error)
        assert error.dropped_backwards == 2
    else:
        raise AssertionError("the window ended as if nothing had happened")
    assert engine.last_window is not None
    assert engine.last_window.outcome == "aborted"

    with pytest.raises(onefold.StateError, match="aborted"):
        engine.step()
    assert_rooms(engine, [0.0, 0.0])

    mark = engine.ledger.mark()
    run(engine, mode, house(engine, ctx.rank, range(2)))
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
    total = rig.expected(ctx.world_size, 2)
    assert_rooms(engine, [total, 2 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("inner", ["window", "armed"])
@distributed(world_size=2)
def test_a_nested_window_dooms_the_outermost(ctx: RankContext, stage: int, inner: str) -> None:
    """The error was caught inside the outer window: its end tells everybody, rank 0 too."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)
    with pytest.raises(onefold.WindowAborted, match="Boom"), engine.coalesce_grad_reduction():
        try:
            with scope(engine, inner, 1):
                engine.backward(engine(rig.x_of(ctx.rank, 0)))
                if ctx.rank == 0:
                    raise Boom
        except Boom:
            assert ctx.rank == 0
        engine.backward(engine(rig.x_of(ctx.rank, 1)))
    run(engine, "window", house(engine, ctx.rank, range(2)))
    engine.step()
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
    run(engine, "window", house(engine, ctx.rank, range(2)))
    engine.step()
    assert_rooms(engine, [13.0, 26.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@distributed(world_size=2)
def test_a_backward_that_raised(ctx: RankContext, stage: int, mode: str) -> None:
    """It has left partial sums; catching its error inside the body does not make them whole."""
    engine = rig.start(ctx, Rooms(3, 17), stage, zero=TINY)

    def fail(_grad: object) -> None:
        raise Boom

    def backwards() -> None:
        with scope(engine, mode, 2):
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            loss = engine(rig.x_of(ctx.rank, 1))
            loss.register_hook(fail)
            with pytest.raises(Boom):
                engine.backward(loss)

    if mode in ("window", "armed"):
        with pytest.raises(onefold.WindowAborted, match="Boom"):
            backwards()
    else:
        backwards()
    with pytest.raises(onefold.StateError):
        engine.step()
    assert_rooms(engine, [0.0, 0.0])
    engine.zero_grad()
    mark = engine.ledger.mark()
    run(engine, mode, house(engine, ctx.rank, range(2)))
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, mode, 2))
    assert_rooms(engine, [13.0, 26.0])
