"""Pool: the processes of one family of engines; they live until a job fails or the cell ends."""

import multiprocessing
import os
import socket
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_EXTENSIONS_DIR": str(Path(__file__).parent / ".venv" / "torch_extensions"),
    "TQDM_DISABLE": "1",
}


def _serve(*arguments: Any) -> None:
    from benchmarks.rank import main  # in the new process: the command itself needs no torch

    main(*arguments)


class JobFailed(RuntimeError):
    """A rank raised, died or took too long; the pool's processes have been ended."""


class Pool:
    """As many processes as ranks, which do the same job at the same time."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="onefold-bench-")
        self._num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    def run(self, function: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """One job on every rank; what each returned.

        Raises:
            JobFailed: with the text of the first rank that failed.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            return self._collect(time.monotonic() + timeout_s)
        except OSError as error:
            self.end()
            raise JobFailed(f"a rank is gone: {error}\n{self._last_words()}") from None
        except BaseException:
            self.end()
            raise

    def _collect(self, deadline: float) -> list[Any]:
        values: dict[int, Any] = {}
        while len(values) < self._world_size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in values]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobFailed("timed out")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    text = f"rank {rank} ended with exit code {code}\n{self._last_words()}"
                    raise JobFailed(text) from None
                if kind == "failed":
                    raise JobFailed(value)
                values[rank] = value
        return [values[rank] for rank in range(self._world_size)]

    def _start(self) -> None:
        os.environ |= ENVIRONMENT
        for _, interface in socket.if_nameindex():
            if interface in ("lo", "lo0"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._num_started += 1
        context = multiprocessing.get_context("spawn")
        store = str(Path(self._folder.name) / f"store{self._num_started}")
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            log = str(self._log_of(rank))
            process = context.Process(
                target=_serve, args=(theirs, rank, self._world_size, store, log), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _log_of(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _last_words(self) -> str:
        texts = [self._log_of(rank) for rank in range(self._world_size)]
        lines = [line for path in texts if path.exists() for line in path.read_text().splitlines()]
        return "\n".join(lines[-8:])

    def end(self) -> None:
        """End this pool's processes; the next job starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
