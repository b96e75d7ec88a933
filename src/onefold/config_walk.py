"""One pass over DeepSpeed's JSON: the fields of ``Config`` that it sets, and all that is wrong.

``config_keys`` says what becomes of each key; what depends on several fields is ``Config``'s own.
"""

import difflib
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from onefold.config_keys import CONTAINERS, FIELD_PATHS, KNOWN, OLDER, SWITCHED, TABLE
from onefold.config_rule import AUTO, Key, Rule

_CLIPPING_NOTE = (
    "gradient_clipping is not given, so gradients are not clipped "
    "(DeepSpeed 0.19.8 clips at 1.0 unless told otherwise)"
)
_AUTOCAST_NOTE = (
    "torch_autocast.dtype is not given, so it is bf16 "
    "(DeepSpeed 0.19.8 leaves it to torch.autocast, which takes fp16 on GPUs)"
)


class Conflict(ValueError):
    """Settings that do not go together; its lines name their paths themselves."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        super().__init__("\n".join(lines))


def _got(value: object) -> str:
    """Show a value and, where that says more, its type."""
    return "nothing" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def explain(error: ValidationError) -> list[str]:
    """Turn pydantic's errors into ours, with the dotted path of the JSON."""
    lines: list[str] = []
    for detail in error.errors():
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Conflict):
            lines += cause.lines
            continue
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


def _are_neighbours(path: str, other: str) -> bool:
    """Two keys of one section: the second may refine what the first said."""
    return path.rpartition(".")[0] == other.rpartition(".")[0]


class Walk:
    """One pass over a mapping: the fields it sets, what is wrong in it, what has no effect.

    Args:
        data: the whole of the JSON.

    Attributes:
        fields: arguments for ``Config``.
        problems: one sentence for each thing wrong.
        idle: paths accepted without effect, by the reason why.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.fields: dict[str, Any] = {}
        self.problems: list[str] = []
        self.idle: dict[str, list[str]] = {}
        self._said_by: dict[str, str] = {}
        self._section(data, "")
        # The section fp16 also has the settings for an autocast in fp16; else they stay unused.
        if "fp16" in (self.fields.get("precision"), self.fields.get("autocast_dtype")):
            self.fields.setdefault("loss_scale", {})
        else:
            self.fields.pop("loss_scale", None)

    def notes(self) -> tuple[str, ...]:
        """Say each reason once, with all the keys it concerns."""
        idle = [
            f"{', '.join(paths)}: accepted, without effect here: {text}"
            for text, paths in self.idle.items()
        ]
        if "gradient_clipping" not in self.fields:
            idle.append(_CLIPPING_NOTE)
        if self._said_by.get("autocast_dtype") == "torch_autocast.enabled":
            idle.append(_AUTOCAST_NOTE)
        return tuple(idle)

    def _section(self, data: Mapping[str, Any], prefix: str) -> None:
        """Take the keys of a section that stands in the table key by key."""
        for name, value in data.items():
            path = f"{prefix}.{name}" if prefix else str(name)
            newer = OLDER.get(path, "")
            if value not in (None, AUTO) and data.get(newer.rpartition(".")[2]) is not None:
                self.problems.append(
                    f"{path}: expected one of the two, got {newer}, its newer name, as well. "
                    f"Keep {newer}."
                )
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
        switch = SWITCHED.get(path)
        if isinstance(value, Mapping) and switch is not None:
            self._switched(path, value, switch)
        elif isinstance(value, Mapping):
            self._section(value, path)
        elif value is not None and not (switch and value in (False, "none", AUTO)):
            self._wrong(path, "a mapping", value)

    def _switched(self, path: str, section: Mapping[str, Any], switch: str) -> None:
        """Take the switch, then the other keys; of a section that is off only their names.

        The scaler's settings are taken all the same: an autocast in fp16 needs them.
        """
        if switch in section:
            self._key(f"{path}.{switch}", section[switch], TABLE[f"{path}.{switch}"])
        is_on = f"{path}.{switch}" in self._said_by.values()
        for name, value in section.items():
            key = TABLE.get(f"{path}.{name}")
            if key is None:
                self._unknown(f"{path}.{name}")
            elif name != switch and (is_on or key.field.startswith("loss_scale.")):
                self._key(f"{path}.{name}", value, key)

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
        try:
            meaning = key.meaning(value)
        except KeyError:
            self._wrong(path, key.text, value)
            return
        if meaning is not None:
            self._set(path, key.field, meaning)

    def _set(self, path: str, name: str, value: object) -> None:
        field, _, inner = name.partition(".")
        if inner:
            self.fields.setdefault(field, {})[inner] = value
            return
        other = self._said_by.get(field)
        if other and self.fields[field] != value and not _are_neighbours(other, path):
            self.problems.append(
                f"{path}: expected one of the two, got {other} as well. Turn one of them off."
            )
            return
        self.fields[field] = value
        self._said_by[field] = path

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
