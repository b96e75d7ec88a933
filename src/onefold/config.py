"""Every setting of an engine, read once from DeepSpeed's JSON names; nothing re-reads it later.

``config_keys`` says what becomes of each key, and ``config_walk`` walks a mapping against that
table. This file holds the result as a frozen ``Config``, checks what depends on several settings,
and reports everything wrong in one error.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from onefold.config_walk import Conflict, Walk, explain

# Another rank may wait longer, and has no need to print the same sentences.
_NOT_SHARED = frozenset({"notes", "timeout_s"})

MAX_LOSS_SCALE: Final = 2.0**126
"""Of it and of its inverse, which is the smallest normal number, fp32 has the exact value."""

Half = Literal["bf16", "fp16"]
Dtype = Literal["fp32", "bf16", "fp16"]


def _no_bool(value: object) -> object:
    """Keep True from passing for 1, which it equals."""
    if isinstance(value, bool):
        raise ValueError("a bool is not a number")
    return value


def _whole(value: object) -> object:
    """Turn 5e8 into an int: JSON has no other short spelling for it."""
    return int(value) if isinstance(value, float) and value.is_integer() else _no_bool(value)


def _order(value: object) -> object:
    """Spell the infinite order, which JSON has no number for."""
    if isinstance(value, str) and value.lower() == "inf":
        return math.inf
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("nan is not an order")
    return _no_bool(value)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_Count = Annotated[int, Field(gt=0), BeforeValidator(_whole)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Entry(_Frozen):
    """An optimizer or a scheduler as the JSON names it."""

    type: str
    """Class name, as ``optim.entries`` finds it."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments; a value of "auto" counts as not given."""


class LossScale(_Frozen):
    """How a loss is scaled so that its gradients fit fp16; DeepSpeed's names and defaults."""

    loss_scale: Annotated[float, BeforeValidator(_no_bool)] = Field(0.0, ge=0.0, le=MAX_LOSS_SCALE)
    """The scale, if it never changes; 0 lets it change."""

    initial_scale_power: Annotated[int, BeforeValidator(_whole)] = Field(16, ge=0, le=126)
    """A changing scale starts at 2 to the power of it."""

    loss_scale_window: _Count = 1000
    """Clean steps until a changing scale doubles; the first after an overflow does not count."""

    hysteresis: _Count = 2
    """Overflows it takes to halve a changing scale; once halved, every overflow halves it."""

    consecutive_hysteresis: bool = False
    """True: any clean step restores ``hysteresis``; False: only a doubling does."""

    min_loss_scale: Annotated[float, BeforeValidator(_no_bool)] = Field(1.0, gt=0.0)
    """A changing scale never falls below."""

    @model_validator(mode="after")
    def _starts_in_range(self) -> Self:
        if self.loss_scale and self.loss_scale < 1 / MAX_LOSS_SCALE:
            raise Conflict(
                [f"fp16.loss_scale: expected 0 or at least 2**-126, got {self.loss_scale}"]
            )
        start = 2.0**self.initial_scale_power
        if not self.loss_scale and not 1 / MAX_LOSS_SCALE <= self.min_loss_scale <= start:
            raise Conflict(
                [
                    "fp16.min_loss_scale: expected at least 2**-126 and at most the initial scale, "
                    f"2**{self.initial_scale_power}, got {self.min_loss_scale}"
                ]
            )
        return self


