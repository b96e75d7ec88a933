"""B64: the optimizer had folded an overflowed gradient into its momentum before anybody looked at
it: NaN for ever. Weights and all of the optimizer's state must be those of a run that skips it.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from tests import rig
from tests.cases.modes import during, scope
from tests.harness import RankContext, distributed

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
    "moving": {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}},
}
WINDOWS = {"inf in 1 of 2": ("bad", "good"), "inf in 2 of 3": ("good", "bad", "good")}


def _play(ctx: RankContext, engine: onefold.Engine, mode: str, window: tuple[str, ...]) -> None:
    with scope(engine, mode, len(window)):
        for k, kind in enumerate(window):
            engine.backward(engine(math.inf if kind == "bad" else rig.x_of(ctx.rank, k)))
    engine.step()


def _state(engine: onefold.Engine) -> list[Tensor]:
    """Pieces of the masters and everything the optimizer holds about them."""
    found = [param.detach() for group in engine.optimizer.param_groups for param in group["params"]]
    for group in engine.optimizer.param_groups:
        for param in group["params"]:
            state = engine.optimizer.state.get(param, {})
            found += [torch.as_tensor(state[key]) for key in sorted(state)]
    return found


def _assert_same(engine: onefold.Engine, other: onefold.Engine) -> None:
    for one, two in zip(_state(engine), _state(other), strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, two), (one, two)
    assert torch.equal(rig.weights(engine)["w"], rig.weights(other)["w"])
    rig.assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("optimizer", list(MAKERS))
@pytest.mark.parametrize("precision", list(CONFIGS))
def test_a_bad_window_leaves_no_trace(
    ctx: RankContext, stage: int, optimizer: str, precision: str
) -> None:
    """As the very first window, and as one between good ones, when there is state to be spoilt."""
    config, make = CONFIGS[precision], MAKERS[optimizer]
    good = ("good", "good")
    for mode, (name, bad) in zip(("bare", "window"), WINDOWS.items(), strict=True):
        with during(mode, name):
            engine, other = (
                rig.start(ctx, rig.House(), stage, optimizer=make, config=config) for _ in range(2)
            )
            for window in (bad, good, good, bad, good):
                _play(ctx, engine, mode, window)
                if window is good:
                    _play(ctx, other, mode, window)
                _assert_same(engine, other)
            assert (engine.skipped_steps, engine.global_steps) == (2, 3)
            assert (other.skipped_steps, other.global_steps) == (0, 3)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_what_was_reduced_by_hand_leaves_none_either(ctx: RankContext, stage: int) -> None:
    """Looked at, clipped by hand, and skipped all the same."""
    engine, other = (
        rig.start(ctx, rig.House(), stage, optimizer=MAKERS["adamw"]) for _ in range(2)
    )
    engine.backward(engine(math.inf))
    engine.reduce_gradients()
    engine.clip_grad_norm(1.0)
    engine.step()
    for one in (engine, other):
        _play(ctx, one, "window", ("good", "good"))
    _assert_same(engine, other)
