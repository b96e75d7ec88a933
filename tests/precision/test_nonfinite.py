"""on_nonfinite: what step() makes of a gradient that is not finite on one rank, alike on all."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import MODES, during, scope
from tests.harness import RankContext, distributed

BAD = [math.inf, -math.inf, math.nan]
NUMEL = 192


class Weighted(nn.Module):
    """The gradient of ``w`` is what is fed in."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x.to(self.w.dtype)).sum()


def _start(ctx: RankContext, stage: int, precision: str, policy: str | None) -> onefold.Engine:
    config: dict[str, Any] = {"bf16": {"enabled": precision == "bf16"}}
    if policy is not None:
        config["onefold"] = {"on_nonfinite": policy}
    return rig.start(ctx, Weighted(), stage, config=config)


def _run(ctx: RankContext, engine: onefold.Engine, mode: str, bad: float | None) -> None:
    """Two backwards; the first has one bad element on the last rank."""
    with scope(engine, mode, 2):
        for k in range(2):
            x = torch.full((NUMEL,), rig.x_of(ctx.rank, k))
            if bad is not None and k == 0 and ctx.rank == ctx.world_size - 1:
                x[-1] = bad
            engine.backward(engine(x))


def _counters(engine: onefold.Engine) -> tuple[bool, int, int]:
    return engine.was_step_applied(), engine.global_steps, engine.skipped_steps


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", [None, "skip"])
def test_skip(ctx: RankContext, stage: int, precision: str, policy: str | None) -> None:
    engine = _start(ctx, stage, precision, policy)
    change = rig.expected(ctx.world_size, 2)
    for done, bad in enumerate(BAD):
        mode = MODES[done]
        with during(mode, bad):
            _run(ctx, engine, mode, bad)
            engine.step()
            assert _counters(engine) == (False, done, done + 1)
            norm = engine.get_global_grad_norm()
            assert norm is not None
            assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
            rig.assert_change(engine, done * change)
            _run(ctx, engine, mode, None)
            engine.step()
            assert _counters(engine) == (True, done + 1, done + 1)
            rig.assert_change(engine, (done + 1) * change)
    rig.assert_ranks_equal(engine)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_raise(ctx: RankContext, stage: int, precision: str) -> None:
    """On every rank, with the gradients still there; nothing counts, and zero_grad() goes on."""
    engine = _start(ctx, stage, precision, "raise")
    change = rig.expected(ctx.world_size, 2)
    for done, bad in enumerate(BAD):
        mode = MODES[done]
        with during(mode, bad):
            _run(ctx, engine, mode, bad)
            with pytest.raises(FloatingPointError, match=rf"at step {done}\. The gradients"):
                engine.step()
            assert _counters(engine)[1:] == (done, 0)
            found = engine.full_grad(engine.module.w)  # type: ignore[arg-type]
            assert found is not None
            assert torch.equal(found[:-1], torch.full((NUMEL - 1,), change))
            assert not torch.isfinite(found[-1])
            rig.assert_change(engine, done * change)
            engine.zero_grad()
            _run(ctx, engine, mode, None)
            engine.step()
            assert _counters(engine) == (True, done + 1, 0)
            rig.assert_change(engine, (done + 1) * change)
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_after_a_raise_the_last_step_was_none(ctx: RankContext, stage: int) -> None:
    """``was_step_applied`` is about the last call of step(), which changed nothing."""
    engine = _start(ctx, stage, "fp32", "raise")
    _run(ctx, engine, "window", None)
    engine.step()
    assert engine.was_step_applied()
    _run(ctx, engine, "window", math.inf)
    with pytest.raises(FloatingPointError):
        engine.step()
    assert not engine.was_step_applied()


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", BAD)
def test_ignore(ctx: RankContext, stage: int, precision: str, bad: float) -> None:
    """The one element is spoilt, on all ranks alike; the others are right."""
    engine = _start(ctx, stage, precision, "ignore")
    _run(ctx, engine, "window", bad)
    engine.step()
    assert _counters(engine) == (True, 1, 0)
    change = rig.expected(ctx.world_size, 2)
    w = rig.weights(engine)["w"]
    assert torch.equal(w[:-1], torch.full_like(w[:-1], -change))
    for other in rig.gathered(w):
        assert torch.equal(other[:-1], w[:-1])
        assert math.isnan(other[-1]) if math.isnan(bad) else float(other[-1]) == -bad


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("bad", BAD)
def test_clipping_and_ignore_spoil_everything_alike(
    ctx: RankContext, stage: int, bad: float
) -> None:
    """A factor made of such a norm is 0 or NaN; ranks still hold the same."""
    config = {"gradient_clipping": 1.0, "onefold": {"on_nonfinite": "ignore"}}
    engine = rig.start(ctx, Weighted(), stage, config=config)
    _run(ctx, engine, "window", bad)
    engine.step()
    w = rig.weights(engine)["w"]
    for other in rig.gathered(w):
        assert torch.equal(other.isnan(), w.isnan())
        assert torch.equal(other.nan_to_num(), w.nan_to_num())
    assert bool(w[-1].isnan())


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("policy", ["skip", "raise", "ignore"])
def test_fp16_always_skips(ctx: RankContext, stage: int, policy: str) -> None:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 6},
        "onefold": {"on_nonfinite": policy},
    }
    engine = rig.start(ctx, Weighted(), stage, config=config)
    _run(ctx, engine, "window", math.inf)
    engine.step()
    assert _counters(engine) == (False, 0, 1)
    rig.assert_change(engine, 0.0)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, "inf"])
@pytest.mark.parametrize("bad", BAD)
def test_every_norm_sees_it(ctx: RankContext, stage: int, order: float | str, bad: float) -> None:
    """One element of one rank, in the last shard; the largest of some numbers and nan, too."""
    config = {"gradient_clipping": 1.0, "onefold": {"norm_order": order}}
    engine = rig.start(ctx, Weighted(), stage, config=config)
    _run(ctx, engine, "window", bad)
    engine.step()
    assert rig.gathered(_counters(engine)) == [(False, 0, 1)] * 2
    rig.assert_change(engine, 0.0)
