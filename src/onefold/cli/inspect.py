"""Inspect: the command ``onefold inspect``: what a checkpoint holds, and whether it is whole."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from onefold.errors import CheckpointError
from onefold.state.files import what_is_wrong
from onefold.state.folder import latest_of
from onefold.state.index import Index, read_index

DAMAGED = 1


def run_inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, DIR/TAG, or DIR.")],
) -> None:
    """Say what a checkpoint holds, and verify every checksum; ends with 1 if it is damaged."""
    folder, index = read_or_exit(checkpoint)
    console = Console()
    console.print(_summary(index), soft_wrap=True, markup=False)
    console.print(_params(index))
    size = sum(entry.size for entry in index.files.values())
    console.print(f"whole: {len(index.files)} files, {size:,} bytes, every SHA-256 as written")
    console.print(str(folder), soft_wrap=True, markup=False)


def read_or_exit(path: Path) -> tuple[Path, Index]:
    """A verified checkpoint: ``path``, or the one that ``path/latest`` names.

    Raises:
        typer.Exit: it is damaged; every file that is has been named.
    """
    latest = latest_of(path)
    folder = path if latest is None else path / latest
    try:
        index = read_index(folder)
        wrong = [
            text
            for name, entry in sorted(index.files.items())
            if (text := what_is_wrong(folder / name, entry))
        ]
    except CheckpointError as error:
        wrong = [str(error)]
    for text in wrong:
        Console(stderr=True).print(f"damaged: {text}", soft_wrap=True, markup=False)
    if wrong:
        raise typer.Exit(DAMAGED)
    return folder, index


def _summary(index: Index) -> str:
    axes = ", ".join(f"{a} {s}" for a, s in zip(index.world.axes, index.world.sizes, strict=True))
    progress = index.progress
    lines = [
        f"written by onefold {index.onefold} on torch {index.torch}, by {index.world.size} rank(s) "
        f"({axes})",
        f"after {progress.global_steps} steps ({progress.skipped_steps} skipped) of "
        f"{index.optimizer} with {len(index.groups)} param group(s)",
        f"scheduler: {'no' if index.scheduler is None else 'yes'}; loss scale "
        f"{index.loss_scaler['scale']:g}; {len(index.buffers)} buffers; client_state keys: "
        f"{', '.join(index.client_state) or 'none'}",
    ]
    return "\n".join(lines)


def _params(index: Index) -> Table:
    table = Table("parameter", "shape", "dtype", "trained", "parts", "optimizer states")
    for name, entry in index.params.items():
        states = ", ".join([*entry.state, *entry.scalars]) or "-"
        trained = f"group {entry.group}" if entry.is_trainable else "no"
        shape = " x ".join(map(str, entry.shape)) or "one number"
        table.add_row(name, shape, entry.dtype, trained, str(len(entry.parts)), states)
    return table
