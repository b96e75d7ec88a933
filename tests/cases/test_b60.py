"""B60: accumulating in bf16 loses small updates: 1.0 once and 2**-9 256 times is 1.5, and 1.0 in
bf16. Deferral adds all backwards of a step locally, so it must not do that in the model's dtype.
"""

import pytest
import torch

import onefold
from tests import rig
from tests.cases.modes import MODES, run
from tests.harness import RankContext, distributed

PARTS = [1.0] + [2.0**-9] * 256


def _run(ctx: RankContext, engine: onefold.Engine, mode: str) -> None:
    f = 1.0 + 2.0 * ctx.rank  # exact in bf16, small parts too
    run(engine, mode, [lambda x=x: engine(f * x) for x in PARTS])  # type: ignore[misc]


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_small_updates_are_kept(ctx: RankContext, stage: int, mode: str) -> None:
    """Whether the config casts the model, or the model comes in bf16."""
    is_cast = mode != "no_sync"
    house = rig.House(dtype=torch.float32 if is_cast else torch.bfloat16)
    engine = rig.start(ctx, house, stage, config={"bf16": {"enabled": is_cast}})
    assert house.w.dtype == torch.bfloat16
    _run(ctx, engine, mode)
    engine.reduce_gradients()
    found = engine.full_grad(house.w)
    assert found is not None
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((7,), 1.5 * ctx.world_size))
    engine.step()
    rig.assert_change(engine, 1.5 * ctx.world_size)
    rig.assert_ranks_equal(engine)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["window", "no_sync"])
def test_in_bf16_they_are_lost(ctx: RankContext, stage: int, mode: str) -> None:
    """The control, and what ``grad_accum_dtype`` asks for."""
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    _run(ctx, engine, mode)
    engine.step()
    rig.assert_change(engine, 1.0 * ctx.world_size)
    rig.assert_ranks_equal(engine)
