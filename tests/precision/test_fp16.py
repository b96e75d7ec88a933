"""fp16: the loss is scaled, the scale moves in step() alone, and a backward that nobody scaled is
refused before its first unit is ready.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from tests import rig
from tests.cases.modes import MODES, TINY, during, scope
from tests.harness import RankContext, distributed

POWER = 6


def _config(**scaling: float) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": POWER, **scaling}}


def _start(ctx: RankContext, stage: int, **scaling: float) -> onefold.Engine:
    return rig.start(ctx, rig.House(), stage, config=_config(**scaling))


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("scaling", [{}, {"loss_scale": 96.0}, {"loss_scale": 0.25}], ids=str)
def test_scaled_once_and_divided_once(
    ctx: RankContext, stage: int, scaling: dict[str, float]
) -> None:
    engine = _start(ctx, stage, **scaling)
    scale = scaling.get("loss_scale", 2.0**POWER)
    total = 0.0
    for mode in MODES:
        for backwards in (1, 3):
            with during(mode, backwards):
                assert engine.loss_scaler.scale == scale
                with scope(engine, mode, backwards):
                    for k in range(backwards):
                        loss = engine(rig.x_of(ctx.rank, k))
                        assert torch.equal(engine.backward(loss), loss.detach())
                engine.step()
                total += rig.expected(ctx.world_size, backwards)
                wanted = torch.full((7,), -total).half()
                assert torch.allclose(rig.weights(engine)["w"], wanted, rtol=2.0**-11, atol=0)
                found = engine.get_global_grad_norm()
                norm = rig.expected(ctx.world_size, backwards) * 7**0.5
                assert found == pytest.approx(norm, rel=2.0**-10)  # of the unscaled gradient
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_the_scale_lets_small_gradients_through(ctx: RankContext, stage: int, mode: str) -> None:
    """2**-26 is zero in fp16; 64 times as much is not. The master takes it in fp32."""
    engine = _start(ctx, stage)
    assert float(torch.tensor(2.0**-26).half()) == 0.0
    with scope(engine, mode, 2):
        for _ in range(2):
            engine.backward(engine(1.0).float() * 2.0**-26)
    engine.step()
    for piece in engine.optimizer.param_groups[0]["params"]:
        assert torch.equal(piece, torch.full_like(piece, -(2.0**-25)))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_it_moves_in_step_alone(ctx: RankContext, stage: int) -> None:
    """Whatever a window or a step sees in between, all its backwards have one scale."""
    engine = _start(ctx, stage, hysteresis=1, loss_scale_window=2)
    scale = 2.0**POWER
    bad_steps, moves = {1, 2}, [1, 0.5, 0.5, 1, 1, 2, 1, 2]
    # A doubling every second clean step, but the first clean one after a bad one does not count.
    for step, factor in enumerate(moves):
        with engine.coalesce_grad_reduction():
            for k in range(3):
                is_bad = step in bad_steps and k == 1 and ctx.rank == 0
                engine.backward(engine(math.inf if is_bad else rig.x_of(ctx.rank, k)))
                assert engine.loss_scaler.scale == scale
        assert engine.loss_scaler.scale == scale
        engine.reduce_gradients()
        assert engine.loss_scaler.scale == scale
        engine.step()
        scale *= factor
        assert rig.gathered(engine.loss_scaler.scale) == [scale] * 2, f"step {step}"
        assert engine.was_step_applied() is (step not in bad_steps)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_dropped_gradients_do_not_move_it(ctx: RankContext, stage: int) -> None:
    engine = _start(ctx, stage, hysteresis=1)
    engine.backward(engine(math.inf))
    engine.zero_grad()
    engine.backward(engine(rig.x_of(ctx.rank, 0)))
    engine.step()
    assert (engine.loss_scaler.scale, engine.skipped_steps) == (2.0**POWER, 0)
    rig.assert_change(engine, rig.expected(2, 1))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_counted_micro_steps_have_one_scale(ctx: RankContext, stage: int) -> None:
    config = {**_config(hysteresis=1), "gradient_accumulation_steps": 2}
    engine = rig.start(ctx, rig.House(), stage, config=config)
    for step, bad in enumerate((True, False)):
        for k in range(2):
            scale = engine.loss_scaler.scale
            engine.backward(engine(math.inf if bad and k == 0 else rig.x_of(ctx.rank, k)))
            engine.step()
            assert engine.loss_scaler.scale == scale / (2 if bad and k == 1 else 1)
        assert engine.skipped_steps == 1, step
    rig.assert_change(engine, rig.expected(2, 2, divisor=2))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_the_scheduler_is_held(ctx: RankContext, stage: int) -> None:
    make = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    engine = rig.start(ctx, rig.House(), stage, config=_config(), lr_scheduler=make)
    wanted = 0.0
    for x, lr in ((math.inf, 1.0), (2.0, 1.0), (math.nan, 0.5), (2.0, 0.5)):
        assert engine.optimizer.param_groups[0]["lr"] == lr
        engine.backward(engine(x))
        engine.step()
        wanted += 2.0 * lr if math.isfinite(x) else 0.0
        rig.assert_change(engine, wanted)
    assert engine.lr_scheduler is not None
    assert engine.lr_scheduler.last_epoch == engine.global_steps == 2


# -- who scales ------------------------------------------------------------------------------------


class Rows(nn.Module):
    """The house rig before its sum, behind and before another layer: two units and more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([rig.House()])
        self.w = nn.Parameter(torch.zeros(5))

    def forward(self, x: float) -> Tensor:
        return self.first[0](x) + (self.w * x).sum()


