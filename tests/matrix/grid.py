"""The grid: which fields there are, how one is judged, and a sample that covers it."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import onefold
from tests.harness import WorkerError, WorkerPool, pool_for
from tests.matrix.cell import MODES, Result, play
from tests.matrix.features import FEATURES, Clash, Setup, rows, setup_of

STAGES = (0, 1, 2, 3)
ALONE = (3, 5, 7)
"""Backwards of a step, in fields of one feature; 3 in the others."""

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stands in a field."""

    kind: Literal["ran", "refused", "left out", "FAIL"]
    ulps: float = 0.0
    text: str = ""


def left_out(setup: Setup, stage: int, mode: str) -> str:
    """Why the contract has no such field; empty if it has."""
    if setup.uneven and setup.model.experts > 1:
        return "Ranks that share experts wait for each other's rows, so they run equally often."
    reduces = mode == "bare" or (setup.across and mode in ("window", "nested"))
    if setup.uneven and stage >= 2 and reduces:
        return (
            "Where gradients are sharded a backward reduces as it goes, outside of windows and "
            "over the shard axis of an `across` one, so ranks must run the same backwards."
        )
    return ""


def numbers(names: Names) -> Sequence[int]:
    """How many backwards a field is tried with, one after another."""
    return ALONE if len(names) == 1 else ALONE[:1]


