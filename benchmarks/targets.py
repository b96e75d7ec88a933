"""Targets: what the numbers must be, each judged by code from one run's results."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, Literal, NamedTuple

from benchmarks.cell import OWN, EngineName
from benchmarks.results import CellResult, EngineResult, Run
from benchmarks.stats import CONFIDENCE, Estimate, median_of, paired

LARGE: Final = {"25m": (1.08, 2.7, 1.9), "77m": (1.12, 3.0, 3.0)}
"""Workload to bounds: over the compute floor, faster than DeepSpeed, faster than FSDP2."""

BEHIND_DDP: Final = 1.05
LEVEL: Final = 1.05
"""What "level with DDP" means at stage 0."""
HOST: Final = 1.02
MEMORY: Final = 1.05
MINILM: Final = 1.10
FRAMES: Final = 0.02
"""Of the bytes on the loopback interface: headers and acknowledgements."""
TRAINS: Final = {"float32": 0.02, "bfloat16": 0.3}
"""Bound on the deviation of a step's loss from the reference."""

Verdict = Literal["reached", "missed", "not measured"]


class Judged(NamedTuple):
    """One line of the table of targets."""

    what: str
    bound: str
    found: str
    verdict: Verdict
    note: str = ""


def judge(run: Run) -> list[Judged]:
    """Every target, in the order in which they are stated."""
    return list(
        chain(
            _windows(run),
            _bare(run),
            _bytes(run),
            _constant_collectives(run),
            _host(run),
            _memory(run),
            _minilm(run),
            _training(run),
        )
    )


def _at_most(what: str, bound: float, ratio: Estimate | None) -> Judged:
    return _compared(what, f"at most {bound:g}", ratio, lambda value: value <= bound)


def _at_least(what: str, bound: float, ratio: Estimate | None) -> Judged:
    return _compared(what, f"at least {bound:g}", ratio, lambda value: value >= bound)


def _compared(
    what: str, bound: str, ratio: Estimate | None, holds: Callable[[float], bool]
) -> Judged:
    if ratio is None:
        return Judged(what, bound, "", "not measured")
    note = f"{ratio.num_pairs} pairs"
    if ratio.confidence < CONFIDENCE:
        note += f": the interval is worth {ratio.confidence:.0%}"
    if holds(ratio.low) != holds(ratio.high):
        note += "; the interval contains the bound"
    return Judged(what, bound, str(ratio), "reached" if holds(ratio.median) else "missed", note)


def _ratio(cells: list[CellResult], above: str, below: str) -> Estimate | None:
    """From the cell that has both for the most rounds."""
    found = [
        paired(cell.engines[above].seconds, cell.engines[below].seconds)
        for cell in cells
        if above in cell.engines and below in cell.engines
    ]
    return max(
        (one for one in found if one is not None), key=lambda one: one.num_pairs, default=None
    )


def _windows(run: Run) -> Iterator[Judged]:
    for workload, (floor, deepspeed, fsdp2) in LARGE.items():
        cells = run.find(workload, 8)
        armed = [one for one in ("armed@3",) if any(one in cell.engines for cell in cells)]
        for engine in ("window@1", "window@2", "window@3", *armed):
            name = f"{workload}, n = 8, {EngineName.parse(engine).label}"
            yield _at_most(f"{name} / compute floor", floor, _ratio(cells, engine, "floor"))
            yield _at_most(
                f"{name} / DDP no_sync", BEHIND_DDP, _ratio(cells, engine, "ddp_no_sync")
            )
            yield _at_least(
                f"DeepSpeed ZeRO-3 coalesced / {name}",
                deepspeed,
                _ratio(cells, "deepspeed_coalesced@3", engine),
            )
            against = [_ratio(cells, f"fsdp2_deferred@{stage}", engine) for stage in (2, 3)]
            yield _at_least(
                f"FSDP2 deferred, the faster kind / {name}",
                fsdp2,
                min((one for one in against if one is not None), default=None),
            )
            if engine.endswith("@3"):
                yield _at_least(f"FSDP2 deferred, fully sharded / {name}", fsdp2, against[1])


def _bare(run: Run) -> Iterator[Judged]:
    for num_backwards in (1, 4):
        cells = run.find("25m", num_backwards)
        for stage in range(4):
            what = f"25m, n = {num_backwards}, onefold bare, stage {stage}"
            own = f"bare@{stage}"
            peers = {"DeepSpeed": f"deepspeed@{stage}"}
            if stage >= 2:
                peers["FSDP2"] = f"fsdp2@{stage}"
            for label, peer in peers.items():
                yield _at_least(f"{label} / {what}", 1.0, _ratio(cells, peer, own))
            if stage == 0:
                yield _at_most(f"{what} / DDP", LEVEL, _ratio(cells, own, "ddp"))


