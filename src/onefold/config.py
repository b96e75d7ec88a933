"""Every setting of an engine, read once from DeepSpeed's JSON names; nothing re-reads it later.

``config_keys`` says what becomes of each key. This file walks a mapping against that table, reports
everything wrong in one error, and holds the result as a frozen ``Config``.
"""

import difflib
import hashlib
import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from onefold.config_keys import AUTO, CONTAINERS, FIELD_PATHS, KNOWN, TABLE, Key, Rule

# Another rank may wait longer, and has no need to print the same sentences.
_NOT_SHARED = frozenset({"notes", "timeout_s"})

_CLIPPING_NOTE = (
    "gradient_clipping is not given, so gradients are not clipped "
    "(DeepSpeed 0.19.8 clips at 1.0 unless told otherwise)"
)


def _no_bool(value: object) -> object:
    """Keep True from passing for 1, which it equals."""
    if isinstance(value, bool):
        raise ValueError("a bool is not a number")
    return value


def _whole(value: object) -> object:
    """Turn 5e8 into an int: JSON has no other short spelling for it."""
    return int(value) if isinstance(value, float) and value.is_integer() else _no_bool(value)


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

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower)] = "mean"
    """Whether gradients are averaged over the ranks or only summed."""

    optimizer: Entry | None = None
    """The optimizer to build, if the caller brings none."""

    scheduler: Entry | None = None
    """The learning rate scheduler to build, if the caller brings none."""

    block_classes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Class names of the repeated blocks that stage 3 unshards as a whole."""

    transport: Literal["auto", "native", "direct"] = "auto"
    """How flat buffers cross the wire; auto chooses by backend."""

    timeout_s: float = Field(1800.0, gt=0.0)
    """Timeout of data collectives; the control group's is longer."""

    notes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Sentences to log once at start, such as which keys are accepted but mean nothing here."""

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
        walk = _Walk()
        walk.section(data, "")
        config: Config | None = None
        try:
            config = cls(**walk.fields, notes=walk.notes())
        except ValidationError as error:
            walk.problems.extend(_explain(error))
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
            name: value.model_dump() if isinstance(value, Entry) else value
            for name, value in self
            if name not in _NOT_SHARED
        }
        text = json.dumps(shared, sort_keys=True, default=_stable)
        return hashlib.sha256(text.encode()).hexdigest()


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


def _got(value: object) -> str:
    """Show a value and, where that says more, its type."""
    return "nothing" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def _explain(error: ValidationError) -> list[str]:
    """Turn pydantic's errors into ours, with the dotted path of the JSON."""
    lines = []
    for detail in error.errors():
        parts = [str(part) for part in detail["loc"]]
        paths = (FIELD_PATHS.get(".".join(parts[:end])) for end in (2, 1))
        path = next(filter(None, paths), ".".join(parts))
        expected = TABLE[path].text if path in TABLE else detail["msg"]
        got = "nothing" if detail["type"] == "missing" else _got(detail["input"])
        lines.append(f"{path}: expected {expected}, got {got}")
    return lines


def _inner(section: Mapping[str, Any], name: str) -> object:
    """Look a dotted name up; None where it is not there."""
    value: object = section
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _advice(path: str) -> str:
    """Name where an unknown key may belong: elsewhere under its own name, or the nearest name."""
    parent, _, leaf = path.rpartition(".")
    if leaf in FIELD_PATHS:
        return f"it belongs to {FIELD_PATHS[leaf]}"
    elsewhere = sorted(one for one in KNOWN if one.rpartition(".")[2] == leaf)
    siblings = {one.rpartition(".")[2]: one for one in KNOWN if one.rpartition(".")[0] == parent}
    near = difflib.get_close_matches(leaf, siblings, n=1)
    if elsewhere:
        return f"it belongs to {' or '.join(elsewhere[:3])}"
    if near:
        return f"the nearest known key is {siblings[near[0]]}"
    leaves = {one.rpartition(".")[2]: one for one in sorted(KNOWN, reverse=True)}
    far = difflib.get_close_matches(leaf, leaves, n=1)
    return f"the nearest known key is {leaves[far[0]]}" if far else "no known key is near"