def judge(setup: Setup, ranks: Sequence[Result]) -> Verdict:
    """One run's results of all ranks."""
    first = ranks[0]
    for rank, one in enumerate(ranks):
        if one.problem:
            return Verdict("FAIL", text=f"rank {rank}: {one.problem}")
        if one.refusal != first.refusal:
            told = f"{first.refusal or 'nothing'!r} and {one.refusal or 'nothing'!r}"
            return Verdict("FAIL", text=f"ranks 0 and {rank} refuse differently: {told}")
        if one.digest != first.digest:
            return Verdict("FAIL", text=f"ranks 0 and {rank} have different weights")
    if first.refusal:
        return Verdict("refused", text=first.refusal)
    ulps = max(one.ulps for one in ranks)
    if not all(one.ulps <= setup.bound for one in ranks):  # nan, too
        return Verdict("FAIL", ulps, f"off by {ulps:g} ulps of {setup.wire}, above {setup.bound:g}")
    return Verdict("ran", ulps)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several runs of one field: a failure, else the largest deviation."""
    failed = [one for one in verdicts if one.kind == "FAIL"]
    if not failed and len({one.kind for one in verdicts}) > 1:
        return Verdict("FAIL", text="refused with some numbers of backwards only")
    return failed[0] if failed else max(verdicts, key=lambda one: one.ulps)


def run_fields(
    names: Names,
    stage: int,
    modes: Sequence[str] = MODES,
    *,
    all_numbers: bool = True,
    pool_of: Callable[[int], WorkerPool] = pool_for,
    timeout_s: float = 60.0,
) -> dict[str, Verdict]:
    """Run a row's fields of one stage; those of a call that ends badly once more, one by one.

    Args:
        names: the row.
        stage: of ZeRO.
        modes: which fields.
        all_numbers: of backwards, where there are several; else the first.
        pool_of: gives the workers of a world size.
        timeout_s: of one call; a hang ends there.
    """
    setup = setup_of(names)
    verdicts: dict[str, Verdict] = {}
    runs: list[tuple[str, int]] = []
    for mode in modes:
        reason = left_out(setup, stage, mode)
        if reason:
            verdicts[mode] = Verdict("left out", text=reason)
        else:
            counts = numbers(names) if all_numbers else ALONE[:1]
            runs += [(mode, number) for number in counts]
    if not runs:
        return verdicts
    try:
        pool = pool_of(setup.world_size)
        results = pool.run_within(timeout_s, play, names=names, stage=stage, runs=runs)
    except WorkerError as error:
        tried = list(dict.fromkeys(mode for mode, _ in runs))
        if len(tried) == 1:
            return {**verdicts, tried[0]: Verdict("FAIL", text=str(error))}
        for mode in tried:
            verdicts |= run_fields(
                names,
                stage,
                [mode],
                all_numbers=all_numbers,
                pool_of=pool_of,
                timeout_s=timeout_s,
            )
        return verdicts
    for mode in dict.fromkeys(mode for mode, _ in runs):
        places = [place for place, (own, _) in enumerate(runs) if own == mode]
        verdicts[mode] = worst([judge(setup, [r[place] for r in results]) for place in places])
    return verdicts


# -- a sample for the ordinary suite -----------------------------------------------------------


def sample() -> list[tuple[Names, int, str]]:
    """Fields of up to three features that cover the grid.

    Every feature meets every stage and every mode that it can run in, and every pair that can be
    merged occurs: in a field that runs, if there is one.
    """
    left = [set(names) for names in rows() if len(names) == 2 and has_fields(names)]
    met = {name: set[tuple[int, str]]() for name in FEATURES}
    chosen: list[tuple[Names, int, str]] = [(("fp32",), 3, "window")]
    while left:
        names = _with_a_third(left)
        field = max(_possible(names), key=lambda field: _news(field, names, met))
        chosen.append((names, *field))
        for name in names:
            met[name].add(field)
        left = [pair for pair in left if not pair <= set(names)]
    for name, fields in met.items():
        setup = setup_of((name,))
        stages = {stage for stage, _ in fields}
        modes = {mode for _, mode in fields}
        for stage, mode in _all_fields():
            if stage not in stages or mode not in modes:
                if left_out(setup, stage, mode):
                    continue
                chosen.append(((name,), stage, mode))
                stages.add(stage)
                modes.add(mode)
    return chosen


def _all_fields() -> list[tuple[int, str]]:
    return [(stage, mode) for stage in STAGES for mode in MODES]


def _with_a_third(left: list[set[str]]) -> Names:
    """The next pair, and the feature that brings the most other pairs of ``left`` with it."""
    pair = _in_order(left[0])
    if not _runs(pair, 3):
        return pair
    others = [_in_order({*pair, name}) for name in FEATURES if name not in pair]
    fitting = [names for names in others if _runs(names, 3) and has_fields(names)]
    best = max(fitting, key=lambda names: sum(one <= set(names) for one in left), default=pair)
    return best if sum(one <= set(best) for one in left) > 1 else pair


def _in_order(names: set[str]) -> Names:
    return tuple(name for name in FEATURES if name in names)


def _runs(names: Names, stage: int) -> bool:
    """Whether the features can be merged and the settings are accepted."""
    try:
        config = setup_of(names).config
        zero = {**config["zero_optimization"], "stage": stage}
        onefold.Config.load({**config, "zero_optimization": zero})
    except (Clash, ValueError):
        return False
    return True


def has_fields(names: Names) -> bool:
    """Whether the contract has any field of the row."""
    return any(_possible(names))


def _possible(names: Names) -> Iterator[tuple[int, str]]:
    """Fields that run; of features that nobody runs together, fields in which that is said."""
    setup = setup_of(names)
    anywhere = any(_runs(names, stage) for stage in STAGES)
    for stage, mode in _all_fields():
        is_refused = setup.across and mode == "armed"
        if left_out(setup, stage, mode) or is_refused or (anywhere and not _runs(names, stage)):
            continue
        yield stage, mode


def _news(
    field: tuple[int, str], names: Names, met: dict[str, set[tuple[int, str]]]
) -> tuple[int, ...]:
    """How much of a field is new to the features: stages and modes first, then fields."""
    stage, mode = field
    stages = sum(stage not in {one for one, _ in met[name]} for name in names)
    modes = sum(mode not in {one for _, one in met[name]} for name in names)
    return stages + modes, sum(field not in met[name] for name in names)


def pairs_of(names: Names) -> Iterator[frozenset[str]]:
    """The pairs that a field of several features is about."""
    yield from map(frozenset, combinations(names, 2))


def quiet_environment() -> None:
    """What ``conftest`` sets for pytest: before the first pool starts."""
    import socket

    os.environ["OMP_NUM_THREADS"] = "1"
    for _, interface in socket.if_nameindex():
        if interface in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
