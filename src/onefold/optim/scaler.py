"""Station 4, unscale: the loss scale that keeps fp16 gradients in range, and how it moves.

A loss is multiplied by ``scale`` before its backward and the sum of its gradients is divided by it
once, so ``scale`` must not move between two steps. ``update`` alone moves it, once per real step
and by what all ranks know to be the same, so it is equal on every rank without being sent.

Source: Micikevicius et al., Mixed Precision Training (arXiv:1710.03740) sec. 3.2; the rule is that
of ``DynamicLossScaler`` of DeepSpeed 0.19.8.
"""

import math
from collections.abc import Mapping
from typing import Final

from onefold.config import MAX_LOSS_SCALE, LossScale
from onefold.errors import StateError

FLOOR_SKIPS: Final = 8
"""Steps that may be skipped in a row at the lowest scale before ``update`` gives up."""

_FACTOR: Final = 2.0
_OFF: Final = LossScale(loss_scale=1.0)


class LossScaler:
    """The loss scale of one engine.

    Static where ``loss_scale`` is not 0. Dynamic otherwise: overflow number ``hysteresis`` since
    the last refill halves the scale, and so does each one after it until the next refill; it never
    falls below ``min_loss_scale``. Clean steps are counted from the last overflow (which leaves out
    the first of them, as DeepSpeed does), and every ``loss_scale_window`` of them double the scale,
    unless it would exceed 2**126: up to there fp32 has the exact value of the scale and of its
    inverse. A doubling refills the hysteresis; with ``consecutive_hysteresis`` a clean step does.

    Args:
        settings: how to scale; None scales by 1.0 and looks at nothing.

    Attributes:
        scale: what the loss is multiplied by.
        is_active: there are settings; without, ``update`` does nothing.
        is_dynamic: the scale may move.
    """

    def __init__(self, settings: LossScale | None) -> None:
        self._settings = settings or _OFF
        self.is_active = settings is not None
        self.is_dynamic = self._settings.loss_scale == 0
        self.scale = self._settings.loss_scale or _FACTOR**self._settings.initial_scale_power
        self._hysteresis = self._settings.hysteresis
        self._clean_steps = 0  # since the last overflow, or since the start
        self._floor_skips = 0

    def update(self, found_nonfinite: bool) -> None:
        """Take note of a step, and move the scale for the next.

        Args:
            found_nonfinite: some rank's gradients were not finite, so the step was skipped. It must
                be the same on every rank.

        Raises:
            StateError: ``FLOOR_SKIPS`` steps in a row, this one included, were skipped at the
                lowest scale; a static scale is always at its lowest.
        """
        if not self.is_active:
            return
        if not found_nonfinite:
            self._floor_skips = 0
            self._note_clean()
            return
        tried = self.scale
        is_lowest = not self.is_dynamic or tried <= self._settings.min_loss_scale
        self._floor_skips = self._floor_skips + 1 if is_lowest else 0
        self._note_overflow()
        if self._floor_skips >= FLOOR_SKIPS:
            kind, key = ("lowest", "min_loss_scale") if self.is_dynamic else ("one", "loss_scale")
            raise StateError(
                f"step(): the gradients of {self._floor_skips} steps in a row were not finite at "
                f"the {kind} loss scale, {tried:g}, so these steps were skipped. Expected finite "
                "gradients. Look for inf or nan in the data and the loss, lower the learning rate, "
                f"train in bf16, or set a lower fp16.{key}."
            )

    def _note_overflow(self) -> None:
        self._clean_steps = 0
        if not self.is_dynamic:
            return
        if self._hysteresis > 1:
            self._hysteresis -= 1
        else:
            self.scale = max(self.scale / _FACTOR, self._settings.min_loss_scale)

    def _note_clean(self) -> None:
        self._clean_steps += 1
        if not self.is_dynamic:
            return
        if self._settings.consecutive_hysteresis:
            self._hysteresis = self._settings.hysteresis
        counted = self._clean_steps - 1
        if counted > 0 and counted % self._settings.loss_scale_window == 0:
            self._hysteresis = self._settings.hysteresis
            if self.scale * _FACTOR <= MAX_LOSS_SCALE:
                self.scale *= _FACTOR

    def state_dict(self) -> dict[str, float]:
        """Return all that ``update`` moves, as plain numbers."""
        return {
            "is_dynamic": self.is_dynamic,
            "scale": self.scale,
            "hysteresis": self._hysteresis,
            "clean_steps": self._clean_steps,
            "floor_skips": self._floor_skips,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where another scaler stood; what the settings say still holds.

        A scale is taken over from dynamic to dynamic only: a static one is what the settings say,
        and of a dynamic one it is no good start. It stays in the range of this scaler's settings.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            ValueError: a number is missing, unknown or impossible. Nothing is taken over then.
        """
        own = self.state_dict()
        wrong = [
            f"{name} is {state.get(name, 'missing') if name in own else 'unknown'}"
            for name in sorted({*own, *state})
            if name not in own or not _is_possible(name, state.get(name))
        ]
        if wrong:
            raise ValueError(
                f"LossScaler.load_state_dict(): expected what state_dict() returns, got a state in "
                f"which {', '.join(wrong)}. Load the checkpoint's own state of the scaler."
            )
        is_alike = state["is_dynamic"] if self.is_dynamic else state["scale"] == self.scale
        if not (self.is_active and is_alike):
            return
        if self.is_dynamic:
            lowest = self._settings.min_loss_scale
            self.scale = min(max(float(state["scale"]), lowest), MAX_LOSS_SCALE)
            self._hysteresis = min(int(state["hysteresis"]), self._settings.hysteresis)
        self._clean_steps = int(state["clean_steps"])
        self._floor_skips = int(state["floor_skips"])


def _is_possible(name: str, value: object) -> bool:
    """Whether some scaler may have this number in its state."""
    if name == "is_dynamic":
        return isinstance(value, bool)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return False
    least = {"scale": 1 / MAX_LOSS_SCALE, "hysteresis": 1}.get(name, 0)
    return value >= least and (name == "scale" or float(value).is_integer())
