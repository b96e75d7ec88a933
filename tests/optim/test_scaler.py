"""The loss scaler moves as DeepSpeed's rule says, and only in ``update``."""

import json
import math
import random
from itertools import product
from typing import Any

import pytest
import torch

from onefold.config import MAX_LOSS_SCALE, LossScale
from onefold.errors import StateError
from onefold.optim.scaler import FLOOR_SKIPS, LossScaler

# (window, hysteresis, is_consecutive, lowest scale, power)
RULES = list(product([1, 2, 7], [1, 2, 3], [False, True], [1.0, 3.0], [2, 16]))


class Written:
    """The rule once more, as DeepSpeed 0.19.8 states it: by the index of every iteration."""

    def __init__(self, rule: tuple[int, int, bool, float, int]) -> None:
        self.window, self.shift, self.is_consecutive, self.lowest, power = rule
        self.scale = 2.0**power
        self.left = self.shift
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.shift == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.lowest)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.is_consecutive:
                self.left = self.shift
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                if not self.is_consecutive:
                    self.left = self.shift
                self.scale *= 2
        self.iteration += 1


def settings(rule: tuple[int, int, bool, float, int]) -> LossScale:
    window, hysteresis, is_consecutive, lowest, power = rule
    return LossScale(
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=is_consecutive,
        min_loss_scale=lowest,
        initial_scale_power=power,
    )


def overflows(count: int, seed: int, window: int = 4) -> list[bool]:
    """Runs of overflows of every length below the patience at the floor, and of clean steps."""
    draw = random.Random(seed)
    steps: list[bool] = []
    while len(steps) < count:
        steps += [True] * draw.randrange(FLOOR_SKIPS) + [False] * draw.randrange(1, 2 * window + 3)
    return steps[:count]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_scale_follows_the_rule(rule: tuple[int, int, bool, float, int]) -> None:
    scaler, written = LossScaler(settings(rule)), Written(rule)
    seen = {scaler.scale}
    for step, overflow in enumerate(overflows(600, RULES.index(rule), rule[0])):
        scaler.update(overflow)
        written.update(overflow)
        # Beyond the cap the written rule goes on; these sequences stay far below it.
        assert scaler.scale == written.scale < MAX_LOSS_SCALE, f"step {step}"
        seen.add(scaler.scale)
    assert len(seen) > 1


def test_hysteresis_delays_the_first_halving_only() -> None:
    scaler = LossScaler(LossScale(hysteresis=3, loss_scale_window=4))
    scales = []
    for overflow in [True] * 5 + [False] * 5 + [True] * 3:
        scaler.update(overflow)
        scales.append(scaler.scale / 2**16)
    assert scales == [1, 1, 0.5, 0.25, 0.125, *[0.125] * 4, 0.25, 0.25, 0.25, 0.125]


@pytest.mark.parametrize(("is_consecutive", "last"), [(False, 0.5), (True, 1.0)])
def test_a_clean_step_between_overflows(is_consecutive: bool, last: float) -> None:
    scaler = LossScaler(LossScale(consecutive_hysteresis=is_consecutive))
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.scale == last * 2**16


def test_the_window_counts_from_the_last_overflow() -> None:
    """The first clean step after it does not count, and the window goes on after a doubling."""
    scaler = LossScaler(LossScale(loss_scale_window=3, hysteresis=9))
    doubled = []
    for step, overflow in enumerate([False] * 2 + [True] + [False] * 11):
        before = scaler.scale
        scaler.update(overflow)
        doubled += [step] if scaler.scale == 2 * before else []
    assert doubled == [6, 9, 12]


def test_it_never_grows_out_of_fp32() -> None:
    scaler = LossScaler(LossScale(loss_scale_window=1, initial_scale_power=120))
    for _ in range(40):
        scaler.update(False)
    assert scaler.scale == 2.0**126
    for number in (scaler.scale, 1 / scaler.scale):
        held = torch.tensor(number)
        assert float(held) == number
        assert float(held) >= torch.finfo(torch.float32).tiny  # not flushed to zero either
    odd = LossScaler(LossScale(loss_scale_window=1, initial_scale_power=120, min_loss_scale=3.0))
    odd.load_state_dict({**odd.state_dict(), "scale": 3.0 * 2**123})
    for _ in range(9):
        odd.update(False)
    assert odd.scale == 3.0 * 2**124


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        (LossScale(initial_scale_power=0), 1.0),
        (LossScale(initial_scale_power=3, min_loss_scale=8.0), 8.0),
        (LossScale(loss_scale=128.0), 128.0),
        (LossScale(loss_scale=0.5), 0.5),
    ],
)
def test_it_gives_up_after_many_skips_at_the_lowest_scale(given: LossScale, scale: float) -> None:
    scaler = LossScaler(given)
    for _ in range(FLOOR_SKIPS - 1):
        scaler.update(True)
    scaler.update(False)  # begins anew
    for _ in range(FLOOR_SKIPS - 1):
        scaler.update(True)
    key = "min_loss_scale" if scaler.is_dynamic else "loss_scale"
    for count in (FLOOR_SKIPS, FLOOR_SKIPS + 1):
        with pytest.raises(StateError, match=f"{count} steps in a row .* {scale:g}, so") as caught:
            scaler.update(True)
        assert f"set a lower fp16.{key}." in str(caught.value)
    assert scaler.scale == scale


