"""Memory that comes and goes: the arena of leases, and buffers that are emptied and refilled.

One arena per engine. Large CPU buffers lie on huge pages where the platform has them, because a
fresh buffer on small pages costs several times more page faults than the reduction it serves.
Buffers that come back are kept for the next lease of their size, until a lease of another size, or
``trim``, which the engine calls between steps; between steps an arena holds nothing.

What is not held is *offered*: large CPU memory stays mapped, and the kernel takes its pages as soon
as anybody wants memory. Who comes back first finds them where they were, without a page fault.

Source: ``MADV_FREE`` and ``MADV_HUGEPAGE`` of ``madvise(2)``.
"""

import ctypes
import logging
import mmap
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20

_Size = tuple[int, torch.dtype]


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
        self._kept: dict[_Size, list[Tensor]] = defaultdict(list)
        self._offered: dict[_Size, list[Tensor]] = defaultdict(list)

    @property
    def kept_bytes(self) -> int:
        """Bytes that came back and wait for the next lease."""
        return sum(buffer.nbytes for buffers in self._kept.values() for buffer in buffers)

    def lease(self, numel: int, dtype: torch.dtype, *, zeroed: bool = False) -> Tensor:
        """A flat buffer ``[numel]``; its contents are undefined unless ``zeroed``.

        The lease ends with ``give_back``.
        """
        size = numel, dtype
        if not self._kept[size]:
            self.trim()  # what is kept does not fit: units of many sizes must not add up
        buffer = _pop(self._kept[size]) if self._kept[size] else _pop(self._offered[size])
        if buffer is None:
            buffer = self.allocate(numel, dtype, zeroed=zeroed)
        elif zeroed:
            buffer.zero_()
        self.leased_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.leased_bytes + self.kept_bytes)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """End a lease. The caller must not touch the buffer again."""
        self.leased_bytes -= buffer.nbytes
        self._kept[buffer.numel(), buffer.dtype].append(buffer)

    def trim(self) -> None:
        """Hold nothing for reuse: offer every kept buffer, or free it where that cannot be."""
        for size, buffers in self._kept.items():
            # What a user's tensor still looks at (a gradient of the last step) stays as it is.
            self._offered[size] += [one for one in buffers if not is_watched(one) and offer(one)]
        self._kept.clear()

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
    start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=start)
    advise_huge_pages(memory)
    return memory


# -- buffers that are emptied and refilled, while tensors go on pointing at their storage ---------


def refill(buffer: Tensor) -> None:
    """Give a flat ``buffer`` that was emptied its memory back; its contents are undefined.

    Args:
        buffer: the whole of its storage, which stays the same object.
    """
    if not buffer.untyped_storage().nbytes():
        buffer.untyped_storage().resize_(buffer.nbytes)
        advise_huge_pages(buffer)


def empty(buffer: Tensor, num_watchers: int, nothing: float) -> None:
    """Let go of the memory of a flat ``buffer``: offered where that can be, else freed.

    Args:
        buffer: the whole of its storage, which must be resizable.
        num_watchers: views of it that are known not to be read before ``refill``.
        nothing: what other views read where the memory is only offered and nobody took it.
    """
    if is_watched(buffer, num_watchers) and can_offer(buffer):
        buffer.fill_(nothing)
    if not offer(buffer):
        buffer.untyped_storage().resize_(0)


def is_watched(buffer: Tensor, num_watchers: int = 0) -> bool:
    """Whether more tensors than ``num_watchers`` look at the storage of ``buffer``."""
    return _num_uses(buffer) - num_watchers > _NUM_OWN_USES


def _num_uses(buffer: Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return uses


_NUM_OWN_USES: Final = _num_uses(torch.empty(1))


def _pop(buffers: list[Tensor]) -> Tensor | None:
    """One of ``buffers`` that nobody looks at; those that somebody does are his from now on."""
    while buffers:
        buffer = buffers.pop()
        if not is_watched(buffer):
            return buffer
    return None


# -- advice to the kernel -------------------------------------------------------------------------


def advise_huge_pages(memory: Tensor) -> None:
    """Ask for huge pages under large CPU memory that nobody has touched yet; never fails.

    Args:
        memory: any tensor; its bytes lie in a row. Small or GPU memory is left as it is.
    """
    if _is_large(memory):
        begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(begin, memory.data_ptr() + memory.nbytes, "MADV_HUGEPAGE")


def offer(memory: Tensor) -> bool:
    """Let the kernel take the pages of large CPU memory when it wants them; False if it will not.

    Until it does, the memory counts as resident (``LazyFree`` in Linux's ``smaps``), and whoever
    writes to it has it back. Contents are undefined from here on.
    """
    if not can_offer(memory):
        return False
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return _advise(begin, end, "MADV_FREE")


def can_offer(memory: Tensor) -> bool:
    """Whether it is of the kind that ``offer`` is for: on CPU, large, not pinned."""
    return _is_large(memory) and not memory.is_pinned()


def _is_large(memory: Tensor) -> bool:
    return memory.device.type == "cpu" and memory.numel() * memory.itemsize >= HUGE_PAGE_BYTES


def _advise(begin: int, end: int, advice: str) -> bool:
    value = getattr(mmap, advice, None)
    if _libc is None or value is None:
        return False
    if _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), value):
        log.debug("%s: errno %d", advice, ctypes.get_errno())
        return False
    return True


_libc: Final = None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
