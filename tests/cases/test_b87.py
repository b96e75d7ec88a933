"""B87: moments or the step counter lost on resume: moments that the optimizer makes in its first
step were not there to be loaded into, and a counter outside of the state began at 0.

A fresh engine that has never stepped has everything after ``load_checkpoint``, and goes on exactly.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import rig
from tests.cases.modes import MODES, during, house, run
from tests.harness import RankContext, pool_for


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def resumed(ctx: RankContext, stage: int, folder: str, loses: bool) -> None:
    straight = rig.start(ctx, rig.House(), stage, optimizer=adam)
    for mode in MODES:
        with during(mode):
            run(straight, mode, house(straight, ctx.rank, range(2)))
        straight.step()
    straight.save_checkpoint(folder)
    engine = rig.start(ctx, rig.House(), stage, optimizer=adam)
    assert not engine.optimizer.state
    engine.load_checkpoint(folder, load_optimizer_states=not loses)
    assert engine.global_steps == straight.global_steps == len(MODES)
    for one in (straight, engine):
        for k in range(3):
            one.backward(one(rig.x_of(ctx.rank, k)))
            one.step()
    w, wanted = rig.weights(engine)["w"], rig.weights(straight)["w"]
    assert torch.equal(w, wanted) is not loses
    if not loses:
        for own, theirs in zip(
            engine.optimizer.state.values(), straight.optimizer.state.values(), strict=True
        ):
            assert own["step"] == theirs["step"] == len(MODES) + 3
            assert all(torch.equal(own[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("loses", [False, True], ids=["all", "negative control"])
def test_states_made_by_the_first_step_are_loaded(tmp_path: Path, stage: int, loses: bool) -> None:
    pool_for(2).run(resumed, stage=stage, folder=str(tmp_path), loses=loses)
