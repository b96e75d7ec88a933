"""``python -m benchmarks``: everything, the quick form, one cell, or the page once more."""

import signal
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.status import Status

from benchmarks import charts, page, suite
from benchmarks.cell import STAGES_OF, Cell, EngineName, HostCell
from benchmarks.checkpoints.cell import CheckpointRun
from benchmarks.machine import CHECKPOINTS, PAGE, RESULTS, ROOT, machine, versions
from benchmarks.results import Run
from benchmarks.schedule import run_cell, run_host
from benchmarks.table import cell_table, host_table, target_table
from benchmarks.targets import judge

INTERRUPTED: Final = 130

app = typer.Typer(
    help="onefold side by side with its peers, in one run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console(width=None if sys.stdout.isatty() else 150)  # a log has no width of its own


@app.command("full")
def run_full(
    minutes: Annotated[float, typer.Option(help="No cell begins that would end later.")] = (
        suite.FULL_S / 60
    ),
) -> None:
    """Every cell; writes results/full.json, the charts and docs/performance.md."""
    _measure("full", suite.full(), 60 * minutes, RESULTS / "full.json")
    _write_page()


@app.command("quick")
def run_quick() -> None:
    """8 backwards, stages 2 and 3, 2 ranks; writes results/quick.json."""
    _measure("quick", suite.quick(), suite.QUICK_S, RESULTS / "quick.json")


@app.command("page")
def write_page() -> None:
    """Draw the charts and write docs/performance.md from results/full.json."""
    _write_page()


@app.command("run")
def run_one(  # noqa: PLR0913, PLR0917
    workload: Annotated[str, typer.Option(help="25m, 77m, minilm, 800 or tiny.")] = "25m",
    world: Annotated[int, typer.Option(help="Ranks.")] = 2,
    backwards: Annotated[int, typer.Option(help="Per step.")] = 8,
    engines: Annotated[
        str, typer.Option(help=f"Comma-separated, each with @STAGE or not: {', '.join(STAGES_OF)}.")
    ] = "floor,window",
    stage: Annotated[int, typer.Option(help="Of engines without @STAGE.")] = 3,
    rounds: Annotated[int, typer.Option(help="0: the untimed step only.")] = 5,
    steps: Annotated[int, typer.Option(help="Timed per engine and round.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    transport: Annotated[str, typer.Option(help="onefold's.")] = "auto",
) -> None:
    """One cell, to look into; writes nothing."""
    try:
        names = tuple(str(EngineName.parse(text, stage)) for text in engines.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    cell = Cell(
        workload=workload,
        world_size=world,
        num_backwards=backwards,
        engines=names,
        rounds=rounds,
        steps=steps,
        dtype=dtype,
        transport=transport,
    )
    _measure("cell", [cell], float("inf"), None)


@app.command("host")
def run_host_time(
    workload: Annotated[str, typer.Option(help="25m, 77m, 800 or tiny.")] = "800",
    world: Annotated[int, typer.Option(help="Ranks.")] = 2,
    stage: Annotated[int, typer.Option(help="0 to 3.")] = 3,
    pairs: Annotated[int, typer.Option(help="Of backwards.")] = 100,
) -> None:
    """Backwards in a window against plain ones; writes nothing."""
    cell = HostCell(workload=workload, world_size=world, stage=stage, pairs=pairs)
    _measure("cell", [cell], float("inf"), None)


def _measure(kind: str, cells: Iterable[Cell | HostCell], limit_s: float, path: Path | None) -> Run:
    """Run the cells, showing each as it comes; saved after every cell, so that nothing is lost."""
    run = Run(kind=kind, started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    run.machine, run.versions = machine(), versions()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the ranks are ended, too
    try:
        for cell in cells:
            if time.monotonic() - begin + suite.estimate_s(cell) > limit_s:
                run.left_out.append(cell.title)
                continue
            with console.status(cell.title) as status:
                _run_one(run, cell, status)
            run.took_s = time.monotonic() - begin
            if path is not None:
                run.save(path)
    except KeyboardInterrupt:
        console.print("Interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    if kind != "cell":
        measured = [line for line in judge(run) if line.verdict != "not measured"]
        console.print(target_table(measured))
    for title in run.left_out:
        console.print(f"Left out for lack of time: {title}")
    return run


def _run_one(run: Run, cell: Cell | HostCell, status: Status) -> None:
    if isinstance(cell, HostCell):
        host = run_host(cell)
        run.host.append(host)
        console.print(host_table([host]))
        return
    result = run_cell(cell, status.update)
    run.cells.append(result)
    console.print(cell_table(result))
    for name, own in result.engines.items():
        if own.failure is not None:
            console.print(f"{name} failed: {own.failure}", markup=False)


def _write_page() -> None:
    """From the files, which have fewer digits than the runs that they come from."""
    run = Run.load(RESULTS / "full.json")
    checkpoints = CheckpointRun.load(CHECKPOINTS) if CHECKPOINTS.exists() else None
    text = page.write(run, charts.draw(run, RESULTS), checkpoints)
    PAGE.write_text(text, encoding="utf-8")
    console.print(f"Wrote {PAGE.relative_to(ROOT)} and what it shows.")


if __name__ == "__main__":
    app()
