"""Page: ``docs/performance.md``, written from a run's JSON and nothing else."""

from pathlib import Path

from benchmarks.charts import MEMORY, TIME, TIMELINE
from benchmarks.results import CellResult, Run
from benchmarks.table import (
    HEADINGS,
    HOST_HEADINGS,
    TARGET_HEADINGS,
    first_line,
    host_row,
    markdown,
    rows_of,
)
from benchmarks.targets import Judged, judge

_METHOD = Path(__file__).parent / "method.md"
_INTRODUCTION = """\
# Performance

Written by `make bench` from [full.json](../benchmarks/results/full.json), which has every sample.
Absolute times are this machine's; ratios are taken within one round of one run.

"""

_CHARTS = {
    TIME: "time against the number of backwards",
    MEMORY: "memory against traffic",
    TIMELINE: "what one rank sends in one step",
}


def write(run: Run, charts: list[str]) -> str:
    """The page.

    Args:
        run: of the full form.
        charts: those that were drawn.
    """
    judged = judge(run)
    parts = [
        _INTRODUCTION,
        _setting(run),
        _targets(judged),
        "## Charts\n\n",
        *(f"![{_CHARTS[name]}](../benchmarks/results/{name})\n\n" for name in charts),
        _METHOD.read_text(encoding="utf-8"),
        "\n",
        _host(run),
        "## Every cell\n\n",
        *(_cell(cell) for cell in run.cells),
        _failures(run),
    ]
    return "".join(parts).rstrip() + "\n"


def _setting(run: Run) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in run.machine.items())
    versions = ", ".join(f"{key} {value}" for key, value in run.versions.items()) or "unknown"
    spreads = sorted(
        max(own.seconds) / min(own.seconds) - 1
        for cell in run.cells
        for own in cell.engines.values()
        if len(own.seconds) > 1
    )
    spread = f"{spreads[len(spreads) // 2]:.0%}" if spreads else "not measured"
    return (
        f"- Machine: {machine}.\n- Versions: {versions}.\n"
        f"- Run: {run.started}, {run.took_s / 60:.0f} minutes; the slowest sample of an engine in "
        f"a cell is {spread} above its fastest (median over engines and cells).\n\n"
    )


def _targets(judged: list[Judged]) -> str:
    counts = {
        kind: sum(line.verdict == kind for line in judged)
        for kind in ("reached", "missed", "not measured")
    }
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    rows = [list(line) for line in judged]
    return f"## Targets: {said}\n\n{markdown(TARGET_HEADINGS, rows)}\n\n"


def _host(run: Run) -> str:
    if not run.host:
        return ""
    text = (
        "## Host time\n\nThe same backward, in turns: by autograd into an existing `.grad`, and in "
        "an open window. Entry and exit are not counted.\n\n"
    )
    return f"{text}{markdown(HOST_HEADINGS, [host_row(one) for one in run.host])}\n\n"


def _cell(cell: CellResult) -> str:
    rounds = f"{cell.cell.rounds} rounds" if cell.cell.rounds else "untimed"
    return (
        f"### {cell.cell.title}\n\n{rounds}; load before it {cell.load:.1f}.\n\n"
        f"{markdown(HEADINGS, rows_of(cell))}\n\n"
    )


def _failures(run: Run) -> str:
    lines = [
        f"- {cell.cell.title}, {name}: {first_line(own.failure)}"
        for cell in run.cells
        for name, own in cell.engines.items()
        if own.failure is not None
    ]
    lines += [f"- left out for lack of time: {title}" for title in run.left_out]
    return "## Failed or left out\n\n" + ("\n".join(lines) or "Nothing.") + "\n"
