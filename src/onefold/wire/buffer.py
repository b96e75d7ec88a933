"""Arena: where full-size buffers are leased from, and where they go back.

One arena per engine. Large CPU buffers lie on huge pages where the platform has them, because a
fresh buffer on small pages costs several times more page faults than the reduction it serves.
Buffers that come back are kept for the next lease of their size, until a lease of another size, or
``trim``, which the engine calls between steps; between steps an arena holds nothing.
"""

import ctypes
import logging
import mmap
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20


class Arena:
    """Leases of flat 1-D buffers on one device; in pinned memory where ``is_pinned``.

    Attributes:
        leased_bytes: bytes out on lease now.
        peak_bytes: the most that was ever out or kept for reuse at once.
    """

    def __init__(self, device: torch.device, *, is_pinned: bool = False) -> None:
        self.device = device
        self._is_pinned = is_pinned
        self.leased_bytes = 0
        self.peak_bytes = 0
        self._kept_bytes = 0
        self._kept: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def lease(self, numel: int, dtype: torch.dtype, *, zeroed: bool = False) -> Tensor:
        """A flat buffer ``[numel]``; its contents are undefined unless ``zeroed``.

        The lease ends with ``give_back``.
        """
        numel_bytes = numel * dtype.itemsize
        kept = self._kept[numel, dtype]
        if kept:
            buffer = kept.pop()
            self._kept_bytes -= numel_bytes
            if zeroed:
                buffer.zero_()
        else:
            self.trim()  # what is kept does not fit: units of many sizes must not add up
            buffer = self.allocate(numel, dtype, zeroed=zeroed)
        self.leased_bytes += numel_bytes
        self.peak_bytes = max(self.peak_bytes, self.leased_bytes + self._kept_bytes)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """End a lease. The caller must not touch the buffer again."""
        self.leased_bytes -= buffer.nbytes
        self._kept_bytes += buffer.nbytes
        self._kept[buffer.numel(), buffer.dtype].append(buffer)

    def trim(self) -> None:
        """Return every kept buffer to the operating system."""
        self._kept.clear()
        self._kept_bytes = 0

    def settle(self) -> None:
        """Wait until what was started on the device has reached host memory."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @contextmanager
    def leased(self, numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """A lease for the length of a with-block."""
        buffer = self.lease(numel, dtype)
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    def allocate(self, numel: int, dtype: torch.dtype, *, zeroed: bool = False) -> Tensor:
        """Memory of the same kind that is not leased and never comes back."""
        num_bytes = numel * dtype.itemsize
        if self._is_pinned:
            pinned = torch.empty(numel, dtype=dtype, pin_memory=True)
            return pinned.zero_() if zeroed else pinned
        if self.device.type == "cpu" and num_bytes >= HUGE_PAGE_BYTES:
            return _huge_pages(num_bytes).view(dtype)
        make = torch.zeros if zeroed else torch.empty
        return make(numel, dtype=dtype, device=self.device)


def _huge_pages(num_bytes: int) -> Tensor:
    """Fresh anonymous memory that reads as zeros, on huge pages; ``[num_bytes]`` uint8."""
    # The tensor keeps the mapping alive and unmaps it when it dies. A shared mapping, which is
    # Python's default, is never on huge pages unless the administrator of the machine says so.
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, **private)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    aligned = memory[start : start + num_bytes]
    advise_huge_pages(aligned)
    return aligned


def advise_huge_pages(memory: Tensor) -> None:
    """Ask for huge pages under large CPU memory that nobody has touched yet; never fails.

    Args:
        memory: any tensor; its bytes lie in a row. Small or GPU memory is left as it is.
    """
    if memory.device.type != "cpu" or memory.nbytes < HUGE_PAGE_BYTES or _madvise is None:
        return
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise(begin, memory.data_ptr() + memory.nbytes - begin, mmap.MADV_HUGEPAGE):
        log.debug("no huge pages: errno %d", ctypes.get_errno())


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


_madvise: Final = _find_madvise()
