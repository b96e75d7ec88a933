"""What Hypothesis draws: a setting of the engine, and a program for all ranks.

A program is a list of plain tuples, so that it pickles and prints:

    ("backward", k, masks, api, wild)   which parameters a rank uses; who feeds inf or nan
    ("unscaled", k, masks, api)         fp16: a backward that forgets the loss scale
    ("window" | "across" | "no_sync", declared backwards, body)
    ("budget", rung, body)              a window with max_bytes that picks this rung of the ladder
    ("zero", api), ("forget", bit), ("boundary", flag), ("reduce",), ("step",)
    ("fail", ranks)                     these ranks leave the innermost window by an exception

Inside scopes that keep everything ranks run different backwards; outside of them, and in ``across``
and ``budget`` windows alone, where a backward reduces over the shard axis as it goes, they run the
same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from hypothesis import strategies as st

Op = tuple[Any, ...]

APIS: Final = ["engine", "loss", "tensor", "function"]
RECOMPUTES: Final = ["none", "reentrant", "non-reentrant"]


@dataclass(frozen=True)
class Precision:
    """In which dtypes a program runs, and up to where they are exact."""

    name: str
    config: dict[str, Any]
    model: torch.dtype
    largest: float = 2.0**20
    """Sums of gradients up to here are exact wherever they are rounded."""

    @property
    def is_scaled(self) -> bool:
        return self.model == torch.float16

    @property
    def master(self) -> torch.dtype:
        return torch.promote_types(self.model, torch.float32)


_BF16 = {"bf16": {"enabled": True}}
PRECISIONS: Final = {
    one.name: one
    for one in [
        Precision("fp64", {}, torch.float64),
        Precision("fp32", {}, torch.float32),
        Precision("bf16, fp32 wire", {**_BF16, "communication_data_type": "fp32"}, torch.bfloat16),
        Precision("bf16", _BF16, torch.bfloat16, 256),
        Precision(
            "bf16 sums", {**_BF16, "data_types": {"grad_accum_dtype": "bf16"}}, torch.bfloat16, 256
        ),
        Precision("fp16 static", {}, torch.float16, 2048),
        Precision("fp16 dynamic", {}, torch.float16, 2048),
    ]
}


@dataclass(frozen=True)
class Setting:
    """One engine; four ranks are a mesh of two by two."""

    world_size: int
    stage: int
    precision_name: str
    steps: int | None
    offload: tuple[str, ...]
    recompute: str
    transport: str
    scale_power: int
    hysteresis: int
    scale_window: int

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.precision_name]

    @property
    def is_dynamic(self) -> bool:
        return self.precision_name == "fp16 dynamic"

    def x(self, rank: int, k: int) -> float:
        """What this rank feeds to this backward: a small integer, different on every rank."""
        if self.precision.master == self.precision.model:
            return 1.0 + 10.0 * rank + k
        return 1.0 + (3 * rank + k) % 8  # up to 8, and so are the gradients: exact in 8 bits

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"onefold": {"transport": self.transport}}
        config |= self.precision.config
        if self.steps is not None:
            config["gradient_accumulation_steps"] = self.steps
        if self.is_dynamic:
            config["fp16"] = {
                "enabled": True,
                "initial_scale_power": self.scale_power,
                "loss_scale_window": self.scale_window,
                "hysteresis": self.hysteresis,
            }
        elif self.precision.is_scaled:
            config["fp16"] = {"enabled": True, "loss_scale": 2.0**self.scale_power}
        return config

    def zero(self) -> dict[str, Any]:
        # A bucket of one parameter each at stages 0-2, so that units differ in what they saw.
        return {"reduce_bucket_size": 4, **{key: {"device": "cpu"} for key in self.offload}}


@st.composite
def settings_of(draw: st.DrawFn, stage: int, precision_name: str) -> Setting:
    offloads: list[tuple[str, ...]] = [()]
    if stage >= 1:
        offloads.append(("offload_optimizer",))
    if stage == 3:
        offloads += [("offload_param",), ("offload_optimizer", "offload_param")]
    return Setting(
        world_size=draw(st.sampled_from([2, 4, 3, 1])),
        stage=stage,
        precision_name=precision_name,
        steps=draw(st.sampled_from([None, 1, 2])),
        offload=draw(st.sampled_from(offloads)),
        recompute=draw(st.sampled_from(RECOMPUTES)),
        transport=draw(st.sampled_from(["cross-memory", "direct", "native"])),
        scale_power=draw(st.integers(0, 5)),
        hysteresis=draw(st.integers(1, 2)),
        scale_window=draw(st.integers(1, 2)),
    )


class Writer:
    """Draws one program, by construction such that no rank waits for ever."""

    def __init__(self, draw: st.DrawFn, setting: Setting) -> None:
        self._draw = draw
        # On one axis there is nothing to defer across where gradients are sharded: refused.
        defers = setting.world_size in (1, 4) or setting.stage < 2
        self._scopes = ["window", "window", "no_sync", "budget", *(["across"] if defers else [])]
        self._world_size = setting.world_size
        self._is_scaled = setting.precision.is_scaled
        # Gradients that were read are divided, and must come back when more are added.
        self._divides_exactly = setting.world_size != 3 and setting.steps != 2
        self._ks: Iterator[int] = count(1)

    def program(self) -> list[Op]:
        ops: list[Op] = []
        kinds = ["backward"] * 3 + ["scope"] * 4 + ["step", "step", "zero", "forget", "boundary"]
        if self._divides_exactly:
            kinds.append("reduce")
        for _ in range(self._draw(st.integers(1, 7))):
            ops.append(self._op(self._pick(kinds), depth=0, is_even=True))
        return [*ops, ("boundary", True), ("step",)]

    def _body(self, depth: int, is_even: bool, may_fail: bool) -> list[Op]:
        ops: list[Op] = []
        kinds = (
            ["backward"] * 6 + ["scope"] * 2 + ["zero", "forget", "boundary"] + ["fail"] * may_fail
        )
        for _ in range(self._draw(st.integers(0, 4))):
            kind = self._pick(kinds)
            op = self._op("backward" if kind == "scope" and depth == 2 else kind, depth, is_even)
            ops.append(op)
            if op[0] == "fail" and op[1]:
                # What follows runs on some ranks only, so it is nothing that all must come to.
                if is_even:
                    break
                kinds = ["backward"]
        return ops

    def _op(self, kind: str, depth: int, is_even: bool) -> Op:
        draw = self._draw
        if kind == "backward":
            return self._backward(is_even)
        if kind == "scope":
            return self._scope(self._pick(self._scopes), depth, is_even)
        if kind == "zero":
            return ("zero", self._pick(["engine", "optimizer", "module"]))
        if kind == "forget":
            return ("forget", draw(st.integers(0, 3)))
        if kind == "boundary":
            return ("boundary", draw(st.booleans()))
        if kind == "fail":
            return ("fail", self._some_ranks())
        return (kind,)

    def _backward(self, is_even: bool) -> Op:
        k, api = next(self._ks), self._pick(APIS)
        mask = st.integers(0, 15)
        if is_even:
            masks = (self._draw(mask),) * self._world_size
        else:
            masks = self._draw(st.tuples(*[mask] * self._world_size))
        if self._is_scaled and self._one_in(12):
            return ("unscaled", k, masks, self._pick(APIS[1:]))
        wild = None
        if self._one_in(12):
            wild = (self._pick(["inf", "nan", "overflow"]), self._some_ranks())
        return ("backward", k, masks, api, wild)

    def _scope(self, kind: str, depth: int, is_even: bool) -> Op:
        is_even = is_even and kind in ("across", "budget")
        number = {"window": st.none() | st.integers(1, 3), "budget": st.integers(0, 4)}
        drawn = self._draw(number.get(kind, st.none()))
        return (kind, drawn, self._body(depth + 1, is_even, may_fail=kind != "no_sync"))

    def _some_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._draw(st.sets(st.integers(0, self._world_size - 1)))))

    def _one_in(self, n: int) -> bool:
        return self._draw(st.integers(0, n - 1)) == n - 1

    def _pick(self, options: list[str]) -> str:
        return self._draw(st.sampled_from(options))


@st.composite
def programs(draw: st.DrawFn, setting: Setting) -> list[Op]:
    return Writer(draw, setting).program()
