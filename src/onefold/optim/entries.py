"""Builds what a config names: a torch optimizer, and a learning rate scheduler.

Names and arguments are DeepSpeed's where it has its own, and torch's for every other class. All
that a name or an argument cannot mean here is refused before anything is built.

[Note: step index] DeepSpeed's schedulers set a first learning rate when they are built and are
stepped after every update, counting from -1. So update i (from 0) runs with what their formula
gives for i - 1, and update 0 with a value of its own. torch counts updates from 0, so the curves
below are functions of i. Source: ``lr_schedules`` of DeepSpeed 0.19.8; arXiv:1803.09820 for two.
"""

import difflib
import inspect
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onefold.config import Entry
from onefold.config_rule import AUTO
from onefold.optim.elementwise import NOT_ELEMENTWISE

_log = logging.getLogger("onefold.optim.entries")

_REFUSED = {
    **NOT_ELEMENTWISE,
    "lion": "torch has no such class; build it yourself and hand it to the engine",
}

# Arguments of DeepSpeed's own Adam that torch lacks because it always does so.
_IMPLIED = ("bias_correction", "fp32_optimizer_states", "set_grad_none")


def build_optimizer(entry: Entry, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Optimizer:
    """Build the elementwise torch optimizer that a config names, whatever the case of its name.

    "Adam" means AdamW unless ``adam_w_mode`` is false, as in DeepSpeed; and unless ``torch_adam``
    is true both decay weights by 0.0 where nothing is said, as DeepSpeed's own Adam does.

    Args:
        entry: name and arguments; an argument of "auto" counts as not given.
        params: parameters or parameter groups, handed to torch as they are.

    Returns:
        The optimizer.

    Raises:
        ValueError: the name is unknown, or of an optimizer that is not elementwise; or an argument
            is unknown, impossible here or refused by torch.
    """
    name = entry.type.lower()
    if name in _REFUSED:
        raise ValueError(
            f"optimizer.type: expected an elementwise optimizer of torch, got {entry.type!r}: "
            f"{_REFUSED[name]}. Every rank updates flat pieces of the parameters only."
        )
    every = _classes(torch.optim, Optimizer)
    classes = {one: cls for one, cls in every.items() if one not in _REFUSED}
    if name not in classes:
        raise ValueError(_unknown("optimizer.type", entry.type, classes))
    kwargs = _given(entry.params)
    if "max_grad_norm" in kwargs:
        raise ValueError(
            "optimizer.params.max_grad_norm: the optimizer does not clip; expected the key "
            f'"gradient_clipping" beside "optimizer", got {kwargs["max_grad_norm"]!r} here'
        )
    if name in ("adam", "adamw"):
        name = _settle_adam(name, kwargs)
    built: Optimizer = _construct("optimizer", classes[name], params, kwargs)
    return built


def _classes(module: object, base: type) -> dict[str, type[Any]]:
    """Return a module's public subclasses of ``base`` by their names in lower case."""
    return {
        name.lower(): cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base and name[0] != "_"
    }


def _settle_adam(name: str, kwargs: dict[str, Any]) -> str:
    """Take DeepSpeed's own Adam arguments out of ``kwargs``; return the torch class they mean."""
    flags = {"torch_adam": False, "adam_w_mode": True, **dict.fromkeys(_IMPLIED, True)}
    for flag, default in flags.items():
        value = kwargs.pop(flag, default)
        if not isinstance(value, bool) or (flag in _IMPLIED and not value):
            choice = "true, as torch always does" if flag in _IMPLIED else "true or false"
            raise ValueError(f"optimizer.params.{flag}: expected {choice}, got {value!r}")
        flags[flag] = value
    if not flags["torch_adam"]:
        kwargs.setdefault("weight_decay", 0.0)
    if name == "adamw" and not flags["adam_w_mode"]:
        _log.info("optimizer.params.adam_w_mode has no effect on AdamW, as in DeepSpeed")
    return "adamw" if name == "adamw" or flags["adam_w_mode"] else "adam"


def build_scheduler(entry: Entry, optimizer: Optimizer) -> LRScheduler:
    """Build the scheduler that a config names: one of DeepSpeed's five curves, or any of torch's.

    Args:
        entry: name (in any case) and arguments; an argument of "auto" counts as not given.
        optimizer: whose groups it sets.

    Returns:
        A torch scheduler, to be stepped after every update; the values of the first are set.

    Raises:
        ValueError: the name or an argument is unknown, or a value is impossible.
    """
    name = entry.type.lower()
    kwargs = _given(entry.params)
    curves: dict[str, type[Curve]] = {cls.__name__[1:].lower(): cls for cls in _CURVES}
    if name in curves:
        return CurveLR(optimizer, _parse(curves[name], kwargs))
    classes = _classes(lr_scheduler, LRScheduler)
    if name not in classes:
        raise ValueError(_unknown("scheduler.type", entry.type, {**classes, **curves}))
    built: LRScheduler = _construct("scheduler", classes[name], optimizer, kwargs)
    return built


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given, with JSON's lists as the tuples that torch writes."""
    given = {name: value for name, value in params.items() if value != AUTO}
    return {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}


def _unknown(where: str, got: str, classes: Mapping[str, type]) -> str:
    near = difflib.get_close_matches(got.lower(), classes, n=1, cutoff=0.0)
    name = classes[near[0]].__name__.lstrip("_")
    return f"{where}: got {got!r}, which no class here is called; the nearest is {name!r}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; the nearest is {near[0]!r}" if near else ""


def _construct(where: str, cls: type[Any], first: object, kwargs: dict[str, Any]) -> Any:
    """Call a torch class, with wrong arguments reported under their names in the JSON."""
    takes = list(inspect.signature(cls).parameters.values())[1:]
    names = [one.name for one in takes]
    problems = [
        f"{where}.params.{name}: {cls.__name__} has no such argument{_nearest(name, names)}"
        for name in kwargs
        if name not in names
    ]
    problems += [
        f"{where}.params.{one.name}: {cls.__name__} needs it, and it is not given"
        for one in takes
        if one.default is inspect.Parameter.empty and one.name not in kwargs
    ]
    if problems:
        raise ValueError("\n".join(problems))
    try:
        return cls(first, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {cls.__name__} refused {kwargs}: {error}") from error


_PerGroup = float | tuple[float, ...]


def _spread(value: _PerGroup, count: int) -> list[float]:
    """Give every one of ``count`` groups its value."""
    values = [*value] if isinstance(value, tuple) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"scheduler.params: expected one number or one for each of the {count} parameter "
            f"groups, got {value}"
        )
    return values


def _between(low: _PerGroup, high: _PerGroup, share: float, count: int) -> list[float]:
    """Return, for every group, the point at ``share`` of the way from low to high."""
    pairs = zip(_spread(low, count), _spread(high, count), strict=True)
    return [start + (end - start) * share for start, end in pairs]


class Curve(BaseModel):
    """What a scheduler sets, as a function of the update's index; the fields are its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # Resuming goes through load_state_dict, which keeps the index and the groups together.
    last_batch_iteration: Literal[-1] = -1

    def lrs(self, step: int, own: tuple[float, ...]) -> list[float]:
        """Return the learning rates of update ``step``, given the optimizer's own, one a group."""
        raise NotImplementedError

    def moms(self, step: int, count: int) -> list[float] | None:
        """Return beta1 of update ``step`` for each of ``count`` groups, or None to leave it."""


class CurveLR(LRScheduler):
    """The torch scheduler of one of DeepSpeed's curves.

    Its state is the index, not the curve: after a restore the curve is what the config says, as
    with DeepSpeed's classes.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        self.curve = curve
        self.own_lrs = tuple(float(group["lr"]) for group in optimizer.param_groups)
        # Both are tried before anything is set: a wrong number of groups leaves no half-set ones.
        curve.lrs(0, self.own_lrs)
        if curve.moms(0, len(self.own_lrs)) and "betas" not in optimizer.defaults:
            raise ValueError(
                f"scheduler.params.cycle_momentum: {type(optimizer).__name__} has no betas to "
                "cycle. Set it to false, or choose an Adam."
            )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the coming update, one a group."""
        return list(self.curve.lrs(self.last_epoch, self.own_lrs))

    def step(self, epoch: int | None = None) -> None:
        """Move to the next update."""
        super().step(epoch)
        moms = self.curve.moms(self.last_epoch, len(self.own_lrs))
        if moms is not None:
            for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
                group["betas"] = (mom, 0.99)

    def state_dict(self) -> dict[str, Any]:
        """Return the position on the curve."""
        return {name: self.__dict__[name] for name in ("last_epoch", "_step_count", "_last_lr")}


class _Warmup(Curve):
    warmup_num_steps: int = Field(1000, gt=0)
    warmup_type: Literal["log", "linear"] = "log"

    def rise(self, index: int) -> float | None:
        """Return how far warm-up has come at DeepSpeed's index, in 0..1; None once it is over."""
        count = max(2, self.warmup_num_steps)
        if index >= count:
            return None
        if self.warmup_type == "linear":
            return max(0, index) / count
        return math.log(max(0, index) + 1) / math.log(count)


class _WarmupLR(_Warmup):
    """Rise from ``warmup_min_lr`` to ``warmup_max_lr`` (or the optimizer's own), and stay."""

    warmup_min_lr: _PerGroup = 0.0
    warmup_max_lr: _PerGroup | None = None

    def lrs(self, step: int, own: tuple[float, ...]) -> list[float]:
        rise = self.rise(step - 1)
        high = own if self.warmup_max_lr is None else self.warmup_max_lr
        share = self.after(step - 1) if rise is None else rise
        return _between(self.warmup_min_lr, high, share, len(own))

    def after(self, index: int) -> float:
        """Return the share of the rise that is left at an index after warm-up."""
        return 1.0


class _WarmupDecayLR(_WarmupLR):
    """Rise as ``WarmupLR`` does, then fall linearly to ``warmup_min_lr`` at ``total_num_steps``."""

    total_num_steps: int
    warmup_max_lr: _PerGroup | None = 0.001

    def after(self, index: int) -> float:
        fall = max(1, self.total_num_steps - max(2, self.warmup_num_steps))
        return max(0.0, (self.total_num_steps - index) / fall)


class _WarmupCosineLR(_Warmup):
    """Scale the optimizer's own learning rates: rise to 1, then a half cosine to ``cos_min_ratio``.

    The first update runs at 0, whatever ``warmup_min_ratio`` says, as in DeepSpeed.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    def lrs(self, step: int, own: tuple[float, ...]) -> list[float]:
        ratio = self._ratio(step - 1) if step else 0.0
        return [lr * ratio for lr in own]

    def _ratio(self, index: int) -> float:
        rise = self.rise(index)
        if rise is not None:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * rise
        warmup = max(2, self.warmup_num_steps)
        progress = (index - warmup + 1) / max(1, self.total_num_steps - warmup)
        half_cosine = (1.0 + math.cos(math.pi * min(1.0, progress))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * half_cosine)


class _LRRangeTest(Curve):
    """Grow the learning rate by ``step_rate`` of its start every ``step_size`` updates."""

    lr_range_test_min_lr: _PerGroup = 1e-3
    lr_range_test_step_size: int = Field(2000, gt=0)
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lrs(self, step: int, own: tuple[float, ...]) -> list[float]:
        interval = step / self.lr_range_test_step_size
        stairs = math.floor(interval) if self.lr_range_test_staircase else interval
        growth = 1.0 + self.lr_range_test_step_rate * stairs
        return [start * growth for start in _spread(self.lr_range_test_min_lr, len(own))]


class _OneCycle(Curve):
    """One rise and fall of the learning rate, with beta1 running against it, and a decay after.

    As in DeepSpeed the first update runs with ``cycle_min_mom``, and beta2 becomes 0.99.
    """

    cycle_min_lr: _PerGroup
    cycle_max_lr: _PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = Field(2000.0, gt=0)
    cycle_second_step_size: float | None = Field(None, ge=0)
    cycle_first_stair_count: int = Field(0, ge=0)
    cycle_second_stair_count: int | None = Field(None, ge=0)
    decay_step_size: float = Field(0.0, ge=0)
    cycle_momentum: bool = True
    cycle_min_mom: _PerGroup = 0.8
    cycle_max_mom: _PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def lrs(self, step: int, own: tuple[float, ...]) -> list[float]:
        low, high = self.cycle_min_lr, self.cycle_max_lr
        decay = self._decay(step, self.decay_lr_rate)
        heights = _between(low, high, self._height(step), len(own))
        return heights if decay is None else [lr / decay for lr in _spread(low, len(own))]

    def moms(self, step: int, count: int) -> list[float] | None:
        if not self.cycle_momentum:
            return None
        low, high = self.cycle_min_mom, self.cycle_max_mom
        decay = self._decay(step, self.decay_mom_rate)
        heights = _between(high, low, self._height(step) if step else 1.0, count)
        return heights if decay is None else [mom * decay for mom in _spread(high, count)]

    def _halves(self) -> tuple[float, float]:
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return first, first if second is None else second

    def _height(self, step: int) -> float:
        """Return the height in the cycle, 0 at its ends and 1 at its peak, in stairs if asked."""
        first, second = self._halves()
        offset = step % (first + second)
        rising = offset <= first
        left, size = (offset, first) if rising else (first + second - offset, second)
        stairs = self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        return math.floor(left * stairs / size) / stairs if stairs else left / size

    def _decay(self, step: int, rate: float) -> float | None:
        """Return the factor of the decay after the cycle; None inside the cycle."""
        beyond = step - sum(self._halves())
        if beyond <= 0:
            return None
        return 1.0 + rate * beyond / self.decay_step_size if self.decay_step_size else 1.0


_CURVES = (_WarmupLR, _WarmupDecayLR, _WarmupCosineLR, _OneCycle, _LRRangeTest)


def _parse(curve: type[Curve], kwargs: Mapping[str, Any]) -> Curve:
    """Check a curve's arguments, with all problems in one error."""
    try:
        return curve(**kwargs)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            name = str(detail["loc"][0])
            text = {
                "extra_forbidden": f"no such argument{_nearest(name, curve.model_fields)}",
                "missing": "needed, and not given",
            }.get(detail["type"], f"{detail['msg']}, got {detail['input']!r}")
            lines.append(f"scheduler.params.{name}: {text}")
        raise ValueError("\n".join(lines)) from error
