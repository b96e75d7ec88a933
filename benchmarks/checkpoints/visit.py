"""Visit: what one rank does to measure one way once. It imports torch, so only ranks import it."""

import gc
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.checkpoints.cell import CheckpointCell, Visit, Way
from benchmarks.checkpoints.savers import Saver, flush, own_files, saver_of
from benchmarks.engines import Engine
from benchmarks.probes import PeakMemory, settled_bytes
from benchmarks.rank import Alive

_POLL_S: Final = 0.002
_LONGEST_FLIGHT_S: Final = 120.0
_CHUNK_BYTES: Final = 4 << 20


def visit(cell: CheckpointCell, text: str, folder: str, is_probe: bool) -> Visit:
    """Build, step, save, step, load, compare, destroy.

    Args:
        cell: has the model.
        text: the way.
        folder: empty, on a file system that all ranks share.
        is_probe: measures memory as well, so that the times are worth nothing.

    Raises:
        RuntimeError: what was loaded is not what was saved.
    """
    way = Way.parse(text)
    if is_probe:  # on a small model first, so that modules it loads late are not taken for its own
        tiny = cell.model_copy(update={"workload": "tiny"})
        _visit_one(tiny, way, Path(folder) / "tiny", is_probe=False)
    return _visit_one(cell, way, Path(folder) / "measured", is_probe=is_probe)


def _visit_one(cell: CheckpointCell, way: Way, folder: Path, *, is_probe: bool) -> Visit:
    with Alive(cell.engines, way.engine) as engine:
        found = _Visitor(engine, way, folder, is_probe=is_probe).run(cell.steps)
        del engine
    return found


class _Visitor:
    def __init__(self, engine: Engine, way: Way, folder: Path, *, is_probe: bool) -> None:
        self._engine = engine
        self._saver = saver_of(engine, way)
        self._is_async = way.kind.is_async
        self._folder = folder
        self._is_probe = is_probe

    def run(self, steps: int) -> Visit:
        self._engine.step(1)  # now the optimizer has its states
        found: dict[str, Any] = {}
        held = self._settle()
        step_peak = held
        if self._is_async:
            before, step_peak = self._watched(lambda: [self._step_s() for _ in range(steps)])
            found["steps_before_s"] = before
            held = self._settle()
        wanted = digest(self._saver)
        found |= self._save(held, step_peak)
        if not found.get("steps_meanwhile_s"):
            self._engine.step(1)  # so that there is something to load
        dist.barrier()
        own = own_files(self._folder)
        found["file_bytes"] = _sum_over_ranks(sum(path.stat().st_size for path in own))
        found |= self._load(own)
        if digest(self._saver) != wanted:
            raise RuntimeError("what was loaded is not what was saved")
        dist.barrier()
        self._saver.close()
        state_bytes = sum(tensor.nbytes for tensor in self._saver.state())
        return Visit(**found, state_bytes=state_bytes)

    def _settle(self) -> int:
        """Bytes held now, where memory is measured."""
        if self._is_probe:
            return settled_bytes()
        gc.collect()
        return 0

    def _watched(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """What ``work`` returns, and the peak meanwhile, where memory is measured."""
        if not self._is_probe:
            return work(), 0
        with PeakMemory() as memory:
            value = work()
        return value, memory.peak_bytes

    def _step_s(self) -> float:
        dist.barrier()
        begin = time.perf_counter()
        self._engine.step(1)
        return time.perf_counter() - begin

    def _save(self, held: int, step_peak: int) -> dict[str, Any]:
        """Save, stepping until an asynchronous save has ended.

        Args:
            held: bytes before.
            step_peak: the most that a step needs without a save.
        """
        dist.barrier()
        begin = time.perf_counter()

        def call() -> float:
            self._saver.save(self._folder)
            return time.perf_counter() - begin

        pause_s, peak = self._watched(call)
        found = {"pause_s": pause_s, "on_disk_s": pause_s}
        excess = peak - held
        if self._is_async:
            watch = _Watch(self._saver, self._folder)
            meanwhile, peak = self._watched(lambda: self._step_until(watch))
            self._saver.finish()
            found |= {"on_disk_s": watch.ended_at - begin, "steps_meanwhile_s": meanwhile}
            excess = max(excess, peak - max(held, step_peak))
        if self._is_probe:
            found["save_peak_bytes"] = max(0, excess)
        return found

    def _step_until(self, watch: "_Watch") -> list[float]:
        """Step on all ranks until the save has ended on all; seconds of each step."""
        seconds: list[float] = []
        limit = time.perf_counter() + _LONGEST_FLIGHT_S
        while not _on_all_ranks(watch.has_ended):
            if time.perf_counter() > limit:
                raise RuntimeError(f"not on disk after {len(seconds)} steps")
            seconds.append(self._step_s())
        return seconds

    def _load(self, own: list[Path]) -> dict[str, Any]:
        """Load, when the disk is at rest and the page cache has all files."""
        flush(own)
        for path in own:
            with path.open("rb") as file:
                while file.read(_CHUNK_BYTES):
                    pass
        held = self._settle()
        dist.barrier()
        begin = time.perf_counter()

        def call() -> float:
            self._saver.load(self._folder)
            return time.perf_counter() - begin

        load_s, peak = self._watched(call)
        found = {"load_s": load_s}
        return found | {"load_peak_bytes": max(0, peak - held)} if self._is_probe else found


class _Watch:
    """Looks on another thread for the end of a save."""

    def __init__(self, saver: Saver, folder: Path) -> None:
        self._saver = saver
        self._folder = folder
        self.ended_at = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def _run(self) -> None:
        while not self._saver.is_on_disk(self._folder):
            time.sleep(_POLL_S)
        self.ended_at = time.perf_counter()
        self._ended.set()


def _on_all_ranks(value: bool) -> bool:
    told = torch.tensor([value], dtype=torch.int32)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())


def _sum_over_ranks(value: int) -> int:
    told = torch.tensor([value])
    dist.all_reduce(told)
    return int(told.item())


def digest(saver: Saver) -> str:
    """Of this rank's masters, optimizer states and parameters."""
    found = hashlib.sha256()
    for tensors in (saver.state(), saver.parameters()):
        for tensor in tensors:
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
