"""Rank: what one process of a cell does on command. It imports torch, so only ranks import it."""

import functools
import gc
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks import engines
from benchmarks.cell import Cell, EngineName, HostCell
from benchmarks.checkpoints.cell import Visit
from benchmarks.comm_log import CommLog
from benchmarks.engines import Engine, Setting
from benchmarks.own import Onefold
from benchmarks.probes import PeakMemory, loopback_bytes, settled_bytes
from benchmarks.results import HostResult, Probe, Timing
from benchmarks.workloads import WORKLOADS
from onefold.cli.record import Recorder

NOT_DATA = ("barrier", "wait_tensor")
WARM_UP_BACKWARDS = 2
TIMEOUT = timedelta(minutes=6)  # a rank whose peer is gone, and the command too, ends by itself


def main(pipe: Connection, rank: int, world_size: int, store: str, log: str) -> None:
    """Serve jobs until the pipe closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peers, about peers
    file_store = FileStore(store, world_size)
    dist.init_process_group(
        "gloo", store=file_store, rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", JOBS[function](*arguments)))
        except BaseException as error:
            traceback.print_exc()
            pipe.send(("failed", f"rank {rank}: {type(error).__name__}: {error}"[:600]))


def setting_of(cell: Cell, name: EngineName) -> Setting:
    """On this rank."""
    return Setting(
        workload=WORKLOADS[cell.workload],
        rank=dist.get_rank(),
        world_size=cell.world_size,
        stage=name.stage,
        num_backwards=cell.num_backwards,
        dtype=getattr(torch, cell.dtype),
        transport=cell.transport,
    )


def _prepare(cell: Cell) -> int:
    """Load the data of all steps; the number of backwards of the warm-up."""
    warm_up = min(WARM_UP_BACKWARDS, cell.num_backwards)
    for num_backwards in (warm_up, cell.num_backwards):
        WORKLOADS[cell.workload].prepare(dist.get_rank(), num_backwards)
    return warm_up


class Alive:
    """An engine for the length of a with-block."""

    def __init__(self, cell: Cell, name: EngineName) -> None:
        self._cell, self._name = cell, name

    def __enter__(self) -> Engine:
        self._engine: Engine | None = engines.build(self._name, setting_of(self._cell, self._name))
        return self._engine

    def __exit__(self, kind: object, *_: object) -> None:
        if self._engine is not None and kind is None:
            dist.barrier()  # nobody takes its groups away while another still sends
            self._engine.destroy()
        self._engine = None
        settled_bytes()


def time_steps(cell: Cell, text: str) -> Timing:
    """Build, warm up, time; ranks start each step together."""
    seconds: list[float] = []
    exposed: list[float] = []
    warm_up = _prepare(cell)
    with Alive(cell, EngineName.parse(text)) as engine:
        engine.step(warm_up)
        for _ in range(cell.steps):
            mark = engine.ledger.mark() if engine.ledger is not None else {}
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            engine.step(cell.num_backwards)
            seconds.append(time.perf_counter() - begin)
            if engine.ledger is not None:
                changes = engine.ledger.since(mark).values()
                exposed.append(sum(total.waited_s for total in changes))
        del engine
    return Timing(
        seconds=seconds if len(seconds) == 1 else [statistics.median(seconds)],
        exposed_s=[statistics.median(exposed)] if exposed else None,
    )


def probe(cell: Cell, text: str) -> Probe:
    """Two untimed steps on the same data; the second one under every instrument."""
    name = EngineName.parse(text)
    _prepare(cell)
    _load_modules(cell, name)
    before = settled_bytes()
    with Alive(cell, name) as engine:
        first = engine.step(cell.num_backwards)
        held = settled_bytes() - before
        mark = engine.ledger.mark() if engine.ledger is not None else {}
        dist.barrier()
        sent, calls, memory = loopback_bytes(), CommLog(), PeakMemory()
        dist.barrier()
        recorder = _Recorded(engine, cell.num_backwards)
        with recorder, calls, memory:
            second = engine.step(cell.num_backwards)
        dist.barrier()
        received = loopback_bytes()
        counted = engine.ledger.since(mark) if engine.ledger is not None else None
        result = Probe(
            losses=[first, second],
            sent_bytes=(
                None if counted is None else sum(total.bytes_out for total in counted.values())
            ),
            expected_bytes=engine.expected_bytes(cell.num_backwards),
            loopback_bytes=(
                None if sent is None or received is None else (received - sent) // cell.world_size
            ),
            collectives=(
                {op: count for op, count in calls.counts.items() if op not in NOT_DATA}
                if counted is None
                else {kind: total.count for kind, total in counted.items()}
            ),
            held_bytes=held,
            peak_bytes=memory.peak_bytes - before,
            table_bytes=engine.table_bytes(),
            record=recorder.record if cell.keeps_timeline else None,
        )
        del engine, recorder
    return result


def _load_modules(cell: Cell, name: EngineName) -> None:
    """Run the engine on a small model, so that modules it loads late are not taken for its own."""
    tiny = cell.model_copy(update={"workload": "tiny", "num_backwards": 1})
    with Alive(tiny, name) as engine:
        engine.step(1)
        del engine


class _Recorded:
    """The demo's record of a step, of onefold's engines."""

    def __init__(self, engine: Engine, num_backwards: int) -> None:
        self.record: dict[str, Any] | None = None
        self._step: Any = None
        if isinstance(engine, Onefold):
            counts = iter((0, num_backwards))
            recorder = Recorder(engine.engine, lambda: next(counts))
            self._step = recorder.step(is_bare=engine.is_bare)

    def __enter__(self) -> None:
        self._entered = None if self._step is None else self._step.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._step is not None:
            self._step.__exit__(*error)
            self.record = None if self._entered is None else self._entered.to_json()


@functools.lru_cache(maxsize=1)
def reference(workload: str, world_size: int, num_backwards: int) -> list[float]:
    """This rank's losses of two steps of the same training in one process, in fp32."""
    cell = Cell(workload=workload, world_size=world_size, num_backwards=num_backwards, engines=())
    setting = setting_of(cell, EngineName("floor", None))
    found = engines.reference(setting, num_backwards)
    settled_bytes()
    return found


