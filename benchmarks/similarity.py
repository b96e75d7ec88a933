"""Time and memory of a tiled contrastive loss: ``python -m benchmarks.similarity --batch 65536``.

Each line is a forward and a backward of a loss on random embeddings, tiled and with torch's full
matrix, in a fresh process each: its peak resident memory (VmHWM) less what it held with the
embeddings made. The full matrix is left out where four of them are more than half of the memory
that is available. Prints a table.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onefold.contrastive import TILE, InfoNCE, SigLIP

SIZES: Final = (2048, 8192, 16384)
"""Measured below the batch that is asked for."""
FULL_MATRICES: Final = 4
"""How many the full matrix needs at a time: logits, log-probabilities, and a gradient of each."""
MIB: Final = 1 << 20


class Kind(StrEnum):
    INFO_NCE = "infonce"
    SIGLIP = "siglip"


class Cell(NamedTuple):
    """One measurement."""

    kind: Kind
    tile: int | None  # None for the full matrix
    batch: int
    dim: int
    threads: int
    rounds: int


class Measured(NamedTuple):
    """What came of it."""

    seconds: float  # median
    peak_bytes: int  # above what was held with the embeddings made
    value: float


def full_info_nce(anchors: Tensor, positives: Tensor) -> Tensor:
    logits = 20 * (F.normalize(anchors, dim=-1) @ F.normalize(positives, dim=-1).t())
    return F.cross_entropy(logits, torch.arange(len(anchors)))


def full_siglip(anchors: Tensor, positives: Tensor) -> Tensor:
    logits = 10 * (F.normalize(anchors, dim=-1) @ F.normalize(positives, dim=-1).t()) - 10
    logits.diagonal().neg_()
    return F.softplus(logits).sum() / len(anchors)


def loss_of(cell: Cell) -> Callable[[Tensor, Tensor], Tensor]:
    if cell.tile is None:
        return full_info_nce if cell.kind is Kind.INFO_NCE else full_siglip
    if cell.kind is Kind.INFO_NCE:
        return InfoNCE(tile=cell.tile)
    return SigLIP(tile=cell.tile, learnable=False)


def status_bytes(field: str) -> int:
    """A field of this process's status, such as VmRSS, or its peak VmHWM."""
    return _kib(Path("/proc/self/status"), field)


def available_bytes() -> int:
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def _kib(path: Path, field: str) -> int:
    (line,) = [line for line in path.read_text().splitlines() if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def measure(cell: Cell) -> Measured:
    """In the process whose memory it is."""
    torch.set_num_threads(cell.threads)
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randn(cell.batch, cell.dim, generator=generator)
    positives = torch.randn(cell.batch, cell.dim, generator=generator).add_(anchors)
    inputs = anchors.requires_grad_(), positives.requires_grad_()
    loss = loss_of(cell)
    held = status_bytes("VmRSS")
    seconds = []
    value = torch.zeros(())
    for _ in range(cell.rounds):
        anchors.grad = positives.grad = None
        begin = time.perf_counter()
        value = loss(*inputs)
        value.backward()
        seconds.append(time.perf_counter() - begin)
    peak = status_bytes("VmHWM") - held
    return Measured(statistics.median(seconds), peak, value.item())


def measure_alone(cell: Cell) -> Measured | None:
    """In a fresh process; None if that was killed, as for want of memory."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        try:
            return executor.submit(measure, cell).result()
        except BrokenProcessPool:
            return None


def fits(batch: int) -> bool:
    """Whether the full matrix may be tried."""
    return 4 * FULL_MATRICES * batch**2 < available_bytes() / 2


def row_of(batch: int, tiled: Measured | None, full: Measured | None) -> list[str]:
    """As text; a dash for what was not measured, or ended early."""
    row = [f"{batch:,}", f"{4 * batch**2 / MIB:,.0f}"]
    for found in (tiled, full):
        row += ["-", "-"] if found is None else [f"{found.seconds:.2f}", _mib(found.peak_bytes)]
    if tiled is None or full is None:
        return [*row, "-", "-"]
    deviation = abs(tiled.value - full.value) / abs(full.value)
    return [*row, f"{tiled.seconds / full.seconds:.2f}", f"{deviation:.1g}"]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f}"


def main(
    *,
    batch: Annotated[int, typer.Option(min=1, help="The largest batch.")] = 65536,
    dim: Annotated[int, typer.Option(min=1, help="Width of embeddings.")] = 384,
    tile: Annotated[int, typer.Option(min=1, help="Rows and columns of a tile.")] = TILE,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median is told.")] = 3,
    kind: Annotated[Kind, typer.Option(help="The loss.")] = Kind.INFO_NCE,
) -> None:
    """Forward and backward, fp32: seconds, and MiB beside the embeddings."""
    table = Table(title=f"{kind}, D = {dim}, tile {tile}, {threads} thread(s)")
    for heading in (
        "batch",
        "matrix MiB",
        "tiled s",
        "tiled MiB",
        "full s",
        "full MiB",
        "tiled / full",
        "deviation",
    ):
        table.add_column(heading, justify="right")
    for size in [*(size for size in SIZES if size < batch), batch]:
        cell = Cell(kind, tile, size, dim, threads, rounds)
        tiled = measure_alone(cell)
        full = measure_alone(cell._replace(tile=None)) if fits(size) else None
        table.add_row(*row_of(size, tiled, full))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
