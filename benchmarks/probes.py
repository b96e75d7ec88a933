"""Probes: what an untimed step sends and holds, seen from outside of the engine."""

import ctypes
import gc
import threading
from pathlib import Path
from typing import Final, Self

_SMAPS: Final = Path("/proc/self/smaps_rollup")
_LOOPBACK: Final = Path("/sys/class/net/lo/statistics/tx_bytes")
_SAMPLE_S: Final = 0.004


def loopback_bytes() -> int | None:
    """Bytes that all processes of this network namespace have sent over the loopback interface."""
    try:
        return int(_LOOPBACK.read_text())
    except OSError:
        return None


def unique_bytes() -> int:
    """Anonymous memory of this process, and its share of memory that processes share.

    Without what is mapped still but offered to the kernel, which takes it when it wants memory.
    """
    fields = dict(line.split()[:2] for line in _SMAPS.read_text().splitlines()[1:])
    held = int(fields["Pss_Anon:"]) + int(fields["Pss_Shmem:"]) - int(fields["LazyFree:"])
    return 1024 * held


def settled_bytes() -> int:
    """``unique_bytes`` when garbage has gone and the allocator has given back what it kept."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return unique_bytes()


class PeakMemory:
    """Samples ``unique_bytes`` on another thread inside the with-block."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, unique_bytes())
            if self._ended.wait(_SAMPLE_S):
                return
