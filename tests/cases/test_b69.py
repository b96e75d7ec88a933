"""B69. The norm of this rank's shard taken for the global norm: every rank must report and clip by
the one norm over all parameters, each counted once, whatever its shard holds.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.cases.wire_formula import MODES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, gathered, start, weights

NUMEL = 192  # of fp32: every rank of 2, 3 or 4 has a piece


class Weighted(nn.Module):
    """The gradient of ``w`` is what is fed in."""

    def __init__(self, numel: int = NUMEL) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def _three_and_four(ctx: RankContext) -> Tensor:
    """Ranks differ, and their mean is 3 in the first rank's shard and 4 in the last one's."""
    x = torch.zeros(NUMEL)
    off = ctx.rank - (ctx.world_size - 1) / 2
    x[0], x[-1] = 3 + off, 4 - off
    return x


def _assert_weights(engine: onefold.Engine, gradient: Tensor) -> None:
    assert torch.equal(weights(engine)["w"], -gradient)
    assert_ranks_equal(engine)


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("mode", ["bare", "window"])
@pytest.mark.parametrize("stage", STAGES)
def test_three_and_four_are_five(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, Weighted(), stage, config={"gradient_clipping": 2.5})
    wanted = torch.zeros(NUMEL)
    wanted[0], wanted[-1] = 3, 4
    mark = engine.ledger.mark()
    with scope(engine, mode):
        engine.backward(engine(_three_and_four(ctx)))
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode))
    assert gathered(engine.get_global_grad_norm()) == [5.0] * ctx.world_size
    # The factor of torch.nn.utils.clip_grad_norm_.
    _assert_weights(engine, wanted * (2.5 / (5 + 1e-6)))


@distributed()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_can_be_read_before_the_step(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, Weighted(), stage)
    assert engine.get_global_grad_norm() is None
    with scope(engine, mode):
        engine.backward(engine(_three_and_four(ctx)))
    engine.reduce_gradients()
    assert gathered(engine.get_global_grad_norm()) == [5.0] * ctx.world_size
    engine.step()
    assert engine.get_global_grad_norm() == 5.0
    assert_ranks_equal(engine)


class Several(nn.Module):
    """Tied, unused, empty and double parameters, in several units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weighted(1) for _ in range(3))
        self.tied = self.blocks[0]
        self.unused = nn.Parameter(torch.ones(5))
        self.empty = nn.Parameter(torch.ones(0))
        self.wide = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: float) -> Tensor:
        one = torch.full((1,), x)
        total = self.blocks[0](one) + self.blocks[1](one * 2) + self.blocks[2](one * 4)
        return total + self.tied(one) * 3 + (self.wide * 4 * x).sum() + self.empty.sum()


@distributed(world_size=[1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_every_parameter_counts_once(ctx: RankContext, stage: int) -> None:
    """Gradients 1 + 3, 2, 4 and 4, over several units and dtypes: the root of 52."""
    engine = start(ctx, Several(), stage, zero={"reduce_bucket_size": 1})
    with engine.coalesce_grad_reduction():
        engine.backward(engine(1.0 + ctx.rank - (ctx.world_size - 1) / 2))
    engine.step()
    wanted = float(torch.tensor(math.sqrt(52.0)))
    assert gathered(engine.get_global_grad_norm()) == [wanted] * ctx.world_size
    found = weights(engine)
    assert found["blocks.0.w"].item() == -4
    assert torch.equal(found["unused"], torch.ones(5))
    assert_ranks_equal(engine)
