"""Page: ``docs/performance.md``, written from the JSON of runs and nothing else."""

from pathlib import Path

from benchmarks.charts import MEMORY, TIME, TIMELINE
from benchmarks.checkpoints.cell import CheckpointRun
from benchmarks.checkpoints.table import SECTION, section
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
_CELLS = "## Every cell"
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


def write(run: Run, charts: list[str], checkpoints: CheckpointRun | None = None) -> str:
    """The page.

    Args:
        run: of the full form.
        charts: those that were drawn.
        checkpoints: the run for their section; None leaves it out.
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
        "" if checkpoints is None else section(checkpoints),
        f"{_CELLS}\n\n",
        *(_cell(cell) for cell in run.cells),
        _failures(run),
    ]
    return "".join(parts).rstrip() + "\n"


def with_checkpoints(text: str, checkpoints: CheckpointRun) -> str:
    """The page with the method and the section of checkpoints as they are now, all else as it is.

    Raises:
        ValueError: the text is not that of the page.
    """
    method = _METHOD.read_text(encoding="utf-8") + "\n"
    text = _replaced(text, method.splitlines()[0], method)
    if f"\n{SECTION}\n" not in text:
        text = text.replace(f"\n{_CELLS}\n", f"\n{SECTION}\n\n{_CELLS}\n", 1)
    return _replaced(text, SECTION, section(checkpoints))


def _before(text: str, heading: str) -> str:
    """What the page has above a heading."""
    above, found, _ = text.partition(f"\n{heading}\n")
    if not found:
        raise ValueError(f"the page has no {heading!r}; write all of it: python -m benchmarks page")
    return above + "\n"


def _replaced(text: str, heading: str, new: str) -> str:
    """The page with ``new`` in place of a heading and what is below it."""
    above = _before(text, heading)
    below = text[len(above) :].partition("\n## ")
    return above + new + below[1].removeprefix("\n") + below[2]


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
