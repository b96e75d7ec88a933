"""Schedule: runs cells. A round is every way once; each round begins with another way.

Ways meet the same machine within a round, so ratios are taken there. A checkpoint is deleted, and
the disk has come to rest, before the next one is written.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.checkpoints.cell import (
    CheckpointCell,
    CheckpointResult,
    Visit,
    Way,
    WayResult,
    merged,
)
from benchmarks.pool import JobFailed, Pool

JOB_TIMEOUT_S: Final = 300.0
STATE_BYTES: Final = {"77m": 907_000_000, "tiny": 1_600_000}
"""Masters and Adam's two moments, by workload."""
TIMES_STATE: Final = 3
"""Free space that is asked for: the largest checkpoint, and the file system's own needs."""
Tell = Callable[[str], None]


def stages(workload: str, rounds: int) -> list[CheckpointCell]:
    """Everything: sharded parameters, and parameters that every rank has."""
    sharded = ("onefold", "onefold_async", "dcp", "dcp_async", "dcp_unflushed")
    zero = ("deepspeed_flushed", "deepspeed")
    return [
        CheckpointCell(
            workload=workload, rounds=rounds, ways=tuple(f"{name}@3" for name in sharded + zero)
        ),
        CheckpointCell(
            workload=workload,
            rounds=rounds,
            ways=tuple(f"{name}@1" for name in (*sharded[:2], *zero)),
        ),
    ]


def check_space(cells: list[CheckpointCell], folder: Path) -> None:
    """Refuse to begin what would fill the disk.

    Raises:
        OSError: says how much is free and how much is needed.
    """
    needed = TIMES_STATE * max(STATE_BYTES[cell.workload] for cell in cells)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder}: {free / 1e9:.1f} GB are free, and {needed / 1e9:.1f} GB are needed. "
            "Name another folder with --folder."
        )


def run_cell(
    cell: CheckpointCell,
    folder: Path,
    limit_s: float = float("inf"),
    tell: Tell = lambda _: None,
    timeout_s: float = JOB_TIMEOUT_S,
) -> CheckpointResult:
    """Probe every way once, then time them in rounds. A way that fails is left out then.

    Args:
        cell: what to run.
        folder: an empty one for the checkpoints.
        limit_s: no round begins that would end later, if it took as long as the slowest so far.
        tell: is told what is going on.
        timeout_s: of one visit.
    """
    begin = time.monotonic()
    result = CheckpointResult(cell=cell, load=os.getloadavg()[0])
    ways = cell.parsed
    slowest_s = 0.0
    with ExitStack() as stack:
        pools = {
            family: stack.enter_context(Pool(cell.world_size))
            for family in dict.fromkeys(way.engine.family for way in ways)
        }
        one = _OneCell(cell, pools, result, folder / "checkpoint", timeout_s)
        for way in ways:
            tell(f"{cell.title}: untimed, {way.label}")
            result.ways[str(way)] = WayResult()
            result.ways[str(way)].probe = one.visit(way, is_probe=True)
        for number in range(cell.rounds):
            round_begin = time.monotonic()
            if round_begin - begin + slowest_s > limit_s:
                break
            first = number % len(ways)
            for way in (*ways[first:], *ways[:first]):
                tell(f"{cell.title}: round {number + 1} of {cell.rounds}, {way.label}")
                if (found := one.visit(way, is_probe=False)) is not None:
                    result.ways[str(way)].visits.append(found)
            result.rounds += 1
            slowest_s = max(slowest_s, time.monotonic() - round_begin)
    result.took_s = time.monotonic() - begin
    return result


class _OneCell:
    def __init__(
        self,
        cell: CheckpointCell,
        pools: dict[str, Pool],
        result: CheckpointResult,
        place: Path,
        timeout_s: float,
    ) -> None:
        self._cell = cell
        self._pools = pools
        self._result = result
        self._place = place
        self._timeout_s = timeout_s

    def visit(self, way: Way, *, is_probe: bool) -> Visit | None:
        """One visit on all ranks; None where the way has failed, now or before."""
        own = self._result.ways[str(way)]
        if own.failure is not None:
            return None
        self._place.mkdir()
        pool = self._pools[way.engine.family]
        arguments = (self._cell, str(way), str(self._place), is_probe)
        try:
            return merged(pool.run("visit_checkpoint", *arguments, timeout_s=self._timeout_s))
        except JobFailed as error:
            own.failure = str(error)
            return None
        finally:
            shutil.rmtree(self._place)
            os.sync()
