"""B67: a loss that is always inf sent the scale to its floor, where the loop went on for ever.

The scale halves one step at a time; after 8 skips in a row at the floor step() raises, on every
rank, and says so.
"""

import math

import pytest

import onefold
from onefold.optim.scaler import FLOOR_SKIPS
from tests import rig
from tests.harness import RankContext, distributed

POWER, FLOOR = 10, 4.0


def _config(**scaling: float) -> dict[str, dict[str, float]]:
    return {"fp16": {"enabled": True, **scaling}}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("floor", [1.0, FLOOR])
def test_forty_bad_steps(ctx: RankContext, stage: int, everywhere: bool, floor: float) -> None:
    config = _config(initial_scale_power=POWER, hysteresis=1, min_loss_scale=floor)
    engine = rig.start(ctx, rig.House(), stage, config=config)
    scale, at_floor, first_error = 2.0**POWER, 0, None
    for step in range(40):
        is_bad = everywhere or ctx.rank == 1
        engine.backward(engine(math.inf if is_bad else rig.x_of(ctx.rank, 0)))
        at_floor += scale == floor
        scale = max(scale / 2, floor)
        if at_floor >= FLOOR_SKIPS:
            first_error = step if first_error is None else first_error
            with pytest.raises(onefold.StateError, match=f"{at_floor} steps in a row") as caught:
                engine.step()
            for words in (f"lowest loss scale, {floor:g}", "fp16.min_loss_scale", "skipped"):
                assert words in str(caught.value)
            engine.zero_grad()
        else:
            engine.step()
        assert rig.gathered(engine.loss_scaler.scale) == [scale] * 2, f"step {step}"
        assert engine.skipped_steps == step + 1
    # From 2**10 down to the floor one halving a step, and 8 more.
    assert first_error == POWER - math.log2(floor) + FLOOR_SKIPS - 1
    rig.assert_change(engine, 0.0)
    engine.backward(engine(rig.x_of(ctx.rank, 0)))
    engine.step()  # a good step is possible after all
    rig.assert_change(engine, rig.expected(2, 1))
    assert engine.was_step_applied()


@distributed(world_size=2)
def test_a_static_scale_gives_up_alike(ctx: RankContext) -> None:
    engine = rig.start(ctx, rig.House(), 2, config=_config(loss_scale=32.0))
    for step in range(FLOOR_SKIPS):
        engine.backward(engine(math.inf))
        if step == FLOOR_SKIPS - 1:
            with pytest.raises(onefold.StateError, match=r"the one loss scale, 32.*loss_scale"):
                engine.step()
        else:
            engine.step()
        assert engine.loss_scaler.scale == 32.0


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_a_good_step_begins_the_count_anew(ctx: RankContext, stage: int) -> None:
    config = _config(initial_scale_power=0, hysteresis=1)
    engine = rig.start(ctx, rig.House(), stage, config=config)
    for done in range(2):
        for _ in range(FLOOR_SKIPS - 1):
            engine.backward(engine(math.inf))
            engine.step()
        engine.backward(engine(rig.x_of(ctx.rank, 0)))
        engine.step()
        rig.assert_change(engine, (done + 1) * rig.expected(2, 1))
