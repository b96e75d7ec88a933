"""Pools of worker processes: the parent's side.

A pool of idle workers costs next to no CPU and 12 MB of memory a rank (they share torch with the
server they are forked from), so the pool of every world size stays up until the session ends. Any
failure ends the pool it happened in, and the next call starts a new one in a tenth of a second.
"""

import atexit
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest

from tests.harness import worker
from tests.harness.worker import START_TIMEOUT_S, Job, Outcome, Reply

WORLD_SIZES = (1, 2, 3, 4)
_GRACE_S = 0.1  # between the first failure and the end of its peers, which may fail alike


class WorkerError(RuntimeError):
    """A call failed on at least one rank.

    Attributes:
        texts: what each failed rank said (mostly its traceback), by rank.
    """

    def __init__(self, call: str, texts: dict[int, str], world_size: int) -> None:
        self.texts = texts
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in sorted(texts.items()):
            ranks_by_text.setdefault(text, []).append(rank)
        parts = [
            f"--- {_name_ranks(ranks)} of {world_size}\n{text}"
            for text, ranks in sorted(ranks_by_text.items(), key=lambda item: len(item[0]))
        ]
        super().__init__("\n".join([f"{call} failed on {_name_ranks(sorted(texts))}", *parts]))


class _Member(NamedTuple):
    process: ForkServerProcess
    pipe: connection.Connection


class WorkerPool:
    """``world_size`` processes in one gloo group, started by the first call and after a failure.

    Attributes:
        world_size: number of ranks.
        timeout_s: how long a call may take by default.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._members: list[_Member] = []
        self._folder = ""

    def run(self, fn: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        """Call ``fn(ctx, **kwargs)`` on every rank; the return values in rank order.

        Args:
            fn: a function at the top level of its module, decorated or not.
            kwargs: must pickle, as must the return values.
        Raises:
            WorkerError: a rank raised, died, leaked or gave no answer in time.
            TypeError: ``fn`` cannot be found by name, or ``kwargs`` do not pickle.
        """
        return self.run_within(self.timeout_s, fn, **kwargs)

    def run_within(self, timeout_s: float, fn: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        """Like ``run`` with a deadline of its own."""
        job = _make_job(fn, kwargs, timeout_s)
        if not self._is_alive():
            self.kill()
            self._start()
        for member in self._members:
            member.pipe.send(job)
        replies = self._collect(job.qualname, timeout_s)
        if len({reply.num_collectives for reply in replies}) > 1:
            # Ranks used the default group differently, so its next collective might not match.
            self.kill()
        if any(reply.outcome is Outcome.SKIPPED for reply in replies):
            return self._skip(job.qualname, replies)
        return [pickle.loads(reply.value) for reply in replies]

    def kill(self) -> None:
        """End this pool's processes, if any; the next call starts new ones."""
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.process.close()
            member.pipe.close()
        self._members = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_alive(self) -> bool:
        return bool(self._members) and all(member.process.is_alive() for member in self._members)

    def _start(self) -> None:
        context = _start_server()
        self._folder = tempfile.mkdtemp(prefix="onefold-tests-")
        for rank in range(self.world_size):
            here, there = context.Pipe()
            args = (rank, self.world_size, self._folder, there)
            # Not daemonic, since daemonic processes may have no children (data loaders).
            process = context.Process(target=worker.main, args=args, name=f"rank-{rank}")
            process.start()
            there.close()  # so that the end of the process ends the pipe
            self._members.append(_Member(process, here))
        self._collect("start of the pool", START_TIMEOUT_S)

    def _collect(self, call: str, timeout_s: float) -> list[Reply]:
        """One reply per rank; on any failure end the pool and raise with all texts that arrived."""
        replies: dict[int, Reply] = {}
        texts: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(replies) < self.world_size:
                arrived = self._receive(replies.keys(), deadline)
                replies |= arrived
                failed = {r: a.text for r, a in arrived.items() if a.outcome is Outcome.FAILED}
                if failed and not texts:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                texts |= failed
                if not arrived:
                    break
            if len(replies) < self.world_size and not texts:
                texts = self._ask_where(replies.keys(), timeout_s)
        except BaseException:  # Ctrl-C above all
            self.kill()
            raise
        if texts:
            self._end_after_failure(texts.keys())
            raise WorkerError(call, texts, self.world_size)
        return [replies[rank] for rank in range(self.world_size)]

    def _receive(self, done: Collection[int], deadline: float) -> dict[int, Reply]:
        """What has come next from ranks not yet ``done``; empty at the deadline."""
        rank_of: dict[Any, int] = {}
        for rank, member in enumerate(self._members):
            if rank not in done:
                rank_of[member.pipe] = rank_of[member.process.sentinel] = rank
        ready = connection.wait(list(rank_of), max(0.0, deadline - time.monotonic()))
        replies = {}
        for rank in {rank_of[source] for source in ready}:
            member = self._members[rank]
            try:
                # A dead process may have answered before; poll() is also true at a pipe's end.
                replies[rank] = member.pipe.recv() if member.pipe.poll() else self._obituary(rank)
            except (EOFError, OSError):
                replies[rank] = self._obituary(rank)
        return replies

    def _obituary(self, rank: int) -> Reply:
        process = self._members[rank].process
        process.join(5.0)
        code = process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        text = f"the process died ({how})\n{self._stacks(rank)}".strip()
        return Reply(Outcome.FAILED, text=text)

    def _ask_where(self, done: Collection[int], timeout_s: float) -> dict[int, str]:
        hung = [rank for rank in range(self.world_size) if rank not in done]
        for rank in hung:
            os.kill(self._members[rank].process.pid or 0, signal.SIGUSR1)
        time.sleep(_GRACE_S)
        return {
            rank: f"no answer within {timeout_s:g} s\n{self._stacks(rank)}".strip() for rank in hung
        }

    def _stacks(self, rank: int) -> str:
        try:
            return Path(self._folder, f"stacks-{rank}.txt").read_text()
        except OSError:
            return ""

    def _end_after_failure(self, failed: Collection[int]) -> None:
        """End the peers at once, and the failed ranks when they have cleaned up."""
        for rank, member in enumerate(self._members):
            if rank not in failed:
                member.process.kill()
        for rank in failed:
            self._members[rank].process.join(_GRACE_S)
        self.kill()

    def _skip(self, call: str, replies: list[Reply]) -> list[Any]:
        texts = {r: a.text for r, a in enumerate(replies) if a.outcome is Outcome.SKIPPED}
        if len(texts) < self.world_size:
            texts = {rank: f"skipped, unlike other ranks: {text}" for rank, text in texts.items()}
            raise WorkerError(call, texts, self.world_size)
        pytest.skip(texts[0])