def test_skips_on_the_way_down_do_not_count() -> None:
    scaler = LossScaler(LossScale(initial_scale_power=20, hysteresis=1))
    for _ in range(20 + FLOOR_SKIPS - 1):
        scaler.update(True)
    assert scaler.scale == 1.0
    with pytest.raises(StateError, match=f"{FLOOR_SKIPS} steps"):
        scaler.update(True)


@pytest.mark.parametrize("overflow", [False, True])
def test_a_static_scale_stays(overflow: bool) -> None:
    scaler = LossScaler(LossScale(loss_scale=96, loss_scale_window=1, hysteresis=1))
    assert (scaler.is_active, scaler.is_dynamic) == (True, False)
    for _ in range(FLOOR_SKIPS - 1):
        scaler.update(overflow)
    assert scaler.scale == 96.0


def test_without_settings_nothing_happens() -> None:
    scaler = LossScaler(None)
    assert (scaler.is_active, scaler.is_dynamic, scaler.scale) == (False, False, 1.0)
    before = scaler.state_dict()
    for overflow in [True] * (3 * FLOOR_SKIPS) + [False] * 3:
        scaler.update(overflow)
    assert scaler.state_dict() == before
    assert scaler.scale == 1.0


@pytest.mark.parametrize("given", [*map(settings, RULES[::5]), LossScale(loss_scale=32)], ids=repr)
def test_a_restored_scaler_goes_on_alike(given: LossScale) -> None:
    """At every point of a sequence, through JSON, down to the skips at the floor."""
    steps = [*overflows(40, seed=3), *[True] * 40]
    first = LossScaler(given)
    for step, overflow in enumerate(steps):
        second = LossScaler(given)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        outcomes = [outcome(scaler, overflow) for scaler in (first, second)]
        assert outcomes[0] == outcomes[1], f"step {step}"
    assert outcomes[0][1] is not None


def outcome(scaler: LossScaler, overflow: bool) -> tuple[dict[str, float], str | None]:
    try:
        scaler.update(overflow)
    except StateError as error:
        return scaler.state_dict(), str(error)
    return scaler.state_dict(), None


def test_a_scale_passes_from_dynamic_to_dynamic_only() -> None:
    moved = LossScaler(LossScale(initial_scale_power=5, hysteresis=3))
    moved.update(True)
    for source in (None, LossScale(loss_scale=7)):
        scaler = LossScaler(LossScale())
        scaler.load_state_dict(LossScaler(source).state_dict())
        assert scaler.scale == 2**16
    for target, scale in ((None, 1.0), (LossScale(loss_scale=7), 7.0)):
        scaler = LossScaler(target)
        scaler.load_state_dict(moved.state_dict())
        assert scaler.scale == scale
    higher = LossScaler(LossScale(min_loss_scale=64.0, hysteresis=1))
    higher.load_state_dict(moved.state_dict())
    assert higher.scale == 64.0
    assert higher.state_dict()["hysteresis"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": math.inf}, "scale is inf"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": "big"}, "scale is big"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"hysteresis": 1.5}, "hysteresis is 1.5"),
        ({"clean_steps": -1}, "clean_steps is -1"),
        ({"floor_skips": True}, "floor_skips is True"),
        ({"is_dynamic": 1}, "is_dynamic is 1"),
        ({"cur_scale": 1.0}, "cur_scale is unknown"),
    ],
)
def test_an_impossible_state_is_refused_whole(change: dict[str, Any], says: str) -> None:
    scaler = LossScaler(LossScale())
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=says):
        scaler.load_state_dict({**before, "clean_steps": 3, **change})
    assert scaler.state_dict() == before
    for name in before:
        short = {key: value for key, value in before.items() if key != name}
        with pytest.raises(ValueError, match=f"{name} is missing"):
            scaler.load_state_dict(short)
