"""B95. ``param.grad`` of a sharded engine is None or somebody's part: one documented call must give
the full averaged gradient after the reduction, raise before it, and give None after the step.
"""

import pytest
import torch
from torch import nn

import onefold
from onefold import StateError
from tests.cases.wire_formula import MODES, run_house
from tests.harness import RankContext, distributed
from tests.rig import STAGES, House, assert_change, assert_ranks_equal, expected, start, x_of


def _w(engine: onefold.Engine) -> nn.Parameter:
    assert isinstance(engine.module, House)
    return engine.module.w


def _assert_grad(engine: onefold.Engine, value: float) -> None:
    grad = engine.full_grad(_w(engine))
    assert grad is not None
    wanted = torch.full((7,), value)
    assert torch.equal(grad, wanted), f"{grad.tolist()}, expected {value} each"


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_before_and_after(ctx: RankContext, stage: int, mode: str) -> None:
    engine = start(ctx, House(), stage)
    value = expected(ctx.world_size, 2)
    for steps in range(1, 3):
        assert engine.full_grad(_w(engine)) is None
        run_house(ctx, engine, mode, 2)
        has_reduced = stage >= 2 and mode != "no_sync"
        if has_reduced:
            _assert_grad(engine, value)
        elif mode != "armed":
            with pytest.raises(StateError, match="pending"):
                engine.full_grad(_w(engine))
        mark = engine.ledger.mark()
        engine.reduce_gradients()
        assert ("reduce_scatter" in engine.ledger.since(mark)) <= (not has_reduced)
        _assert_grad(engine, value)
        _assert_grad(engine, value)  # reading changes nothing
        engine.step()
        assert engine.full_grad(_w(engine)) is None
        assert_change(engine, steps * value)
        assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_a_copy(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    run_house(ctx, engine, "window", 2)
    engine.reduce_gradients()
    grad = engine.full_grad(_w(engine))
    assert grad is not None
    grad.zero_()
    engine.step()
    assert_change(engine, expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_inside_a_window_it_raises(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(x_of(ctx.rank, 0)))
        with pytest.raises(StateError, match="pending"):
            engine.full_grad(_w(engine))
        engine.backward(engine(x_of(ctx.rank, 1)))
    engine.step()
    assert_change(engine, expected(ctx.world_size, 2))
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_micro_steps_are_averaged(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage, config={"gradient_accumulation_steps": 2})
    engine.backward(engine(x_of(ctx.rank, 0)))
    engine.step()
    engine.backward(engine(x_of(ctx.rank, 1)))
    engine.reduce_gradients()
    _assert_grad(engine, expected(ctx.world_size, 2, divisor=2))
    engine.step()
    assert_change(engine, expected(ctx.world_size, 2, divisor=2))
    assert_ranks_equal(engine)


class Branches(nn.Module):
    """One branch is used, by rank 1 only; the other never."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = House(), House()


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_untouched_and_foreign_parameters(ctx: RankContext, stage: int) -> None:
    module = Branches()
    engine = start(ctx, module, stage)
    with engine.coalesce_grad_reduction():
        if ctx.rank == 1:
            engine.backward(module.used(x_of(1, 0)))
    engine.reduce_gradients()
    grad = engine.full_grad(module.used.w)
    assert grad is not None
    assert torch.equal(grad, torch.full((7,), x_of(1, 0) / ctx.world_size))
    assert engine.full_grad(module.unused.w) is None
    with pytest.raises(ValueError, match="trainable parameter"):
        engine.full_grad(nn.Parameter(torch.zeros(7)))
    engine.step()
    assert_ranks_equal(engine)
