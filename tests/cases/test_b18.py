"""B18: no_sync is refused at ZeRO-2/3, while trainers enter it by themselves on every micro-step
that is not the last.

It works at every stage, as deferral: entered and left once per backward, its gradients go with the
next reduction.
"""

import contextlib

import pytest

from tests import rig
from tests.cases.modes import TINY, Rooms, assert_rooms, assert_traffic, num_units, traffic
from tests.harness import RankContext, distributed


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=[2, 3])
def test_a_trainer_that_enters_it_per_micro_batch(ctx: RankContext, stage: int) -> None:
    """Inside for backwards 1 and 2, outside for 3, step; two steps of it."""
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY)
    assert num_units(engine) == 3
    for step in (1, 2):
        mark = engine.ledger.mark()
        for k in range(3):
            with engine.no_sync() if k < 2 else contextlib.nullcontext():
                engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
        # stage 3: 3 units once per scope, and twice for the bare backward
        assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=3 * 4))
        total = step * rig.expected(ctx.world_size, 3)
        assert_rooms(engine, [total, 2 * total, 3 * total])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_its_end_sends_nothing(ctx: RankContext, stage: int) -> None:
    """Not a byte, on no group, at any stage; parameters going home is free."""
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY)
    with engine.no_sync():
        mark = engine.ledger.mark()
        engine.backward(engine(rig.x_of(ctx.rank, 0)))
    assert rig.counts(engine, mark) == {}
    with engine.no_sync():
        engine.backward(engine(rig.x_of(ctx.rank, 1)))
    engine.step()
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=3))
    assert_rooms(engine, [13.0, 26.0, 39.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_with_micro_steps_counted_by_the_engine(ctx: RankContext, stage: int) -> None:
    """A trainer that also calls step() every time, as one written for DeepSpeed does."""
    config = {"gradient_accumulation_steps": 3}
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY, config=config)
    mark = engine.ledger.mark()
    for k in range(3):
        with engine.no_sync() if k < 2 else contextlib.nullcontext():
            engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
    assert engine.global_steps == 1
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=3 * 4))
    assert_rooms(engine, [7.0, 14.0, 21.0])


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("inner", ["no_sync", "window"])
@distributed(world_size=2)
def test_a_window_after_it_takes_its_gradients_along(
    ctx: RankContext, stage: int, inner: str
) -> None:
    """no_sync, then a window (or a window inside no_sync): still one reduction per unit."""
    engine = rig.start(ctx, Rooms(3, 17, 1), stage, zero=TINY)
    mark = engine.ledger.mark()
    with engine.no_sync():
        engine.backward(engine(rig.x_of(ctx.rank, 0)))
        with engine.no_sync() if inner == "no_sync" else engine.coalesce_grad_reduction():
            engine.backward(engine(rig.x_of(ctx.rank, 1)))
    with engine.coalesce_grad_reduction():
        engine.backward(engine(rig.x_of(ctx.rank, 2)))
    engine.step()
    assert_traffic(engine, mark, traffic(ctx, engine, stage, reductions=3, gathers=2 * 3))
    assert_rooms(engine, [21.0, 42.0, 63.0])