def _rows(ctx: RankContext, stage: int) -> onefold.Engine:
    return rig.start(ctx, Rows(), stage, config=_config(), zero=TINY)


def _assert_rows(engine: onefold.Engine, gradient: float) -> None:
    for name, tensor in rig.weights(engine).items():
        assert torch.equal(tensor, torch.full_like(tensor, -gradient)), name
    rig.assert_ranks_equal(engine)


def _scaled_ways(engine: onefold.Engine, way: str, xs: list[float]) -> None:
    if way == "engine.backward":
        for x in xs:
            engine.backward(engine(x))
    elif way == "engine.scale":
        for x in xs:
            engine.scale(engine(x)).backward()
    elif way == "joint":
        torch.autograd.backward([engine.scale(engine(x)) for x in xs])
    elif way == "sum":
        engine.scale(torch.stack([engine(x) for x in xs]).sum()).backward()
    else:
        losses = torch.stack([engine(x) for x in xs])
        engine.scale(losses).backward(torch.ones(len(xs)))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_all_ways_to_scale(ctx: RankContext, stage: int, mode: str) -> None:
    engine = _rows(ctx, stage)
    ways = ["engine.backward", "engine.scale", "joint", "sum", "vector"]
    for done, way in enumerate(ways, start=1):
        with during(way):
            with scope(engine, mode, 2 if way.startswith("engine") else 1):
                _scaled_ways(engine, way, [rig.x_of(ctx.rank, k) for k in range(2)])
            engine.step()
            _assert_rows(engine, 13.0 * done)


@distributed(world_size=1)
def test_scale_widens_and_never_narrows(ctx: RankContext) -> None:
    engine = _start(ctx, 0)
    for dtype, wide in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        loss = torch.ones((), dtype=dtype, requires_grad=True)
        scaled = engine.scale(loss)
        assert (scaled.dtype, float(scaled)) == (wide, 2.0**POWER), dtype


@distributed(world_size=2)
def test_without_fp16_scale_changes_nothing(ctx: RankContext) -> None:
    engine = rig.start(ctx, rig.House(), 2)
    loss = engine(rig.x_of(ctx.rank, 0))
    assert engine.scale(loss) is loss
    loss.backward()  # and nobody asks for a scale
    engine.step()
    rig.assert_change(engine, rig.expected(2, 1))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [0, 1])
def test_an_unscaled_backward_is_refused(
    ctx: RankContext, stage: int, mode: str, before: int
) -> None:
    """As the first of a step, or after a right one; zero_grad() makes the engine usable again."""
    engine = _rows(ctx, stage)
    with pytest.raises(onefold.StateError, match=r"engine.scale\(loss\).backward\(\)"):
        _unscaled(ctx, engine, mode, before)
    if mode in ("bare", "no_sync"):
        with pytest.raises(onefold.StateError, match=r"zero_grad\(\)"):
            engine.step()
    engine.zero_grad()
    for done in (1, 2):
        with scope(engine, mode, 2):
            for k in range(2):
                engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine.step()
        _assert_rows(engine, 13.0 * done)


