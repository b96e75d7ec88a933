"""The features of the matrix, as data.

A feature is a fragment of DeepSpeed's JSON and options of the run; a cell's setup is the merge of
one or two of them. Two that say different things about the same key cannot be merged, so there is
no such row; two that contradict each other otherwise have a row, and the engine's own refusal.

A new feature is one more entry of ``FEATURES``. If it needs another layer, that is an option of the
model (``model.Options``); if it needs another loss, an option of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tests.matrix.model import Options


@dataclass(frozen=True, slots=True)
class Feature:
    """One row and one half of many others.

    Attributes:
        name: the row.
        text: what it is, in the legend.
        config: of the engine.
        model: fields of ``Options``.
        run: fields of ``Setup``.
    """

    name: str
    text: str
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything about a cell but its stage, mode and number of backwards."""

    config: Mapping[str, Any]
    model: Options
    adam: bool = False
    mesh: tuple[int, int] | None = None
    """Replicas and shards; None for two ranks on one axis."""
    across: bool = False
    """Windows defer the sum over replicas alone."""
    uneven: bool = False
    """Rank r runs r backwards less than rank 0."""

    @property
    def world_size(self) -> int:
        return 2 if self.mesh is None else self.mesh[0] * self.mesh[1]

    @property
    def micro_steps(self) -> int:
        return int(self.config.get("gradient_accumulation_steps", 1))

    @property
    def divisor(self) -> int:
        is_sum = self.config.get("gradient_allreduce_op") == "sum"
        return self.micro_steps * (1 if is_sum else self.world_size)

    @property
    def offloads(self) -> bool:
        return "offload_optimizer" in self.config["zero_optimization"]

    @property
    def wire(self) -> str:
        """The narrowest dtype that a gradient is rounded to on its way."""
        if "torch_autocast" in self.config:
            return "bf16"
        halves = [half for half in ("bf16", "fp16") if half in self.config]
        return halves[0] if halves else str(self.config.get("communication_data_type", "fp32"))

    @property
    def bound(self) -> float:
        """Largest deviation of a gradient, in ulps of ``wire``, of the sum of its terms' sizes.

        Integers: 0, for all of them and their sums are exact. Real numbers under autocast: a term
        of a weight's gradient is a product along one way through ``depth`` layers; in each of them
        the weight (or, in the weight's own, the input) and the result are rounded once to bf16, by
        at most 2**-8 of their size, which is at most one ulp each. A narrow wire rounds the term of
        each rank and, on a second axis, their sum. Sums in fp32 are 2**-16 of that.
        """
        if not self.model.real:
            return 0.0
        wire = self.config.get("communication_data_type", "fp32") != "fp32"
        return 2.0 * self.model.depth + (2 if wire else 0)


def _on(key: str, **more: Any) -> dict[str, Any]:
    return {key: {"enabled": True, **more}}


def _zero(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": values}


_CPU = {"device": "cpu"}

FEATURES = {
    feature.name: feature
    for feature in (
        Feature("fp32", "an fp32 model and nothing else"),
        Feature("fp64", "an fp64 model", model={"dtype": "float64"}),
        Feature("bf16", "`bf16.enabled`", _on("bf16")),
        Feature(
            "bf16 sums",
            "`bf16.enabled`, and backwards accumulate in bf16",
            {**_on("bf16"), "data_types": {"grad_accum_dtype": "bf16"}},
        ),
        Feature(
            "bf16, fp32 wire",
            "`bf16.enabled`, `communication_data_type` fp32",
            {**_on("bf16"), "communication_data_type": "fp32"},
        ),
        Feature("fp16 static", "`fp16.enabled`, scale 64", _on("fp16", loss_scale=64)),
        Feature(
            "fp16 dynamic",
            "`fp16.enabled`, a scale that starts at 32",
            _on("fp16", loss_scale=0, initial_scale_power=5),
        ),
        Feature("bf16 wire", "`communication_data_type` bf16", {"communication_data_type": "bf16"}),
        Feature(
            "autocast",
            "`torch_autocast` bf16, with real numbers",
            _on("torch_autocast", dtype="bfloat16"),
            model={"real": True},
        ),
        Feature("clipping", "`gradient_clipping`", {"gradient_clipping": 0.75}),
        Feature("inf norm", "`onefold.norm_order` inf", {"onefold": {"norm_order": "inf"}}),
        Feature("offload", "`offload_optimizer` to the CPU", _zero(offload_optimizer=_CPU)),
        Feature(
            "offload all",
            "`offload_optimizer` and `offload_param`",
            _zero(offload_optimizer=_CPU, offload_param=_CPU),
        ),
        Feature(
            "reentrant",
            "blocks under reentrant activation checkpointing",
            model={"checkpoint": "reentrant"},
        ),
        Feature(
            "checkpointed",
            "blocks under activation checkpointing, not reentrant",
            model={"checkpoint": "saved"},
        ),
        Feature("compiled", "blocks compiled, `aot_eager`", model={"compiled": True}),
        Feature("adapters", "frozen blocks with adapters (LoRA)", model={"adapters": True}),
        Feature("tied", "weights tied across two units", model={"tied": True}),
        Feature("small buckets", "`reduce_bucket_size` 1", _zero(reduce_bucket_size=1)),
        Feature(
            "2 micro-steps",
            "`gradient_accumulation_steps` 2, each with its own scope",
            {"gradient_accumulation_steps": 2},
        ),
        Feature("sum", "`gradient_allreduce_op` sum", {"gradient_allreduce_op": "sum"}),
        Feature("native", "`onefold.transport` native", {"onefold": {"transport": "native"}}),
        Feature("Adam", "Adam instead of SGD", run={"adam": True}),
        Feature("uneven", "ranks run different numbers of backwards", run={"uneven": True}),
        Feature("experts", "two experts, both on every rank", model={"experts": 1}),
        Feature("experts over 2", "two experts, on two ranks", model={"experts": 2}),
        Feature("2 x 2 mesh", "4 ranks, 2 replicas of 2 shards", run={"mesh": (2, 2)}),
        Feature(
            "across",
            'the same mesh, windows with `across="replicate"`',
            run={"mesh": (2, 2), "across": True},
        ),
    )
}


class Clash(ValueError):
    """Two features say different things about one key."""


def merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings' keys, deeply.

    Raises:
        Clash: a key has two values.
    """
    merged = dict(one)
    for key, value in other.items():
        found = merged.get(key, value)
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            merged[key] = merge(found, value)
        elif found != value:
            raise Clash(f"{key}: {found!r} and {value!r}")
        else:
            merged[key] = value
    return merged


def merged(names: tuple[str, ...]) -> dict[str, Any]:
    """The features of ``names`` as one mapping."""
    whole: dict[str, Any] = {"config": _zero(), "model": {}, "run": {}}
    for name in names:
        one = FEATURES[name]
        whole = merge(whole, {"config": one.config, "model": one.model, "run": one.run})
    return whole


def setup_of(names: tuple[str, ...]) -> Setup:
    """What to run for a row."""
    whole = merged(names)
    return Setup(whole["config"], Options(**whole["model"]), **whole["run"])


def rows() -> list[tuple[str, ...]]:
    """Every feature alone, then every pair that is more than one of its halves."""
    found: list[tuple[str, ...]] = [(name,) for name in FEATURES]
    for pair in combinations(FEATURES, 2):
        try:
            both = merged(pair)
        except Clash:
            continue
        if both not in [merged((name,)) for name in pair]:
            found.append(pair)
    return found
