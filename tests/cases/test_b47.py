"""B47. The forward is called on something else than the engine: the inner module, a submodule, a
custom method. Gradients must still be reduced, or the step must refuse; never differ by rank.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold import StateError
from tests.cases.wire_formula import MODES, SCOPES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import (
    STAGES,
    House,
    assert_change,
    assert_ranks_equal,
    counts,
    expected,
    start,
    weights,
    x_of,
)


class Outer(nn.Module):
    """A house inside, and ways around its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = House()

    def forward(self, x: float) -> Tensor:
        return self.inner(x)

    def through_forward(self, x: float) -> Tensor:
        return self(x) * 1.0

    def raw(self, x: float) -> Tensor:
        """Reads the weight outside any module's forward."""
        return (self.inner.w * x).sum()


class Blocks(nn.Module):
    """Two repeated blocks, so that the weights are not the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(House() for _ in range(2))

    def forward(self, x: float) -> Tensor:
        return self.blocks[0](x) + self.blocks[1](x)

    def raw(self, x: float) -> Tensor:
        first, second = (block.get_parameter("w") for block in self.blocks)
        return (first * x).sum() + (second * x).sum()


def _ways(engine: onefold.Engine) -> list[Callable[[float], Tensor]]:
    module = engine.module
    assert isinstance(module, Outer)
    return [module, module.inner, module.forward, module.through_forward]


def _assert_outer(engine: onefold.Engine, gradient: float) -> None:
    w = weights(engine)["inner.w"]
    assert torch.equal(w, torch.full_like(w, -gradient)), f"{w.tolist()}, expected {-gradient}"
    assert_ranks_equal(engine)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_inner_call_is_reduced(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, Outer(), stage)
    for steps, forward in enumerate(_ways(engine), start=1):
        mark = engine.ledger.mark()
        with scope(engine, mode, 2):
            for k in range(2):
                forward(x_of(ctx.rank, k)).backward()
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
        _assert_outer(engine, steps * expected(ctx.world_size, 2))


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_a_raw_read_outside_a_window_counts_or_refuses(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, Outer(), stage)
    module = engine.module
    assert isinstance(module, Outer)
    mark = engine.ledger.mark()
    if stage < 3:
        for k in range(2):
            module.raw(x_of(ctx.rank, k)).backward()
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, "bare", backwards=2))
        _assert_outer(engine, expected(ctx.world_size, 2))
        return
    with pytest.raises(StateError, match=r"inner\.w"):
        module.raw(x_of(ctx.rank, 0)).backward()
    with pytest.raises(StateError, match="zero_grad"):
        engine.step()
    assert_wire(counts(engine, mark), {})
    engine.zero_grad()
    engine.backward(engine(x_of(ctx.rank, 0)))
    engine.step()
    _assert_outer(engine, expected(ctx.world_size, 1))


@distributed()
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_raw_read_inside_a_scope_counts(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, Outer(), stage)
    module = engine.module
    assert isinstance(module, Outer)
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        for k in range(2):
            module.raw(x_of(ctx.rank, k)).backward()
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
    _assert_outer(engine, expected(ctx.world_size, 2))


@distributed()
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_raw_read_of_a_block_inside_a_scope(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, Blocks(), stage)
    module = engine.module
    assert isinstance(module, Blocks)
    mark = engine.ledger.mark()
    with scope(engine, mode, 2):
        for k in range(2):
            module.raw(x_of(ctx.rank, k)).backward()
    engine.step()
    assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
    for name, w in weights(engine).items():
        wanted = torch.full_like(w, -expected(ctx.world_size, 2))
        assert torch.equal(w, wanted), f"{name}: {w.tolist()}, expected {wanted[:1].tolist()}"
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_of_the_module_moves_nothing(ctx: RankContext, stage: int) -> None:
    """Negative control: what is not the engine's module is not reduced into it."""
    copied = House()
    engine = start(ctx, House(), stage)
    copied(x_of(ctx.rank, 0)).backward()
    engine.step()
    assert_change(engine, 0)
    engine.backward(engine(x_of(ctx.rank, 0)))
    engine.step()
    assert_change(engine, expected(ctx.world_size, 1))
    assert_ranks_equal(engine)
