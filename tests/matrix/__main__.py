"""``make matrix``: the whole grid, into docs/compatibility.md.

    python -m tests.matrix [WORD] [JOBS]

With WORD only the rows in which it occurs are run, and the page goes to the terminal. JOBS rows
(4 unless told otherwise) run side by side: a row mostly waits for its own ranks.
"""

import functools
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.harness import WorkerPool
from tests.matrix.cell import play
from tests.matrix.features import rows
from tests.matrix.grid import STAGES, Names, Verdict, quiet_environment, run_fields
from tests.matrix.table import render, row_name

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


class Run:
    """Rows that are worked off by several threads, and what came out."""

    def __init__(self, wanted: list[Names]) -> None:
        self.results: dict[tuple[Names, int, str], Verdict] = {}
        self.error: BaseException | None = None
        self._wanted = wanted
        self._left: queue.SimpleQueue[Names] = queue.SimpleQueue()
        for names in reversed(wanted):  # those on 4 ranks take longest
            self._left.put(names)
        self._pools: list[WorkerPool] = []
        self._num_done = 0
        self._begin = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def work(self) -> None:
        """Take rows until none is left, on workers of this thread's own."""

        @functools.cache
        def pool_of(world_size: int) -> WorkerPool:
            pool = WorkerPool(world_size)
            self._pools.append(pool)
            return pool

        try:
            while self.error is None:
                self._do(self._left.get_nowait(), pool_of)
        except queue.Empty:
            return
        except BaseException as error:
            self.error = error

    def _do(self, names: Names, pool_of: Callable[[int], WorkerPool]) -> None:
        found: dict[tuple[Names, int, str], Verdict] = {}
        for stage in STAGES:
            for mode, verdict in run_fields(names, stage, pool_of=pool_of).items():
                found[names, stage, mode] = verdict
        with self._lock:
            self.results |= found
            self._num_done += 1
            for (_, stage, mode), verdict in found.items():
                if verdict.kind == "FAIL":
                    print(f"FAIL {row_name(names)}, stage {stage}, {mode}\n{verdict.text}\n")
            place = f"{self._num_done:4}/{len(self._wanted)}"
            print(f"{self.seconds:6.0f} s {place} {row_name(names)}", flush=True)

    def start_server(self) -> None:
        """Start what all workers are forked from, before there are threads."""
        self._pools.append(WorkerPool(1))
        self._pools[0].run(play, names=("fp32",), stage=0, runs=[])

    def end(self) -> None:
        for pool in self._pools:
            pool.kill()


def main(word: str = "", jobs: str = "4") -> int:
    """Run, write, and return the exit status."""
    quiet_environment()
    wanted = [names for names in rows() if word in row_name(names)]
    run = Run(wanted)
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(int(jobs))]
    try:
        run.start_server()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        run.end()
    if run.error is not None:
        raise run.error
    page = render(wanted, run.results)
    if word:
        print(page)
    else:
        PAGE.write_text(page, encoding="utf-8")
    failed = [field for field, verdict in run.results.items() if verdict.kind == "FAIL"]
    for names, stage, mode in failed:
        print(f"FAIL {row_name(names)}, stage {stage}, {mode}")
    print(f"{len(run.results)} fields, {len(failed)} failed, {run.seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
