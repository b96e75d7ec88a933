"""B61: a bf16 parameter that only the last micro-batch uses has a fresh gradient, where the others
have accumulated ones in fp32; mixing the two dtypes raised.
"""

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import MODES, during, scope
from tests.harness import RankContext, distributed

USES = ["last", "first", "zero filled"]


class Branches(nn.Module):
    """Branch ``a`` always, branch ``b`` if told; its gradient is ``2 x``."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x: float, factor: float | None) -> Tensor:
        loss = (self.a * x).sum()
        return loss if factor is None else loss + (self.b * (factor * x)).sum()


def _run(ctx: RankContext, engine: onefold.Engine, mode: str, use: str) -> tuple[float, float]:
    """Two micro-batches; returns the right gradients of both branches."""
    uses = {"last": (None, 2.0), "first": (2.0, None), "zero filled": (0.0, 2.0)}[use]
    with scope(engine, mode, 2):
        for k, factor in enumerate(uses):
            engine.backward(engine(rig.x_of(ctx.rank, k), factor))
    b = 2 * rig.expected(ctx.world_size, [[0 if use == "first" else 1]] * ctx.world_size)
    return rig.expected(ctx.world_size, 2), b


def _assert_gradients(engine: onefold.Engine, model: Branches, a: float, b: float) -> None:
    for param, wanted in ((model.a, a), (model.b, b)):
        found = engine.full_grad(param)
        assert found is not None
        assert torch.equal(found, torch.full_like(found, wanted)), (found, wanted)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("accumulates", ["fp32", "bf16"])
def test_one_branch_in_one_micro_batch(ctx: RankContext, stage: int, accumulates: str) -> None:
    model = Branches()
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulates}}
    engine = rig.start(ctx, model, stage, config=config)
    for mode in MODES:
        for use in USES:
            with during(mode, use):
                a, b = _run(ctx, engine, mode, use)
                engine.reduce_gradients()
                _assert_gradients(engine, model, a, b)
                engine.zero_grad()
    a, b = _run(ctx, engine, "window", "last")
    engine.step()
    state = rig.weights(engine)
    assert torch.equal(state["a"], torch.full((5,), -a, dtype=torch.bfloat16))
    assert torch.equal(state["b"], torch.full((3,), -b, dtype=torch.bfloat16))
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", ["window", "no_sync"])
def test_on_the_last_rank_only(ctx: RankContext, stage: int, mode: str) -> None:
    """A model that comes in bf16, and whose second branch one rank uses, once."""
    model = Branches(torch.bfloat16)
    engine = rig.start(ctx, model, stage)
    with scope(engine, mode, 2):
        for k, factor in enumerate((None, 2.0 if ctx.rank == 1 else None)):
            engine.backward(engine(rig.x_of(ctx.rank, k), factor))
    engine.reduce_gradients()
    _assert_gradients(engine, model, 13.0, rig.x_of(1, 1))
