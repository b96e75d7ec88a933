"""B93. A scheduler that advances with micro-steps or skipped steps: it moves once per real step,
whoever steps it.
"""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import onefold
from tests.cases.wire_formula import assert_wire, wire
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

MICRO_STEPS, STEPS = 3, 4


def _halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Powers of two, so that every update is exact."""
    return LambdaLR(optimizer, lambda step: 0.5**step)


def _engine(ctx: RankContext, stage: int, is_passed: bool) -> tuple[onefold.Engine, LRScheduler]:
    arguments: dict[str, Any] = {"lr_scheduler": _halving} if is_passed else {}
    config = {"gradient_accumulation_steps": MICRO_STEPS}
    engine = start(ctx, House(), stage, config=config, **arguments)
    scheduler = engine.lr_scheduler if is_passed else _halving(engine.optimizer)
    assert scheduler is not None
    return engine, scheduler


@distributed()
@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "user-stepped"])
@pytest.mark.parametrize("stage", STAGES)
def test_once_per_real_step(ctx: RankContext, stage: int, is_passed: bool) -> None:
    engine, scheduler = _engine(ctx, stage, is_passed)
    moved = 0.0
    for step in range(STEPS):
        mark = engine.ledger.mark()
        for k in range(MICRO_STEPS):
            assert scheduler.get_last_lr() == [0.5**step]
            engine.backward(engine(x_of(ctx.rank, MICRO_STEPS * k)))  # sums that divide by 3
            is_boundary = engine.is_gradient_accumulation_boundary()
            assert is_boundary == (k == MICRO_STEPS - 1)
            engine.step()
            if is_boundary and not is_passed:
                scheduler.step()
        assert_wire(counts(engine, mark), wire(engine, "bare", backwards=MICRO_STEPS))
        every = [range(0, MICRO_STEPS * MICRO_STEPS, MICRO_STEPS)] * ctx.world_size
        moved += expected(ctx.world_size, every, divisor=MICRO_STEPS) * 0.5**step
        assert_change(engine, moved)
    assert engine.global_steps == STEPS
    assert engine.micro_steps == STEPS * MICRO_STEPS
    assert scheduler.last_epoch == STEPS
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_held_when_a_scaler_skips(ctx: RankContext, stage: int) -> None:
    """Four steps, the third not finite on one rank: three real ones, at 1, 1/2 and 1/4."""
    engine = start(ctx, House(64), stage, lr_scheduler=_halving)
    scheduler = engine.lr_scheduler
    assert scheduler is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    seen = []
    for step in range(4):
        with engine.coalesce_grad_reduction():
            for k in range(MICRO_STEPS):
                factor = float("inf") if step == 2 and ctx.rank == 1 and k == 1 else 1.0
                engine.backward(scaler.scale(engine(x_of(ctx.rank, k)) * factor))
        engine.reduce_gradients()
        scaler.step(engine.optimizer)
        scaler.update()
        engine.zero_grad()
        seen.append(scheduler.last_epoch)
    assert seen == [1, 2, 2, 3]
    assert_change(engine, expected(ctx.world_size, MICRO_STEPS) * (1 + 0.5 + 0.25))
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_held_by_deferral_and_refusal(ctx: RankContext, stage: int) -> None:
    """Windows, no_sync, refused and deferred steps move nothing."""
    engine = start(ctx, House(), stage, lr_scheduler=_halving)
    scheduler = engine.lr_scheduler
    assert scheduler is not None
    epochs = []
    with engine.no_sync():
        engine.backward(engine(x_of(ctx.rank, 0)))
        with pytest.raises(onefold.StateError):
            engine.step()
    epochs.append(scheduler.last_epoch)
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    epochs.append(scheduler.last_epoch)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(x_of(ctx.rank, 1)))
    engine.reduce_gradients()
    epochs.append(scheduler.last_epoch)
    engine.step()
    epochs.append(scheduler.last_epoch)
    assert epochs == [0, 0, 0, 1]
    assert_change(engine, expected(ctx.world_size, 2))
    assert_ranks_equal(engine)