class _Walk:
    """One pass over a mapping: the fields it sets, what is wrong in it, what has no effect.

    Attributes:
        fields: arguments for ``Config``.
        problems: one sentence for each thing wrong.
        idle: paths accepted without effect, by the reason why.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.problems: list[str] = []
        self.idle: dict[str, list[str]] = {}

    def notes(self) -> tuple[str, ...]:
        """Say each reason once, with all the keys it concerns."""
        idle = [
            f"{', '.join(paths)}: accepted, without effect here: {text}"
            for text, paths in self.idle.items()
        ]
        return (*idle, *([] if "gradient_clipping" in self.fields else [_CLIPPING_NOTE]))

    def section(self, data: Mapping[str, Any], prefix: str) -> None:
        """Take the keys of a section that stands in the table key by key."""
        for name, value in data.items():
            path = f"{prefix}.{name}" if prefix else str(name)
            if path in TABLE:
                self._key(path, value, TABLE[path])
            elif path in CONTAINERS:
                self._container(path, value)
            else:
                self._unknown(path)

    def _container(self, path: str, value: object) -> None:
        # DeepSpeed still takes a bare true or false for stage 1 or 0.
        if path == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        if isinstance(value, Mapping):
            self.section(value, path)
        elif value is not None:
            self._wrong(path, "a mapping", value)

    def _key(self, path: str, value: Any, key: Key) -> None:
        if key.kind == "section":
            self._whole_section(path, value, key)
        elif key.rule is Rule.HONOURED:
            self._honour(path, value, key)
        elif key.rule is Rule.REFUSED:
            if not key.is_off(value):
                self._refuse(path, value, key)
        elif value is not None and value != AUTO:
            if key.takes(value):
                self.idle.setdefault(key.text, []).append(path)
            else:
                self._wrong(path, f"a value of type {key.kind}", value)

    def _honour(self, path: str, value: Any, key: Key) -> None:
        if value is None or (value == AUTO and key.derivable):
            return
        if value == AUTO:
            self._wrong(path, f'{key.text} ("auto" cannot be derived here)', value)
            return
        field, _, inner = key.field.partition(".")
        if inner:
            self.fields.setdefault(field, {})[inner] = value
        else:
            self.fields[field] = value

    def _whole_section(self, path: str, value: object, key: Key) -> None:
        """Take a section whose keys share one fate; names are checked even while it is off."""
        if isinstance(value, Mapping):
            if key.names is not None:
                self._names(path, "", value, key.names)
        elif not key.is_off(value):
            self._wrong(path, "a mapping", value)
            return
        if not isinstance(value, Mapping) or not value:
            return
        if key.rule is Rule.ALWAYS:
            self.idle.setdefault(key.text, []).append(path)
            return
        # A section without a switch is on by being there, unless it says so itself.
        switches = {name: _inner(value, name) for name in key.switches}
        on = [name for name, given in switches.items() if not key.is_off(given)]
        if on:
            self._refuse(f"{path}.{on[0]}", switches[on[0]], key)
        elif not key.switches and value.get("enabled") is not False:
            self._refuse(path, dict(value), key)

    def _names(
        self, path: str, inside: str, value: Mapping[str, Any], names: frozenset[str]
    ) -> None:
        for name, item in value.items():
            relative = f"{inside}{name}"
            deeper = any(one.startswith(f"{relative}.") for one in names)
            if relative not in names and not deeper:
                self._unknown(f"{path}.{relative}")
            elif deeper and isinstance(item, Mapping):
                self._names(path, f"{relative}.", item, names)

    def _refuse(self, path: str, value: object, key: Key) -> None:
        offs = " or ".join(json.dumps(off) for off in key.off) or "no such key"
        self.problems.append(
            f"{path}: {key.text}; expected {offs}, got {_got(value)}. Remove it to go on without."
        )

    def _wrong(self, path: str, expected: str, value: object) -> None:
        self.problems.append(f"{path}: expected {expected}, got {_got(value)}")

    def _unknown(self, path: str) -> None:
        self.problems.append(
            f"{path}: neither DeepSpeed 0.19.8 nor onefold has this key; {_advice(path)}"
        )
