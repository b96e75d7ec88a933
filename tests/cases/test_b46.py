"""B46. A backward that the engine was not told about (``loss.backward()``, a vector's, a joint one)
must do all that ``engine.backward`` does.
"""

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.cases.wire_formula import MODES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_change, assert_ranks_equal, counts, expected, start, x_of

WAYS = ["engine", "loss", "vector", "joint", "inside a hook"]


class Rows(nn.Module):
    """The house rig before its sum: ``[numel]``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7))

    def forward(self, x: float) -> Tensor:
        return self.w * x


def _backwards(engine: onefold.Engine, way: str, xs: list[float]) -> None:
    if way == "engine":
        for x in xs:
            engine.backward(engine(x).sum())
    elif way == "loss":
        for x in xs:
            engine(x).sum().backward()
    elif way == "vector":
        for x in xs:
            rows = engine(x)
            rows.backward(torch.ones_like(rows))
    elif way == "joint":
        torch.autograd.backward([engine(x).sum() for x in xs])
    else:
        loss = torch.ones((), requires_grad=True) * 1.0
        loss.register_hook(lambda _grad: _replay(engine, xs))
        loss.backward()


@torch.enable_grad()
def _replay(engine: onefold.Engine, xs: list[float]) -> None:
    """Backwards of their own inside another backward, where gradients are disabled by default."""
    _backwards(engine, "loss", xs)


@distributed()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_every_way_is_thirteen(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, Rows(), stage)
    for steps, way in enumerate(WAYS, start=1):
        backwards = 1 if way == "joint" else 2
        mark = engine.ledger.mark()
        with scope(engine, mode, backwards):
            _backwards(engine, way, [x_of(ctx.rank, k) for k in range(2)])
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=backwards, forwards=2))
        assert_change(engine, steps * expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


@distributed(world_size=3)
@pytest.mark.parametrize("stage", STAGES)
def test_ways_mix_within_one_step(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, Rows(), stage)
    for steps, mode in enumerate(MODES, start=1):
        mark = engine.ledger.mark()
        with scope(engine, mode, 3):
            for k, way in enumerate(["vector", "engine", "loss"]):
                _backwards(engine, way, [x_of(ctx.rank, k)])
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=3))
        assert_change(engine, steps * expected(ctx.world_size, 3))
    assert_ranks_equal(engine)
