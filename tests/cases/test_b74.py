"""B74. A clip that nobody asked for, and a reported norm that is taken for the clipped one: without
the setting nothing is clipped, and the reported norm is always the one before clipping.
"""

import pytest
import torch

from tests.cases.wire_formula import assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, House, assert_change, assert_ranks_equal, counts, start, weights

NUMEL = 4  # a gradient of 5 each has the norm 10


def _gradient(ctx: RankContext) -> float:
    """Its mean over ranks is 5."""
    return 5.0 + ctx.rank - (ctx.world_size - 1) / 2


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", ["bare", "window"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_default_is_off(ctx: RankContext, stage: int, mode: str) -> None:
    for config in ({}, {"gradient_clipping": 0.0}, {"gradient_clipping": 10.5}):
        engine = start(ctx, House(NUMEL), stage, config=config)
        mark = engine.ledger.mark()
        with scope(engine, mode):
            engine.backward(engine(_gradient(ctx)))
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode))
        assert engine.get_global_grad_norm() == 10.0
        assert_change(engine, 5.0)
        assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_the_reported_norm_is_before_clipping(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(NUMEL), stage, config={"gradient_clipping": 1.0})
    for steps in range(1, 3):
        engine.backward(engine(_gradient(ctx)))
        engine.step()
        assert engine.get_global_grad_norm() == 10.0
        once = torch.full((NUMEL,), 5.0) * (1 / (10 + 1e-6))
        assert torch.equal(weights(engine)["w"], -steps * once)
    assert_ranks_equal(engine)
