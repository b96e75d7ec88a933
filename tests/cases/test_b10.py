"""B10: a loss scale that was divided out but never applied (a change of 13 / 65536), and gradients
that a bf16 step left in place (changes of 13 and then 26).
"""

from typing import Any

import pytest

from tests import rig
from tests.cases.modes import MODES, during, house, run
from tests.harness import RankContext, distributed

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
    "fp32": {},
}
SCALES = {"bf16": 1.0, "fp16": 64.0, "fp32": 1.0}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_equal_steps_change_equally(ctx: RankContext, stage: int, precision: str) -> None:
    """Without one zero_grad() of the user's."""
    engine = rig.start(ctx, rig.House(), stage, config=PRECISIONS[precision])
    assert engine.loss_scaler.scale == SCALES[precision]
    steps = 0
    for mode in MODES:
        for _ in range(2):
            with during(mode):
                run(engine, mode, house(engine, ctx.rank, range(2)))
                engine.step()
                steps += 1
                assert all(param.grad is None for param in engine.module.parameters())
                rig.assert_change(engine, 13.0 * steps)
                assert engine.get_global_grad_norm() == pytest.approx(13.0 * 7**0.5, rel=1e-6)
    rig.assert_ranks_equal(engine)
    assert engine.global_steps == steps
    assert engine.loss_scaler.scale == SCALES[precision]
