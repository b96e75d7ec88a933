"""Table: one cell's numbers, and the page's section about checkpoints."""

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table

from benchmarks.checkpoints.cell import CheckpointResult, CheckpointRun, Visit, Way, WayResult
from benchmarks.stats import median_of, paired
from benchmarks.table import MEGA, first_line, markdown, table_of

SECTION: Final = "## Checkpoints"
SAVE_HEADINGS: Final = (
    "saving",
    "pause s [interval]",
    "/ onefold",
    "on disk s [interval]",
    "/ onefold",
    "steps meanwhile",
    "each takes",
    "lost s",
    "MB on disk",
    "MB peak",
)
LOAD_HEADINGS: Final = ("loading", "s [interval]", "/ onefold", "MB peak")


def save_rows(result: CheckpointResult) -> list[list[str]]:
    """One row per way."""
    return [_save_row(result, Way.parse(text), own) for text, own in result.ways.items()]


def _save_row(result: CheckpointResult, way: Way, own: WayResult) -> list[str]:
    base = result.ways.get(str(way.base))
    on_disk, on_disk_ratio = "not flushed", "-"
    if way.kind.flushes:
        on_disk = _seconds(own.visits, lambda visit: visit.on_disk_s)
        on_disk_ratio = _ratio(way, own, base, lambda visit: visit.on_disk_s)
    slowdowns = [value for visit in own.visits if (value := visit.slowdown) is not None]
    steps = [len(visit.steps_meanwhile_s) for visit in own.visits]
    probe = own.probe
    return [
        _label(way, own),
        _seconds(own.visits, lambda visit: visit.pause_s),
        _ratio(way, own, base, lambda visit: visit.pause_s),
        on_disk,
        on_disk_ratio,
        f"{statistics.median(steps):.0f}" if way.kind.is_async and steps else "-",
        f"{statistics.median(slowdowns):.2f} of one" if slowdowns else "-",
        f"{statistics.median(v.lost_s for v in own.visits):.2f}" if own.visits else "-",
        "-" if probe is None else f"{probe.file_bytes / MEGA:,.0f}",
        "-" if probe is None else _megabytes(probe.save_peak_bytes),
    ]


def load_rows(result: CheckpointResult) -> list[list[str]]:
    """One row per way; all are compared with onefold's."""
    rows = []
    for text, own in result.ways.items():
        way = Way.parse(text)
        base = result.ways.get(str(Way("onefold", way.stage)))
        rows.append(
            [
                _label(way, own),
                _seconds(own.visits, lambda visit: visit.load_s),
                _ratio(way, own, base, lambda visit: visit.load_s),
                "-" if own.probe is None else _megabytes(own.probe.load_peak_bytes),
            ]
        )
    return rows


def _label(way: Way, own: WayResult) -> str:
    return way.label if own.failure is None else f"{way.label} FAILED: {first_line(own.failure)}"


def _seconds(visits: Sequence[Visit], value_of: Callable[[Visit], float]) -> str:
    if not visits:
        return "-"
    found = median_of([value_of(visit) for visit in visits])
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _ratio(
    way: Way, own: WayResult, base: WayResult | None, value_of: Callable[[Visit], float]
) -> str:
    """The median over rounds that have both; "-" for what is compared with itself."""
    if base is None or base is own:
        return "-"
    found = paired([value_of(v) for v in own.visits], [value_of(v) for v in base.visits])
    return "-" if found is None else f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / MEGA:,.0f}"


def tables(result: CheckpointResult) -> list[Table]:
    """For the terminal."""
    title = f"{result.cell.title}; {result.rounds_text}, load {result.load:.1f}"
    return [
        table_of(f"{title}, took {result.took_s:.0f} s", SAVE_HEADINGS, save_rows(result)),
        table_of("Loading, page cache warm", LOAD_HEADINGS, load_rows(result)),
    ]


def section(run: CheckpointRun) -> str:
    """For the page; its heading is ``SECTION``."""
    machine = ", ".join(f"{key} {value}" for key, value in run.machine.items())
    versions = ", ".join(f"{key} {value}" for key, value in run.versions.items()) or "unknown"
    parts = [
        f"{SECTION}\n\n"
        "Written by `make bench-checkpoints` from "
        "[checkpoints.json](../benchmarks/results/checkpoints.json), which has every sample.\n\n"
        f"- Machine: {machine}; file system {run.file_system}.\n- Versions: {versions}.\n"
        f"- Run: {run.started}, {run.took_s / 60:.0f} minutes.\n\n",
        *(_cell(result) for result in run.cells),
    ]
    return "".join(parts)


def _cell(result: CheckpointResult) -> str:
    sizes = [own.probe.state_bytes for own in result.ways.values() if own.probe is not None]
    size = f"{sizes[0] / MEGA:,.0f} MB of state" if sizes else "no state was measured"
    return (
        f"### {result.cell.title}\n\n{result.rounds_text}; {size} on all ranks; load before "
        f"it {result.load:.1f}.\n\n"
        f"{markdown(SAVE_HEADINGS, save_rows(result))}\n\n"
        f"{markdown(LOAD_HEADINGS, load_rows(result))}\n\n"
    )