def time_host(cell: HostCell) -> HostResult:
    """Backwards into existing ``.grad``, and the same ones in an open window, in turns."""
    workload, dtype = WORKLOADS[cell.workload], getattr(torch, cell.dtype)
    setting = Setting(workload, dist.get_rank(), cell.world_size, cell.stage, 1, dtype, "auto")
    plain = workload.model().to(dtype)
    own = Onefold(setting, "window")
    result = HostResult(cell=cell)
    sides: list[tuple[nn.Module, Callable[[Tensor], object], list[float], list[float]]] = [
        (plain, Tensor.backward, result.plain_ms, result.plain_forward_ms),
        (own.engine.module, own.engine.backward, result.window_ms, result.window_forward_ms),
    ]
    with own.engine.coalesce_grad_reduction():
        for pair in range(-2, cell.pairs):  # the first two bind gradients and warm up
            dist.barrier()
            for model, backward, backward_ms, forward_ms in sides[:: 1 if pair % 2 else -1]:
                (loss_of,) = engines.losses(setting, model, 1)
                begin = time.perf_counter()
                loss = loss_of()
                between = time.perf_counter()
                backward(loss)
                end = time.perf_counter()
                if pair >= 0:
                    forward_ms.append(1e3 * (between - begin))
                    backward_ms.append(1e3 * (end - between))
    own.engine.step()
    dist.barrier()
    own.destroy()
    return result


def visit_checkpoint(*arguments: Any) -> Visit:
    """Save and load one way's checkpoint once."""
    from benchmarks.checkpoints.visit import visit  # which needs this module

    return visit(*arguments)


JOBS: dict[str, Callable[..., Any]] = {
    "time_steps": time_steps,
    "probe": probe,
    "reference": reference,
    "time_host": time_host,
    "visit_checkpoint": visit_checkpoint,
}
