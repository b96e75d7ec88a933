"""Table: one cell's numbers, as rows of text that the terminal and the page share."""

import statistics

from rich.table import Table

from benchmarks.cell import EngineName
from benchmarks.results import CellResult, EngineResult, HostResult
from benchmarks.stats import median_of, paired
from benchmarks.targets import Judged

MEGA = 1_000_000
HEADINGS = (
    "engine",
    "ms [interval]",
    "spread",
    "/ floor",
    "exposed ms",
    "MB sent",
    "collectives",
    "MB held",
    "MB peak",
    "deviation",
)


def rows_of(cell: CellResult) -> list[list[str]]:
    """One row per engine."""
    floor = cell.engines.get("floor", EngineResult()).seconds
    return [_row(EngineName.parse(name), own, floor) for name, own in cell.engines.items()]


def _row(name: EngineName, own: EngineResult, floor: list[float]) -> list[str]:
    milliseconds, spread, ratio = "-", "-", "-"
    if own.seconds:
        time = median_of([1e3 * value for value in own.seconds])
        milliseconds = f"{time.median:,.0f} [{time.low:,.0f}, {time.high:,.0f}]"
        spread = f"{max(own.seconds) / min(own.seconds) - 1:.0%}"
        over = paired(own.seconds, floor)
        ratio = "-" if over is None or name.name == "floor" else str(over)
    exposed = "-" if not own.exposed_s else f"{1e3 * statistics.median(own.exposed_s):,.0f}"
    row = [name.label, milliseconds, spread, ratio, exposed, *_probed(own)]
    if own.failure is not None:
        row[0] += f" FAILED: {first_line(own.failure)}"
    return row


def _probed(own: EngineResult) -> list[str]:
    probe = own.probe
    if probe is None:
        return ["-"] * 5
    sent = probe.told_bytes
    return [
        "-" if sent is None else f"{sent / MEGA:,.1f}",
        str(sum(probe.collectives.values())),
        f"{probe.held_bytes / MEGA:,.0f}",
        f"{probe.peak_bytes / MEGA:,.0f}",
        "-" if own.deviation is None else f"{own.deviation:.1g}",
    ]


def first_line(text: str) -> str:
    """What a failure says first, kept short."""
    return text.splitlines()[0][:160] if text else ""


def cell_table(cell: CellResult) -> Table:
    """For the terminal."""
    title = f"{cell.cell.title}; {cell.cell.rounds} rounds, load {cell.load:.1f}"
    return table_of(f"{title}, took {cell.took_s:.0f} s", HEADINGS, rows_of(cell))


HOST_HEADINGS = ("workload", "backward ms, plain", "in a window", "ratio", "ratio of forwards")


def host_row(result: HostResult) -> list[str]:
    """One row."""
    if result.failure is not None or not result.plain_ms:
        failure = f"FAILED: {first_line(result.failure or 'no pairs')}"
        return [f"{result.cell.title} {failure}", "-", "-", "-", "-"]
    return [
        result.cell.title,
        f"{statistics.median(result.plain_ms):.2f}",
        f"{statistics.median(result.window_ms):.2f}",
        str(paired(result.window_ms, result.plain_ms)),
        str(paired(result.window_forward_ms, result.plain_forward_ms)),
    ]


def host_table(results: list[HostResult]) -> Table:
    """For the terminal."""
    return table_of("Host time, paired", HOST_HEADINGS, [host_row(result) for result in results])


TARGET_HEADINGS = ("target", "bound", "found", "verdict", "note")


def target_table(judged: list[Judged]) -> Table:
    """For the terminal."""
    return table_of("Targets", TARGET_HEADINGS, [list(line) for line in judged])


def table_of(title: str, headings: tuple[str, ...], rows: list[list[str]]) -> Table:
    """For the terminal."""
    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(headings: tuple[str, ...], rows: list[list[str]]) -> str:
    """The same for a page."""
    lines = [headings, ("---", *("---:" for _ in headings[1:])), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines
    )
