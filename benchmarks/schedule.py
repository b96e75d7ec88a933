"""Schedule: runs cells. A round is every engine once, built, warmed up, timed and destroyed.

[Note: interleaving] Rounds go A B C A B C ..., one engine alive at a time, so that engines of one
round meet the same machine and ratios are taken within a round. Engines share their processes,
except DeepSpeed, which replaces functions of torch and so has processes of its own; these idle,
blocked in a read, while the others run.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.cell import Cell, EngineName, HostCell
from benchmarks.pool import JobFailed, Pool
from benchmarks.results import CellResult, EngineResult, HostResult, Probe, Timing

JOB_TIMEOUT_S = 300.0  # DeepSpeed's first start compiles an extension
Tell = Callable[[str], None]


def run_cell(
    cell: Cell, tell: Tell = lambda _: None, timeout_s: float = JOB_TIMEOUT_S
) -> CellResult:
    """Probe every engine once, then time them in rounds. An engine that fails is left out then."""
    begin = time.monotonic()
    result = CellResult(cell=cell, load=os.getloadavg()[0])
    with ExitStack() as stack:
        pools = {
            family: stack.enter_context(Pool(cell.world_size))
            for family in dict.fromkeys(name.family for name in cell.names)
        }
        one = _OneCell(cell, pools, result, timeout_s)
        for name in cell.names:
            tell(f"{cell.title}: untimed step of {name.label}")
            one.probe(name)
        for round_ in range(cell.rounds):
            for name in cell.names:
                tell(f"{cell.title}: round {round_ + 1} of {cell.rounds}, {name.label}")
                one.time(name)
    result.took_s = time.monotonic() - begin
    return result


class _OneCell:
    def __init__(
        self, cell: Cell, pools: dict[str, Pool], result: CellResult, timeout_s: float
    ) -> None:
        self._cell = cell
        self._pools = pools
        self._result = result
        self._timeout_s = timeout_s
        self._reference: list[list[float]] | None = None

    def probe(self, name: EngineName) -> None:
        """The untimed step; checks that the engine trains as the reference does."""
        own = self._result.engines[str(name)] = EngineResult()
        try:
            ranks: list[Probe] = self._pools[name.family].run(
                "probe", self._cell, str(name), timeout_s=self._timeout_s
            )
            if name.name not in ("floor", "wire_floor"):
                own.deviation = self._deviation(ranks)
        except JobFailed as error:
            own.failure = str(error)
            return
        own.probe = ranks[0].model_copy(
            update={
                "held_bytes": max(rank.held_bytes for rank in ranks),
                "peak_bytes": max(rank.peak_bytes for rank in ranks),
            }
        )

    def _deviation(self, ranks: list[Probe]) -> float:
        if self._reference is None:
            pool = next(iter(self._pools.values()))
            cell = self._cell
            arguments = (cell.workload, cell.world_size, cell.num_backwards)
            self._reference = pool.run("reference", *arguments, timeout_s=self._timeout_s)
        return max(
            deviation(rank.losses, wanted)
            for rank, wanted in zip(ranks, self._reference, strict=True)
        )

    def time(self, name: EngineName) -> None:
        """One visit."""
        own = self._result.engines[str(name)]
        if own.failure is not None:
            return
        try:
            ranks: list[Timing] = self._pools[name.family].run(
                "time_steps", self._cell, str(name), timeout_s=self._timeout_s
            )
        except JobFailed as error:
            own.failure = str(error)
            return
        own.seconds.append(max(rank.seconds[0] for rank in ranks))
        waited = [rank.exposed_s[0] for rank in ranks if rank.exposed_s is not None]
        if waited:
            own.exposed_s = [*(own.exposed_s or []), max(waited)]


def deviation(found: list[float], wanted: list[float]) -> float:
    """How far the second loss is from the wanted one, as a part of the wanted progress."""
    progress = abs(wanted[1] - wanted[0])
    return abs(found[1] - wanted[1]) / progress if progress else float("inf")


def run_host(cell: HostCell, timeout_s: float = JOB_TIMEOUT_S) -> HostResult:
    """Time paired backwards; of every pair the slowest rank counts."""
    try:
        with Pool(cell.world_size) as pool:
            ranks: list[HostResult] = pool.run("time_host", cell, timeout_s=timeout_s)
    except JobFailed as error:
        return HostResult(cell=cell, failure=str(error))

    def slowest(field: str) -> list[float]:
        return [max(pair) for pair in zip(*(getattr(rank, field) for rank in ranks), strict=True)]

    fields = ("plain_ms", "window_ms", "plain_forward_ms", "window_forward_ms")
    return HostResult(cell=cell, **{field: slowest(field) for field in fields})