def _unscaled(ctx: RankContext, engine: onefold.Engine, mode: str, before: int) -> None:
    with scope(engine, mode, before + 1):
        for k in range(before):
            engine.backward(engine(rig.x_of(ctx.rank, k)))
        engine(rig.x_of(ctx.rank, before)).backward()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_refused_on_one_rank_aborts_the_window_on_all(ctx: RankContext, stage: int) -> None:
    engine = _rows(ctx, stage)
    wanted = onefold.StateError if ctx.rank == 1 else onefold.WindowAborted
    with pytest.raises(wanted):
        _unscaled(ctx, engine, "window", 1) if ctx.rank == 1 else _right(ctx, engine)
    _right(ctx, engine)
    engine.step()
    _assert_rows(engine, 13.0)


def _right(ctx: RankContext, engine: onefold.Engine) -> None:
    with engine.coalesce_grad_reduction():
        for k in range(2):
            engine.backward(engine(rig.x_of(ctx.rank, k)))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_a_caught_refusal_dooms_all_the_same(ctx: RankContext, stage: int, mode: str) -> None:
    """The body catches the error and goes on; what the refused backward left must not be used."""
    engine = _rows(ctx, stage)
    error = onefold.StateError if mode in ("bare", "no_sync") else onefold.WindowAborted
    with pytest.raises(error):
        _caught(ctx, engine, mode)
    engine.zero_grad()
    _right(ctx, engine)
    engine.step()
    _assert_rows(engine, 13.0)


def _caught(ctx: RankContext, engine: onefold.Engine, mode: str) -> None:
    with scope(engine, mode, 2):
        with pytest.raises(onefold.StateError, match="not scaled"):
            engine(rig.x_of(ctx.rank, 0)).backward()
        engine.backward(engine(rig.x_of(ctx.rank, 1)))
    engine.step()


# -- nested backwards ------------------------------------------------------------------------------


class Inner(torch.autograd.Function):
    """A backward that runs another one, seeded with the gradient that it got."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, engine: onefold.Engine, x: float) -> Tensor:
        with torch.enable_grad():
            ctx.inner = engine(x)
        return ctx.inner.detach() + 0 * anchor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.inner.backward(gradient)
        return gradient, None, None


def _nested_loss(engine: onefold.Engine, way: str, x: float) -> Tensor:
    """A loss whose backward reaches the parameters through a backward inside of it."""
    anchor = torch.ones((), requires_grad=True)
    if way == "hook":
        inner = engine(x)
        outer = anchor * 1.0
        outer.register_hook(lambda gradient: inner.backward(gradient.to(inner.dtype)))
        return outer
    if way == "reentrant":
        return checkpoint(lambda a: engine(x) * a, anchor, use_reentrant=True)
    return Inner.apply(anchor, engine, x)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["hook", "reentrant", "function"])
@pytest.mark.parametrize("by", ["backward", "scale"])
def test_nested_in_a_scaled_one_passes(
    ctx: RankContext, stage: int, mode: str, way: str, by: str
) -> None:
    engine = _rows(ctx, stage)
    for done in (1, 2):
        with scope(engine, mode, 2):
            for k in range(2):
                loss = _nested_loss(engine, way, rig.x_of(ctx.rank, k))
                if by == "backward":
                    engine.backward(loss)
                else:
                    engine.scale(loss).backward()
        engine.step()
        _assert_rows(engine, 13.0 * done)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["hook", "reentrant", "function"])
def test_nested_in_an_unscaled_one_is_refused(
    ctx: RankContext, stage: int, mode: str, way: str
) -> None:
    engine = _rows(ctx, stage)
    with pytest.raises(onefold.StateError, match="not scaled"):
        _run_unscaled_nested(ctx, engine, mode, way)
    engine.zero_grad()
    _right(ctx, engine)
    engine.step()
    _assert_rows(engine, 13.0)


def _run_unscaled_nested(ctx: RankContext, engine: onefold.Engine, mode: str, way: str) -> None:
    with scope(engine, mode, 1):
        _nested_loss(engine, way, rig.x_of(ctx.rank, 0)).backward()
