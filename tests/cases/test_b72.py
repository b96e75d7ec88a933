"""B72. Clipping every micro-batch instead of the sum of the step: the norm is taken, and the factor
applied, once per step, and nothing clips while a scope is open.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from onefold import StateError
from tests.cases.wire_formula import MODES, SCOPES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, start, weights


class Two(nn.Module):
    """Two weights, so that gradients have a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def _micro_batch(ctx: RankContext, k: int) -> Tensor:
    """Ranks differ; the mean over ranks is (6, 8) for k = 0 and (6, -8) for k = 1: norms 10, 10."""
    off = ctx.rank - (ctx.world_size - 1) / 2
    return torch.tensor([6.0 + off, (8.0 if k == 0 else -8.0) - off])


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_is_clipped_once(ctx: RankContext, stage: int, mode: str) -> None:
    """The sum is (12, 0). Clipped one by one the two would add up to (1.2, 0) instead of (1, 0)."""
    engine = start(ctx, Two(), stage, config={"gradient_clipping": 1.0})
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        for k in range(2):
            engine.backward(engine(_micro_batch(ctx, k)))
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
    assert engine.get_global_grad_norm() == 12.0
    wanted = torch.tensor([12.0, 0.0]) * (1 / (12 + 1e-6))
    assert torch.equal(weights(engine)["w"], -wanted)
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_micro_steps_do_not_clip(ctx: RankContext, stage: int) -> None:
    """Two micro-steps off and on the boundary: the mean is (6, 0)."""
    config = {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2}
    engine = start(ctx, Two(), stage, config=config)
    for k in range(2):
        assert engine.get_global_grad_norm() is None
        engine.backward(engine(_micro_batch(ctx, k)))
        engine.step()
    assert engine.get_global_grad_norm() == 6.0
    wanted = torch.tensor([6.0, 0.0]) * (1 / (6 + 1e-6))
    assert torch.equal(weights(engine)["w"], -wanted)
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_clips_inside_a_scope(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, Two(), stage, config={"gradient_clipping": 1.0})
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        for k in range(2):
            engine.backward(engine(_micro_batch(ctx, k)))
            for call in (engine.step, engine.reduce_gradients, engine.optimizer.step):
                with pytest.raises(StateError, match="with-block"):
                    call()
            assert engine.get_global_grad_norm() is None
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
    assert math.isclose(weights(engine)["w"].norm().item(), 1.0, rel_tol=1e-6)  # 12 / (12 + 1e-6)
    assert_ranks_equal(engine)