class Config(_Frozen):
    """All settings of one engine, checked; ``Config.load`` reads DeepSpeed's JSON into it."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_bool)] = 0
    """ZeRO stage: what the ranks hold shards of."""

    reduce_bucket_numel: _Count | None = None
    """Elements of one reduction at stages 0-2; None is the engine's default of 25 MiB."""

    train_batch_size: _Count | None = None
    """Samples of one step over all ranks."""

    train_micro_batch_size_per_gpu: _Count | None = None
    """Samples of one backward on one rank."""

    gradient_accumulation_steps: _Count | None = None
    """Backwards of one step; None if nobody said."""

    managed_gradient_accumulation: bool = True
    """True: the engine counts microbatches up to the boundary; False: every ``step()`` is one."""

    gradient_clipping: float = Field(0.0, ge=0.0)
    """Largest gradient norm over all parameters; 0.0 is off."""

    norm_order: Annotated[float, BeforeValidator(_order)] = Field(2.0, ge=1.0, allow_inf_nan=True)
    """Order of the gradient norm that ``gradient_clipping`` bounds; inf: the largest element."""

    on_nonfinite: Literal["skip", "raise", "ignore"] = "skip"
    """What ``step()`` does where a gradient is not finite; fp16's loss scale always skips."""

    precision: Half | None = None
    """Dtype of the model's weights; None leaves what it comes with. Masters are fp32 or wider."""

    autocast_dtype: Half | None = None
    """Dtype of ``torch.autocast`` around each forward; None is none."""

    loss_scale: LossScale | None = None
    """How the loss is scaled; there if, and only if, one of the two above is fp16."""

    grad_accum_dtype: Dtype | None = None
    """Dtype in which gradients accumulate between backwards; None is fp32 or wider."""

    communication_data_type: Dtype | None = None
    """Dtype in which gradients cross the wire; None is the model's own."""

    offload_optimizer: bool = False
    """Masters and the optimizer's state live in host memory, and the optimizer steps there."""

    offload_param: bool = False
    """The shards of the parameters live in host memory."""

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower)] = "mean"
    """Whether gradients are averaged over the ranks or only summed."""

    optimizer: Entry | None = None
    """The optimizer to build, if the caller brings none."""

    scheduler: Entry | None = None
    """The learning rate scheduler to build, if the caller brings none."""

    block_classes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Class names of the repeated blocks that stage 3 unshards as a whole."""

    transport: Literal["auto", "cross-memory", "direct", "native"] = "auto"
    """How flat buffers cross the wire; auto chooses by backend."""

    load_universal: bool = False
    """``load_checkpoint`` reads DeepSpeed's universal folders, and no others."""

    timeout_s: float = Field(1800.0, gt=0.0)
    """Timeout of data collectives; the control group's is longer."""

    notes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Sentences to log once at start, such as which keys are accepted but mean nothing here."""

    @model_validator(mode="before")
    @classmethod
    def _fill_loss_scale(cls, data: dict[str, Any]) -> dict[str, Any]:
        is_half = "fp16" in (data.get("precision"), data.get("autocast_dtype"))
        is_missing = is_half and data.get("loss_scale") is None
        return {**data, "loss_scale": {}} if is_missing else data

    @model_validator(mode="after")
    def _agree(self) -> Self:
        lines = _disagreements(dict(self), set())
        if lines:
            raise Conflict(lines)
        return self

    @classmethod
    def load(cls, source: "Config | Mapping[str, Any] | str | os.PathLike[str] | None") -> "Config":
        """Read settings from a mapping or the path of a JSON file; a ``Config`` stays as it is.

        Args:
            source: DeepSpeed's JSON names, plus the section "onefold"; None means all defaults.

        Returns:
            The checked settings, with what was accepted without effect in ``notes``.

        Raises:
            ValueError: the file cannot be read, or any key is unknown, refused or has a wrong
                value; the text lists all of them.
        """
        if isinstance(source, Config):
            return source
        if source is None:
            return cls()
        where, data = _read(source)
        walk = Walk(data)
        config: Config | None = None
        try:
            config = cls(**walk.fields, notes=walk.notes())
        except ValidationError as error:
            wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
            walk.problems += explain(error)
            # Where pydantic found a wrong value it did not come to comparing the others.
            walk.problems += _disagreements(walk.fields, wrong) if wrong else []
        if config is None or walk.problems:
            count = len(walk.problems)
            lines = "".join(f"\n- {problem}" for problem in walk.problems)
            raise ValueError(f"{where}: {count} problem{'s' if count > 1 else ''}:{lines}")
        return config

    def resolve_batch(self, world_size: int) -> "Config":
        """Complete or check train_batch_size = micro batch * accumulation * world size.

        Where no batch size was given nothing is derived, so accumulation stays as it is. Where only
        one of the two was given, accumulation is 1, as in DeepSpeed.

        Args:
            world_size: ranks of the data-parallel group.

        Returns:
            A copy with all three numbers, or with what was given if that was no batch size.

        Raises:
            ValueError: world_size below 1, or no whole numbers fulfil the identity.
        """
        if world_size < 1:
            raise ValueError(f"resolve_batch: expected world_size of 1 or more, got {world_size}")
        batch, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if batch is None and micro is None:
            return self
        if steps is None:
            steps = batch // (micro * world_size) if batch and micro else 1
        if micro is None:
            micro = (batch or 0) // (steps * world_size)
        if batch is None:
            batch = micro * steps * world_size
        if micro < 1 or steps < 1 or batch != micro * steps * world_size:
            raise ValueError(
                "train_batch_size: expected train_micro_batch_size_per_gpu * "
                "gradient_accumulation_steps * world_size, in whole numbers, got "
                f"train_batch_size={self.train_batch_size}, "
                f"train_micro_batch_size_per_gpu={self.train_micro_batch_size_per_gpu}, "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, "
                f"world_size={world_size} ({batch} is not {micro} * {steps} * {world_size}). "
                "Change one of them, or leave one out to have it derived."
            )
        numbers = {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        return self.model_copy(update=numbers)

    def fingerprint(self) -> str:
        """Return a hash of what must be equal on all ranks: every field but timeout and notes."""
        shared = {
            name: value.model_dump() if isinstance(value, BaseModel) else value
            for name, value in self
            if name not in _NOT_SHARED
        }
        text = json.dumps(shared, sort_keys=True, default=_stable)
        return hashlib.sha256(text.encode()).hexdigest()


def _disagreements(given: Mapping[str, Any], wrong: set[str]) -> list[str]:
    """Compare the fields with one another, leaving out those with a ``wrong`` value."""
    values = {name: field.default for name, field in Config.model_fields.items()} | dict(given)
    values |= dict.fromkeys(wrong)
    precision, autocast = values["precision"], values["autocast_dtype"]
    stage, accumulates = values["stage"], values["grad_accum_dtype"]
    lines = []
    if precision and autocast:
        lines.append(
            f"torch_autocast.enabled: expected a model in fp32, got {precision}.enabled as well. "
            "Turn one of them off."
        )
    if precision and accumulates not in (None, "fp32", precision):
        lines.append(
            f"data_types.grad_accum_dtype: expected fp32 or the model's own {precision}, got "
            f"{accumulates}"
        )
    if values["loss_scale"] is not None and "fp16" not in (precision, autocast):
        lines.append("loss_scale: expected None without fp16, got settings. Enable fp16.")
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        if values[name] and stage is not None and stage < least:
            expected = "3" if least == 3 else "1, 2 or 3"
            lines.append(
                f"zero_optimization.{name}: expected zero_optimization.stage {expected}, where a "
                f"rank has shards to offload, got stage {stage}"
            )
    return lines


def _stable(value: object) -> object:
    """Spell a value that JSON lacks without memory addresses, which differ between processes."""
    if hasattr(value, "tolist"):
        return value.tolist()
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{getattr(named, '__qualname__', '')}"


def _read(source: object) -> tuple[str, Mapping[str, Any]]:
    """Return how to call the source in an error, and its keys."""
    if isinstance(source, Mapping):
        return "config", source
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            "config: expected a mapping, the path of a JSON file, a Config or None, got "
            f"{type(source).__name__}"
        )
    path = Path(source)
    where = f"config file {path}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_distinct)
    except OSError as error:
        raise ValueError(
            f"{where}: cannot be read ({error.strerror or error}). Pass the path of a JSON file, "
            "or a mapping."
        ) from error
    except ValueError as error:
        raise ValueError(f"{where}: expected JSON, got an error in it: {error}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return where, data


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build one JSON object, refusing a key that stands in it twice."""
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"duplicate keys {', '.join(twice)}")
    return dict(pairs)
