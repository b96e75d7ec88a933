"""B63: bf16 has no scale that could move, so a gradient that is not finite made the step vanish:
no message, the scheduler went on, and nothing trained.

A skipped step is logged, counted and told by ``was_step_applied``; the scheduler is held; and the
good step after it is right (13), which it was not where the inf had stayed in a buffer.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import MODES, during, house, scope
from tests.harness import RankContext, distributed


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What onefold's step says meanwhile."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("onefold.step"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


def _halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)


def _counters(engine: onefold.Engine) -> dict[str, Any]:
    assert engine.lr_scheduler is not None
    return {
        "applied": engine.was_step_applied(),
        "skipped": engine.skipped_steps,
        "global": engine.global_steps,
        "scheduler": engine.lr_scheduler.last_epoch,
    }


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_skip_is_said_and_the_next_step_is_right(
    ctx: RankContext, stage: int, bad: float
) -> None:
    config = {"bf16": {"enabled": True}}
    engine = rig.start(ctx, rig.House(), stage, config=config, lr_scheduler=_halving)
    change = rig.expected(ctx.world_size, 2)
    for done, mode in enumerate(MODES):
        with during(mode), _warnings() as said:
            with scope(engine, mode, 2):
                engine.backward(engine(bad))
                engine.backward(engine(rig.x_of(ctx.rank, 1)))
            engine.step()
            wanted = {"applied": False, "skipped": done + 1, "global": done, "scheduler": done}
            assert _counters(engine) == wanted
            assert not math.isfinite(engine.get_global_grad_norm() or 0.0)
            rig.assert_change(engine, done * change)
            assert len(said) == 1, said
            for words in (f"at step {done};", f"skipped, as {done + 1} so far"):
                assert words in said[0]
            with scope(engine, mode, 2):
                for loss in house(engine, ctx.rank, range(2)):
                    engine.backward(loss())
            engine.step()
            wanted = {"applied": True, "skipped": done + 1, "global": done + 1}
            assert _counters(engine) == {**wanted, "scheduler": done + 1}
            assert len(said) == 1, said
            rig.assert_change(engine, (done + 1) * change)
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_off_the_boundary_nothing_is_looked_at(ctx: RankContext, stage: int) -> None:
    """The engine counts micro-steps: a bad one is noticed on the boundary, and counted once."""
    config = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    engine = rig.start(ctx, rig.House(), stage, config=config, lr_scheduler=_halving)
    for bad in (True, False):
        for k in range(2):
            engine.backward(engine(math.inf if bad and k == 0 else rig.x_of(ctx.rank, k)))
            engine.step()
            assert engine.was_step_applied() is (not bad and k == 1)
            assert engine.skipped_steps == int(not bad or k == 1)
    assert _counters(engine) == {"applied": True, "skipped": 1, "global": 1, "scheduler": 1}
    rig.assert_change(engine, rig.expected(2, 2, divisor=2))
