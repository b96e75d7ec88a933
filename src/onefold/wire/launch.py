"""Launch: one command on several local ranks, with torchrun's elastic agent underneath.

What the agent and the ranks print goes into files; how a rank ended is raised as one exception.
"""

import contextlib
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

AGENT_LOG: Final = "agent.log"
SHUTDOWN_S: Final = 5
"""Seconds between asking ranks to end and killing them."""


class RankFailed(RuntimeError):
    """A rank did not end well; the others have been stopped.

    Attributes:
        rank: the first that failed.
        ending: how it ended, in words.
    """

    def __init__(self, rank: int, ending: str) -> None:
        self.rank = rank
        self.ending = ending
        super().__init__(f"rank {rank} {ending}")


def run_ranks(
    command: Sequence[str], *, num_ranks: int, log_folder: Path, environment: Mapping[str, str]
) -> None:
    """Run ``command`` on ``num_ranks`` processes of this machine until all have ended.

    Call it on the main thread, so that Ctrl-C reaches the ranks.

    Args:
        command: the program and its arguments; ranks find RANK, WORLD_SIZE and so on in their
            environment, as under torchrun.
        num_ranks: at least 1.
        log_folder: gets a file of the agent's log and a folder with two files per rank.
        environment: set for the ranks, beside what they inherit.

    Raises:
        RankFailed: a rank ended with an error.
        KeyboardInterrupt: the caller was interrupted; the ranks have been stopped.
        SystemExit: the caller was asked to terminate; the ranks have been stopped.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    program, *arguments = command
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="127.0.0.1",  # not every machine can resolve its own name
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_folder), redirects=Std.ALL),
        shutdown_timeout=SHUTDOWN_S,
    )
    with _logged_to(log_folder / AGENT_LOG), _kept_signals(), _environment(environment):
        try:
            elastic_launch(config, program)(*arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankFailed(rank, _ending(failure.exitcode)) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


@contextlib.contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Send the launcher's log, which repeats every failure in a block, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("torch.distributed")
    handlers, propagates = logger.handlers, logger.propagate
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        handler.close()


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """The agent installs handlers and leaves them; put the caller's back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name in ("SIGHUP", "SIGQUIT"):  # not on every platform
        if hasattr(signal, name):
            number = getattr(signal, name)
            kept[number] = signal.getsignal(number)
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """The ranks inherit this process's environment, so it is changed while they start."""
    before = dict(os.environ)
    os.environ.update(added)
    interface = _loopback()
    if interface is not None:
        # Without it gloo asks for the address of the machine's own name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
