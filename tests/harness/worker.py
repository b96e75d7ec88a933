"""The worker's side of a pool: one process per rank, doing jobs until its pipe closes."""

import contextlib
import faulthandler
import gc
import importlib.util
import itertools
import math
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.harness.context import RankContext

START_TIMEOUT_S = 60.0
# Far above any deadline of the harness, so that the harness speaks first.
_GROUP_TIMEOUT = timedelta(hours=1)
# An orphan (its parent was killed while it hung) ends itself this long after its deadline.
_ORPHAN_GRACE_S = 30
# Set by libraries at their first use, on purpose and for the life of the process.
_LIBRARY_ENV = ("KMP_", "PYTORCH_", "TOKENIZERS_", "TORCHINDUCTOR_", "TRITON_")


@dataclass(frozen=True, slots=True)
class Job:
    """A function to call on every rank, by name, and its arguments."""

    module: str
    path: str
    qualname: str
    kwargs: bytes  # pickled apart: they may need the module, which is imported first
    timeout_s: float


class Outcome(Enum):
    """How a job ended on one rank."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rank answers to a job."""

    outcome: Outcome
    value: bytes = b""  # DONE: the pickled return value
    text: str = ""  # SKIPPED: the reason; FAILED: the traceback
    num_collectives: int = 0  # on the default group so far


def main(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    """Join the default process group of the pool in ``folder``, then serve jobs.

    A rank that fails reports first, because its clean-up may hang, and then ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    stacks = Path(folder, f"stacks-{rank}.txt").open("w")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)  # the parent asks a hung rank where it is
    stack = contextlib.ExitStack()
    try:
        signal.alarm(math.ceil(START_TIMEOUT_S) + _ORPHAN_GRACE_S)
        _join(rank, world_size, folder)
        signal.alarm(0)
        pipe.send(Reply(Outcome.DONE))
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                os._exit(0)
            signal.alarm(math.ceil(job.timeout_s) + _ORPHAN_GRACE_S)
            reply = _do(job, RankContext(rank, world_size, stack), stack)
            signal.alarm(0)
            pipe.send(reply)
    except BaseException as error:
        pipe.send(Reply(Outcome.FAILED, text=_describe(error)))
        with contextlib.suppress(BaseException):
            stack.close()
        sys.stdout.flush()
        os._exit(1)


def _join(rank: int, world_size: int, folder: str) -> None:
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # of the test that happened to come first
    torch.set_num_threads(1)
    rendezvous = Path(folder, "rendezvous").as_uri()
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT
    )
    _destroy_later()


def _bury(graves: "queue.SimpleQueue[object]") -> None:
    """Drop destroyed groups: gloo takes 10 ms to end each, without the interpreter's lock."""
    while True:
        graves.get()


def _destroy_later() -> None:
    """End process groups behind the next test instead of before it; nobody can reach them."""
    graves: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_bury, args=(graves,), daemon=True).start()
    destroy = dist.destroy_process_group

    def destroy_later(group: dist.ProcessGroup | None = None) -> None:
        destroy(group)
        graves.put(group)

    dist.destroy_process_group = destroy_later


def _do(job: Job, ctx: RankContext, stack: contextlib.ExitStack) -> Reply:
    body = _load(job)  # before the look around: what imports leave behind is no leak
    before = _Surroundings.now()
    _reset(ctx.rank)
    value, skipped = b"", ""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"onefold(\.|$)")
        try:
            value = pickle.dumps(body(ctx, **pickle.loads(job.kwargs)))
        except pytest.skip.Exception as error:
            skipped = str(error) or "skipped"
        stack.close()
    _reset(ctx.rank)
    gc.collect()
    gc.freeze()  # what lives now is there to stay, and need not be looked at after every test
    before.expect_unchanged()
    outcome = Outcome.SKIPPED if skipped else Outcome.DONE
    num_collectives = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    return Reply(outcome, value, skipped, num_collectives)


def _load(job: Job) -> Callable[..., Any]:
    module = sys.modules.get(job.module)
    if module is None or getattr(module, "__file__", None) != job.path:
        module = _import(job.module, job.path)
    function: Any = module
    for name in job.qualname.split("."):
        function = getattr(function, name)
    return getattr(function, "rank_body", function)


def _import(name: str, path: str) -> ModuleType:
    """Import by name where that means the file at ``path``, else from the file, under that name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == path and name not in sys.modules:
        return importlib.import_module(name)
    _provide_parents(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file", name=name, path=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _provide_parents(name: str) -> None:
    """Stand-ins for packages that cannot be imported, as pytest makes them: pickle needs them."""
    packages = name.split(".")[:-1]
    for parent in itertools.accumulate(packages, "{}.{}".format):
        try:
            importlib.import_module(parent)
        except ImportError:
            sys.modules[parent] = ModuleType(parent)


def _reset(rank: int) -> None:
    """Undo what tests commonly change. Seeds differ by rank: equal data is never an accident."""
    random.seed(rank)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(rank)
    torch.default_generator.manual_seed(rank)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


class _Surroundings(NamedTuple):
    """What a test must leave as it found it."""

    threads: frozenset[threading.Thread]
    environment: dict[str, str]
    groups: frozenset[str]

    @classmethod
    def now(cls) -> "_Surroundings":
        world = dist.distributed_c10d._world
        return cls(
            threads=frozenset(threading.enumerate()),
            environment=dict(os.environ),
            groups=frozenset(world.pg_names[group] for group in world.pg_map),
        )

    def expect_unchanged(self) -> None:
        """Raise if a thread, a variable or a process group is new, changed or gone."""
        for thread in threading.enumerate():
            if thread not in self.threads and _is_own(thread):
                thread.join(timeout=0.5)  # it may be on its way out
        after = _Surroundings.now()
        threads = [t.name for t in after.threads - self.threads if _is_own(t) and t.is_alive()]
        variables = {
            name
            for name, _ in self.environment.items() ^ after.environment.items()
            if not name.startswith(_LIBRARY_ENV)
        }
        leaks = {
            "threads": threads,
            "environment variables": sorted(variables),
            "process groups": sorted(self.groups ^ after.groups),
        }
        found = [f"{kind} {', '.join(names)}" for kind, names in leaks.items() if names]
        if found:
            raise LeakError(
                f"The test left changed: {'; '.join(found)}. Undo it with ctx.cleanup(...)."
            )


class LeakError(AssertionError):
    """A test left something behind that would reach the next one."""


def _is_own(thread: threading.Thread) -> bool:
    """Not one of torch's: autograd's (seen as dummies once Python ran on them), inductor's pool."""
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) or type(thread).__module__
    return not (isinstance(thread, threading._DummyThread) or module.startswith("torch."))


def _describe(error: BaseException) -> str:
    """The traceback without the harness's own first frames."""
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename == __file__:
        here = here.tb_next
    return "".join(traceback.format_exception(type(error), error, here)).strip()
