"""B65: ranks that decide by what they see themselves: one skips, another steps, and their scales
drift apart. Here one element of one rank's gradient is not finite, and one shard alone has it.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import MODES, during, scope
from tests.harness import RankContext, distributed

NUMEL = 192  # several 64-byte lines: every rank has a piece
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FIELDS = [*((stage, False) for stage in rig.STAGES), *((stage, True) for stage in (1, 2, 3))]


class Weighted(nn.Module):
    """The gradient of ``w`` is what is fed in."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x.to(self.w.dtype)).sum()


def _x(rank: int, k: int) -> Tensor:
    return torch.full((NUMEL,), rig.x_of(rank, k))


def _spoilt(ctx: RankContext, k: int, element: int) -> Tensor:
    x = _x(ctx.rank, k)
    if ctx.rank == 1 and k == 0:
        x[element] = math.inf
    return x


@distributed(world_size=[2, 3])
@pytest.mark.parametrize(("stage", "offloads"), FIELDS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_all_skip_or_none(ctx: RankContext, stage: int, offloads: bool, precision: str) -> None:
    scales = {"initial_scale_power": 8, "hysteresis": 1} if precision == "fp16" else {}
    config = {precision: {"enabled": True, **scales}}
    zero = OFFLOAD if offloads else {}
    engine = rig.start(ctx, Weighted(), stage, config=config, zero=zero)
    scale, change = engine.loss_scaler.scale, rig.expected(ctx.world_size, 2)
    for done, mode in enumerate(MODES):
        element = (0, NUMEL - 1)[done % 2]  # in the first rank's shard, in the last one's
        with during(mode, element):
            with scope(engine, mode, 2):
                for k in range(2):
                    engine.backward(engine(_spoilt(ctx, k, element)))
            engine.step()
            if precision == "fp16":
                scale /= 2
            told = (engine.was_step_applied(), engine.skipped_steps, engine.loss_scaler.scale)
            assert rig.gathered(told) == [(False, done + 1, scale)] * ctx.world_size
            rig.assert_change(engine, done * change)
            with scope(engine, mode, 2):
                for k in range(2):
                    engine.backward(engine(_x(ctx.rank, k)))
            engine.step()
            told = (engine.was_step_applied(), engine.skipped_steps, engine.loss_scaler.scale)
            assert rig.gathered(told) == [(True, done + 1, scale)] * ctx.world_size
            rig.assert_change(engine, (done + 1) * change)
            rig.assert_ranks_equal(engine)


@distributed(world_size=3)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_uneven_backwards_move_one_scale(ctx: RankContext, stage: int) -> None:
    """Ranks with different numbers of backwards, among them none, in a window."""
    config = {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}}
    engine = rig.start(ctx, Weighted(), stage, config=config)
    for step, bad_rank in enumerate((2, None, 1, None)):
        with engine.coalesce_grad_reduction():
            for k in range(ctx.rank):  # rank 0 has none
                x = _x(ctx.rank, k)
                engine.backward(engine(x * math.inf if ctx.rank == bad_rank else x))
        engine.step()
        told = (engine.was_step_applied(), engine.loss_scaler.scale)
        scale = 2.0 ** (6 - (step + 2) // 2)
        assert rig.gathered(told) == [(bad_rank is None, scale)] * 3
    rig.assert_change(engine, 2 * rig.expected(3, [range(0), range(1), range(2)]))
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
def test_the_rig_spoils_one_shard(ctx: RankContext) -> None:
    """Negative control: but for the exchange rank 0 would see nothing of it."""
    engine = rig.start(ctx, Weighted(), 2)
    assert isinstance(engine, onefold.Engine)
    engine.backward(engine(_spoilt(ctx, 0, NUMEL - 1)))
    engine.reduce_gradients()
    piece = engine.optimizer.param_groups[0]["params"][0]
    assert bool(torch.isfinite(piece.grad).all()) is (ctx.rank == 0)
    assert not math.isfinite(engine.get_global_grad_norm() or 0.0)
