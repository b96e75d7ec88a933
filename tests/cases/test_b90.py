"""B90: the scheduler was not saved, so a resumed run began with the first learning rate again; and
a checkpoint of an open accumulation lost its gradients.

The scheduler is part of a checkpoint, and one that is missing on one side is an error. With
gradients that no step has used nothing is saved: a clear error says so.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from onefold import CheckpointError, Engine, StateError
from tests import rig
from tests.cases.modes import MODES, during, house, run
from tests.harness import RankContext, pool_for


def engine_with(ctx: RankContext, stage: int, scheduler: Any) -> Engine:
    return rig.start(ctx, rig.House(), stage, lr_scheduler=scheduler)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def scheduled(ctx: RankContext, stage: int, folder: str) -> None:
    straight = engine_with(ctx, stage, halving)
    for k in range(3):
        straight.backward(straight(rig.x_of(ctx.rank, k)))
        straight.step()
    straight.save_checkpoint(folder)
    engine = engine_with(ctx, stage, halving)
    engine.load_checkpoint(folder)
    for one in (straight, engine):
        assert one.optimizer.param_groups[0]["lr"] == 0.5
        one.backward(one(rig.x_of(ctx.rank, 3)))
        one.step()
        assert one.optimizer.param_groups[0]["lr"] == 0.25
    g = [rig.expected(ctx.world_size, [[k]] * ctx.world_size) for k in range(4)]
    rig.assert_change(engine, g[0] + g[1] + (g[2] + g[3]) / 2)
    rig.assert_change(straight, g[0] + g[1] + (g[2] + g[3]) / 2)
    without = engine_with(ctx, stage, None)
    with pytest.raises(CheckpointError, match=r"has a scheduler: False.*has one: True"):
        without.load_checkpoint(folder)
    rig.assert_change(without, 0.0)
    without.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert without.optimizer.param_groups[0]["lr"] == 0.5  # a setting of the param group


@pytest.mark.parametrize("stage", rig.STAGES)
def test_the_scheduler_goes_on(tmp_path: Path, stage: int) -> None:
    pool_for(2).run(scheduled, stage=stage, folder=str(tmp_path))


def pending(ctx: RankContext, stage: int, folder: str) -> None:
    engine = engine_with(ctx, stage, None)
    total = 0.0
    for mode in MODES:
        with during(mode):
            run(engine, mode, house(engine, ctx.rank, range(2)))
        for is_async in (False, True):
            with pytest.raises(StateError, match="gradients since the last step"):
                engine.save_checkpoint(folder, async_save=is_async)
        engine.step()
        total += rig.expected(ctx.world_size, 2)
        rig.assert_change(engine, total)
        engine.save_checkpoint(folder, async_save=True)
    with engine.coalesce_grad_reduction(), pytest.raises(StateError, match="inside coalesce"):
        engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", rig.STAGES)
def test_pending_gradients_are_not_left_behind(tmp_path: Path, stage: int) -> None:
    pool_for(2).run(pending, stage=stage, folder=str(tmp_path))