def _own(run: Run) -> Iterator[tuple[CellResult, EngineName, EngineResult]]:
    for cell in run.cells:
        for text, result in cell.engines.items():
            name = EngineName.parse(text)
            if name.name in OWN and result.probe is not None:
                yield cell, name, result


def _counted(what: str, bound: str, checks: list[tuple[str, bool]]) -> Judged:
    wrong = [name for name, is_right in checks if not is_right]
    if not checks:
        return Judged(what, bound, "", "not measured")
    found = f"{len(checks) - len(wrong)} of {len(checks)}"
    return Judged(what, bound, found, "missed" if wrong else "reached", "; ".join(wrong[:3]))


def _bytes(run: Run) -> Iterator[Judged]:
    by_formula: list[tuple[str, bool]] = []
    on_loopback: list[tuple[str, bool]] = []
    for cell, name, result in _own(run):
        assert result.probe is not None
        sent, wanted = result.probe.sent_bytes, result.probe.expected_bytes
        where = f"{cell.cell.title}, {name.label}"
        by_formula.append((f"{where}: {sent} bytes, by the formula {wanted}", sent == wanted))
        seen = result.probe.loopback_bytes
        if cell.cell.transport == "direct" and sent and seen is not None:
            is_right = 0 <= seen / sent - 1 <= FRAMES
            on_loopback.append((f"{where}: {sent} bytes, {seen} on loopback", is_right))
    yield _counted("Bytes sent are the formula's", "all steps", by_formula)
    yield _counted(
        "Bytes of the direct transport are those on the loopback interface",
        f"0 to {100 * FRAMES:g}% above",
        on_loopback,
    )


def _constant_collectives(run: Run) -> Iterator[Judged]:
    groups: dict[str, set[tuple[tuple[str, int], ...]]] = {}
    sizes: dict[str, set[int]] = {}
    for cell, name, result in _own(run):
        if name.name == "bare" or cell.cell.dtype != "float32":
            continue
        assert result.probe is not None
        key = f"{cell.cell.workload}, W = {cell.cell.world_size}, stage {name.stage}"
        groups.setdefault(key, set()).add(tuple(sorted(result.probe.collectives.items())))
        sizes.setdefault(key, set()).add(cell.cell.num_backwards)
    checks = [(key, len(found) == 1) for key, found in groups.items() if len(sizes[key]) > 1]
    yield _counted("Collectives of a window do not depend on n", "all settings", checks)


def _host(run: Run) -> Iterator[Judged]:
    for result in run.host:
        what = f"{result.cell.title}: backward in a window / into an existing .grad"
        yield _at_most(what, HOST, paired(result.window_ms, result.plain_ms))


def _memory(run: Run) -> Iterator[Judged]:
    for workload in LARGE:
        for stage in (1, 2, 3):
            what = f"{workload}, n = 8, peak of window@{stage} / buffer table and activations"
            ratios = [
                ratio
                for cell in run.find(workload, 8)
                if (ratio := memory_ratio(cell, f"window@{stage}")) is not None
            ]
            yield _at_most(what, MEMORY, median_of(ratios[:1]) if ratios else None)


def memory_ratio(cell: CellResult, engine: str) -> float | None:
    """Peak over the buffer table plus what the floor's peak has above its own table."""
    own, floor = cell.engines.get(engine), cell.engines.get("floor")
    if own is None or floor is None or own.probe is None or floor.probe is None:
        return None
    if own.probe.table_bytes is None or floor.probe.table_bytes is None:
        return None
    activations = floor.probe.peak_bytes - floor.probe.table_bytes
    return own.probe.peak_bytes / (own.probe.table_bytes + activations)


def _minilm(run: Run) -> Iterator[Judged]:
    what = "minilm, n = 8, onefold window, stage 3 / compute floor"
    yield _at_most(what, MINILM, _ratio(run.find("minilm", 8), "window@3", "floor"))


def _training(run: Run) -> Iterator[Judged]:
    checks = [
        (f"{cell.cell.title}, {text}: {result.deviation:.2g}", trains(cell, result))
        for cell in run.cells
        for text, result in cell.engines.items()
        if result.deviation is not None
    ]
    bound = f"within {100 * TRAINS['float32']:g}% of the progress of one process"
    yield _counted("Every engine trains", bound, checks)


def trains(cell: CellResult, result: EngineResult) -> bool:
    """Whether the second step's loss is the reference's, up to the dtype's noise."""
    return result.deviation is not None and result.deviation <= TRAINS[cell.cell.dtype]
