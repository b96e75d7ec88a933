"""Pairs: (anchor, positive) texts to train on, from the standard library or from the user's file.

Order and split depend on the pairs only, so two runs on one machine see the same data.
"""

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from onefold.cli.failure import BadInput

MAX_HELD_OUT: Final = 500
MIN_ANCHOR_WORDS: Final = 2
_SEED: Final = 20260101
# Not the library itself: its tests, what is installed into it, and IDLE with its kin.
_SKIPPED_FOLDERS: Final = {
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Pair(NamedTuple):
    """Two texts that belong together."""

    anchor: str
    positive: str


class Split(NamedTuple):
    """Pairs to train on and pairs that are held out for the evaluation."""

    train: list[Pair]
    held_out: list[Pair]


def split(pairs: Iterable[Pair]) -> Split:
    """Shuffle ``pairs``, always in the same way, and hold out a tenth, at most 500."""
    shuffled = list(pairs)
    random.Random(_SEED).shuffle(shuffled)
    num_held_out = min(MAX_HELD_OUT, len(shuffled) // 10)
    return Split(shuffled[num_held_out:], shuffled[:num_held_out])


# -- the standard library ---------------------------------------------------------------------


def standard_library(root: Path | None = None) -> list[Pair]:
    """The first paragraph of every function's docstring, and its source without the docstring.

    No anchor and no positive comes twice. Files that do not parse are left out.

    Args:
        root: the folder to read; default this Python's standard library.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    pairs: dict[str, Pair] = {}
    positives: set[str] = set()
    for path in sorted(files, key=Path.as_posix):
        if not _SKIPPED_FOLDERS.isdisjoint(path.parts):
            continue
        for pair in _functions_of(root / path):
            if pair.anchor not in pairs and pair.positive not in positives:
                pairs[pair.anchor] = pair
                positives.add(pair.positive)
    return list(pairs.values())


def _functions_of(path: Path) -> Iterator[Pair]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            anchor = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if len(anchor.split()) >= MIN_ANCHOR_WORDS:
                code = _without_docstring(node, lines)
                if code:
                    yield Pair(anchor, code)


def _without_docstring(node: _Function, lines: list[str]) -> str:
    """The source of ``node``; empty if nothing but a docstring is in it."""
    docstring, *body = node.body
    first, last = docstring.lineno, docstring.end_lineno or docstring.lineno
    if not body or node.lineno == first or body[0].lineno == last:
        return ""  # a stub, or one that shares its docstring's lines
    kept = lines[node.lineno - 1 : first - 1] + lines[last : node.end_lineno]
    return textwrap.dedent("".join(kept)).strip()


# -- the user's own file ----------------------------------------------------------------------


def read_pairs(path: Path) -> list[Pair]:
    """Read JSON lines with ``anchor`` and ``positive``; empty lines are allowed.

    Raises:
        BadInput: the file cannot be read, or one of its lines is no pair; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--data {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BadInput(f"--data {path}, line {line}: expected UTF-8 text.") from None
    return [
        _pair_of(line, f"--data {path}, line {number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _pair_of(line: str, where: str) -> Pair:
    wanted = 'expected {"anchor": "...", "positive": "..."}'
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "it does not parse"
        raise BadInput(f"{where}: {wanted}, but this is not JSON ({reason}).") from None
    if not isinstance(found, dict):
        raise BadInput(f"{where}: {wanted}, got {_kind_of(found)}.")
    for key in Pair._fields:
        if key not in found:
            there = ", ".join(map(repr, found)) or "no key"
            raise BadInput(f"{where}: {wanted}; {key!r} is missing, there is {there}.")
        if not isinstance(found[key], str) or not found[key].strip():
            raise BadInput(f"{where}: {key!r} must be a text, got {_kind_of(found[key])}.")
    return Pair(found["anchor"], found["positive"])


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "an empty text", type(None): "null"}
    return names.get(type(value), f"{value!r}")


# -- from the command to its ranks ------------------------------------------------------------


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """Write ``pairs`` in the form that ``read_pairs`` reads."""
    rows = (json.dumps(pair._asdict()) for pair in pairs)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def take(pairs: list[Pair], *, step: int, rank: int, num_ranks: int, batch_size: int) -> list[Pair]:
    """The batch of one rank: ranks take turns, every pass over the pairs has an order of its own.

    Args:
        pairs: at least ``num_ranks * batch_size``; what is left of a pass is not used.
        step: counted from 0.
        rank: this rank.
        num_ranks: all ranks.
        batch_size: pairs of one rank.
    """
    per_step = num_ranks * batch_size
    epoch, position = divmod(step, len(pairs) // per_step)
    order = list(range(len(pairs)))
    random.Random(_SEED + epoch).shuffle(order)
    start = position * per_step + rank * batch_size
    return [pairs[index] for index in order[start : start + batch_size]]
