"""``python -m benchmarks.checkpoints``: saving and loading, side by side, in one run."""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from benchmarks import page
from benchmarks.checkpoints.cell import KINDS, CheckpointCell, CheckpointRun, Way
from benchmarks.checkpoints.schedule import check_space, run_cell, stages
from benchmarks.checkpoints.table import tables
from benchmarks.machine import CHECKPOINTS, PAGE, ROOT, file_system, machine, versions

INTERRUPTED: Final = 130
SCRATCH: Final = ROOT / "runs"
ROUNDS: Final = 5
MINUTES: Final = 12.0

app = typer.Typer(
    help="Checkpoints of onefold side by side with those of its peers, in one run.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console(width=None if sys.stdout.isatty() else 190)  # a log has no width of its own


@app.command()
def run_all(
    folder: Annotated[
        Path | None,
        typer.Option(help="Where checkpoints are written, and deleted again; default runs/."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each way is timed.")] = ROUNDS,
    minutes: Annotated[float, typer.Option(help="No round begins that would end later.")] = MINUTES,
    ways: Annotated[
        str,
        typer.Option(
            help="Only these, comma-separated, each with @STAGE, in one cell; writes nothing: "
            f"{', '.join(KINDS)}."
        ),
    ] = "",
    quick: Annotated[bool, typer.Option(help="A tiny state; writes nothing.")] = False,
) -> None:
    """Every way; writes results/checkpoints.json and its section of docs/performance.md."""
    workload = "tiny" if quick else "77m"
    try:
        chosen = tuple(str(Way.parse(text)) for text in ways.split(",") if ways)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    cells = stages(workload, rounds)
    if chosen:
        cells = [CheckpointCell(workload=workload, rounds=rounds, ways=chosen)]
    is_whole = not chosen and not quick
    with _scratch(folder) as scratch:
        try:
            check_space(cells, scratch)
        except OSError as error:
            raise typer.BadParameter(str(error)) from None
        try:
            run = _measure(cells, scratch, 60 * minutes, CHECKPOINTS if is_whole else None)
        except KeyboardInterrupt:
            console.print("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
    if is_whole:
        _write_page()
    if any(own.failure is not None for result in run.cells for own in result.ways.values()):
        raise typer.Exit(1)


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """A temporary folder, in ``folder`` or on the disk that the repository lies on."""
    parent = SCRATCH if folder is None else folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=parent) as scratch:
        yield Path(scratch)


def _measure(
    cells: list[CheckpointCell], scratch: Path, limit_s: float, path: Path | None
) -> CheckpointRun:
    """Run the cells, showing each as it comes; saved after every cell, so that nothing is lost.

    Each may take its part of what time is left, by its number of ways.
    """
    run = CheckpointRun(started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    run.machine, run.versions = machine(), versions()
    run.file_system = file_system(scratch)
    free = shutil.disk_usage(scratch).free
    console.print(f"File system {run.file_system}, {free / 1e9:.0f} GB free; page cache warm.")
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the ranks are ended, too
    for number, cell in enumerate(cells):
        part = len(cell.ways) / sum(len(each.ways) for each in cells[number:])
        cell_s = part * (limit_s - (time.monotonic() - begin))
        with console.status(cell.title) as status:
            result = run_cell(cell, scratch, cell_s, status.update)
        run.cells.append(result)
        run.took_s = time.monotonic() - begin
        for table in tables(result):
            console.print(table)
        for name, own in result.ways.items():
            if own.failure is not None:
                console.print(f"{name} failed: {own.failure}", markup=False)
        if path is not None:
            run.save(path)
    return run


def _write_page() -> None:
    """From the file, which has fewer digits than the run that it comes from."""
    text = PAGE.read_text(encoding="utf-8")
    text = page.with_checkpoints(text, CheckpointRun.load(CHECKPOINTS))
    PAGE.write_text(text, encoding="utf-8")
    console.print(f"Wrote what {PAGE.relative_to(ROOT)} says of checkpoints.")


if __name__ == "__main__":
    app()