@functools.cache
def pool_for(world_size: int) -> WorkerPool:
    """The session's pool of this size."""
    if world_size not in WORLD_SIZES:
        raise ValueError(f"pool_for({world_size}): expected one of {WORLD_SIZES}")
    pool = WorkerPool(world_size)
    _pools.append(pool)
    return pool


def shutdown_pools() -> None:
    """End the workers of every pool."""
    for pool in _pools:
        pool.kill()


_pools: list[WorkerPool] = []


@functools.cache
def _start_server() -> ForkServerContext:
    """Start the process that workers are forked from, with the modules they need imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    changed = {
        "OMP_NUM_THREADS": "1",
        # Before 3.13 the server ignores the search path that it is sent.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    atexit.register(shutdown_pools)  # before multiprocessing's own, which would wait for them
    return context


def _make_job(fn: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float) -> Job:
    if not isinstance(fn, FunctionType) or "<" in fn.__qualname__:
        raise TypeError(f"run({fn!r}): expected a function at the top level of a module")
    path = getattr(sys.modules.get(fn.__module__), "__file__", None)
    if path is None:
        raise TypeError(f"run({fn!r}): its module {fn.__module__} has no file to import it from")
    try:
        pickled = pickle.dumps(kwargs)
    except Exception as error:
        raise TypeError(f"run({fn.__qualname__}): arguments must pickle: {error}") from error
    return Job(fn.__module__, path, fn.__qualname__, pickled, timeout_s)


def _name_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
