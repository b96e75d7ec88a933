"""What must come of a program, in plain Python: sums, what drops them, and what a step makes of it.

It knows nothing of stages, meshes, transports, offload or recomputation.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.programs.drawn import Op, Setting

NAMES = ["root.0", "root.1", "layers.0.w", "layers.1.w"]


def rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


@dataclass
class Scope:
    kind: str
    is_doomed: bool = False


@dataclass
class Scale:
    """The loss scale: halved by overflows, doubled by enough clean steps after the last one."""

    setting: Setting
    value: float = field(init=False)
    patience: int = field(init=False)
    clean: int = 0

    def __post_init__(self) -> None:
        is_scaled = self.setting.precision.is_scaled
        self.value = 2.0**self.setting.scale_power if is_scaled else 1.0
        self.patience = self.setting.hysteresis

    def note(self, is_overflow: bool) -> None:
        if not self.setting.is_dynamic:
            return
        if is_overflow:
            self.clean = 0
            if self.patience == 1:
                self.value = max(1.0, self.value / 2)
            self.patience = max(1, self.patience - 1)
            return
        self.clean += 1
        if self.clean > 1 and (self.clean - 1) % self.setting.scale_window == 0:
            self.patience = self.setting.hysteresis
            self.value *= 2


class Reference:
    """All ranks in one.

    Attributes:
        outcomes: what every rank must report.
        largest: the largest sum of a parameter's gradients, as scaled.
    """

    def __init__(self, setting: Setting) -> None:
        self.outcomes: list[Any] = []
        self.largest = 0.0
        self._setting = setting
        self._scale = Scale(setting)
        self._weights = [0.0] * 4
        self._scopes: list[Scope] = []
        self._flag: bool | None = None
        self._taken = 0
        self._steps = 0
        self._skipped = 0
        self._is_aborted = False
        self._is_broken = False  # a backward has left partial sums
        self._drop()

    def play(self, ops: list[Op]) -> None:
        for op in ops:
            if op[0] in ("window", "across", "budget", "no_sync"):
                self._scope(op[0], op[-1])
            else:
                getattr(self, op[0])(*op[1:])

    def _drop(self) -> None:
        self._sums = [0.0] * 4
        self._touched: set[int] = set()
        self._wild: set[int] = set()

    def backward(self, k: int, masks: tuple[int, ...], _api: str, wild: Any) -> None:
        for rank, mask in enumerate(masks):
            bits = [bit for bit in range(4) if mask >> bit & 1]
            self._touched.update(bits)
            if wild is not None and rank in wild[1]:
                self._wild.update(bits)
                continue
            for bit in bits:
                self._sums[bit] += self._setting.x(rank, k)
        self.largest = max(self.largest, *[one * self._scale.value for one in self._sums])

    def unscaled(self, _k: int, masks: tuple[int, ...], _api: str) -> None:
        self._is_broken = self._is_broken or any(masks)

    def fail(self, ranks: tuple[int, ...]) -> None:
        if ranks:
            self._scopes[-1].is_doomed = True

    def zero(self, api: str) -> None:
        self._drop()
        if api != "module":  # of which the engine knows by its effect alone
            if self._scopes and self._scopes[0].kind != "no_sync":
                self._scopes[0].is_doomed = self._scopes[0].is_doomed or self._is_broken
            self._is_broken = False

    def forget(self, bit: int) -> None:
        self._sums[bit] = 0.0
        self._touched.discard(bit)
        self._wild.discard(bit)

    def boundary(self, flag: bool) -> None:
        self._flag = flag

    def _scope(self, kind: str, body: list[Op]) -> None:
        scope = Scope(kind)
        self._scopes.append(scope)
        self.play(body)
        self._scopes.pop()
        is_window = kind != "no_sync"
        scope.is_doomed = scope.is_doomed or (is_window and self._is_broken)
        if not scope.is_doomed:
            return
        if self._scopes:
            if is_window:
                self._scopes[0].is_doomed = True
        elif is_window:
            self._drop()
            self._taken = 0
            self._is_broken = False
            self._is_aborted = True
            self.outcomes.append("aborted")
        else:
            self._is_broken = True

    def step(self) -> None:
        steps = self._setting.steps or 1
        is_boundary = self._taken + 1 >= steps if self._flag is None else self._flag
        if not is_boundary:
            self._taken += 1
            self._flag = None
            self.outcomes.append("not applied")
        elif self._goes_through():
            self._scale.note(bool(self._wild))
            if self._wild:
                self._skipped += 1
            else:
                self._apply(self._setting.world_size * (self._taken + 1 if steps > 1 else 1))
            self.outcomes.append("not applied" if self._wild else "applied")
            self._drop()
            self._taken = 0
            self._flag = None
        self._report()

    def reduce(self) -> None:
        if self._goes_through():
            self.outcomes.append("reduced")

    def _goes_through(self) -> bool:
        if self._is_broken or (self._is_aborted and not self._touched):
            self.outcomes.append("zero_grad wanted" if self._is_broken else "refused")
            self._is_broken = False
            self._drop()
            return False
        self._is_aborted = False
        return True

    def _apply(self, divisor: int) -> None:
        """One division and one subtraction, each rounded to the masters' dtype."""
        master = self._setting.precision.master
        gradients = [rounded(total / divisor, master) for total in self._sums]
        self._weights = [
            rounded(weight - gradient, master)
            for weight, gradient in zip(self._weights, gradients, strict=True)
        ]
        self._steps += 1

    def _report(self) -> None:
        model = self._setting.precision.model
        weights = [[rounded(weight, model)] for weight in self._weights]
        self.outcomes.append(dict(zip(NAMES, weights, strict=True)))
        self.outcomes.append((self._steps, self._skipped, self._scale.value))
