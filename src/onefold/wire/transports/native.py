"""Native transport: the backend's own collectives (NCCL on GPUs, gloo's algorithms on CPUs).

Where a buffer is as wide as the wire the order in which ranks are summed is the backend's, and
contract line 6 is not promised. A ring in a narrow dtype would round at every hop, so there the
slices go by all-to-all and are summed in the dtype of the result, this rank's own term unrounded:
the same bytes, one rounding of each term. Up to 64 ranks are added one after another, in rank
order; more of them in one call, so that the host's work does not grow with the ranks.
"""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.wire import single
from onefold.wire.transports.base import Work

MAX_ORDERED_RANKS: Final = 64
"""Up to so many terms of a narrow sum are added one after another."""


class _NativeWork:
    def __init__(self, work: dist.Work | None, *buffers: Tensor) -> None:
        self._work = work
        self._buffers = buffers  # held until wait(): the backend may not keep them alive

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._buffers = ()


class NativeTransport:
    """The collectives of the process group's backend."""

    name = "native"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def reduce_scatter(
        self, source: Tensor, out: Tensor, tag: int, wire_dtype: torch.dtype
    ) -> Work:
        """See ``Transport.reduce_scatter``.

        Memory: where the wire is narrower 2 N elements of its dtype until the wait.
        """
        if not source.dtype == wire_dtype == out.dtype:
            return _NarrowSum(self.group, source, out, wire_dtype)
        work = single.reduce_scatter(out, source, group=self.group, async_op=True)
        return _NativeWork(work, source, out)

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.all_gather``."""
        work = single.all_gather(out, shard, group=self.group, async_op=True)
        return _NativeWork(work, shard, out)

    def all_reduce(self, buffer: Tensor, tag: int, wire_dtype: torch.dtype) -> Work:
        """See ``Transport.all_reduce``."""
        if buffer.dtype != wire_dtype:
            return _NarrowAllReduce(self.group, buffer, wire_dtype)
        return _NativeWork(dist.all_reduce(buffer, group=self.group, async_op=True), buffer)

    def close(self) -> None:
        """See ``Transport.close``; the backend's threads end with the group."""


class _NarrowSum:
    """Slices of ``source`` by all-to-all in ``wire_dtype``; this rank's are summed into ``out``."""

    def __init__(
        self, group: dist.ProcessGroup, source: Tensor, out: Tensor, wire_dtype: torch.dtype
    ) -> None:
        self._out = out
        self._rank = group.rank()
        self._own = source.view(group.size(), -1)[self._rank]
        self._sent = source.to(wire_dtype)
        self._received = torch.empty_like(self._sent)
        self._terms = self._received.view(group.size(), -1)
        self._work = dist.all_to_all_single(
            self._received.view(torch.uint8),  # not every backend moves every dtype
            self._sent.view(torch.uint8),
            group=group,
            async_op=True,
        )

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        total = sum_of_terms(self._terms, self._own, self._rank, self._out.dtype)
        self._out.copy_(total)


def sum_of_terms(terms: Tensor, own: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """The sum of narrow terms and one that was not rounded, in ``dtype``.

    Args:
        terms: ``[W, S]``, one row per rank; overwritten above 64 ranks.
        own: ``[S]``, what stands for row ``rank``.
        rank: this rank.
        dtype: of the sum.

    Returns:
        ``[S]``, new. Up to 64 rows are added in rank order, one after another. Above, all but
        this rank's are summed in one call, in an order of torch's choosing which is the same in
        every run on one kind of device, and ``own`` is added last.
    Memory: above 64 ranks, on the CPU, the terms in ``dtype``.
    """
    if len(terms) > MAX_ORDERED_RANKS:
        terms[rank].zero_()
        return torch.add(terms.sum(dim=0, dtype=dtype), own)
    rows = list(terms)
    rows[rank] = own
    total: Tensor = rows[0].to(dtype, copy=True)
    for row in rows[1:]:
        total.add_(row)
    return total


class _NarrowAllReduce:
    """In place: a narrow sum of nearly equal slices, then an all-gather of the rounded sums."""

    def __init__(self, group: dist.ProcessGroup, buffer: Tensor, wire_dtype: torch.dtype) -> None:
        size = group.size()
        self._group = group
        self._buffer = buffer
        # Slices of equal length, the last ones of padding: all-gather knows no others.
        slice_numel = -(-buffer.numel() // size)
        padded = buffer.new_zeros(slice_numel * size)
        padded[: buffer.numel()] = buffer
        self._own = padded.view(size, -1)[group.rank()]
        self._sum = _NarrowSum(group, padded, self._own, wire_dtype)
        self._rounded = padded.new_empty(padded.numel(), dtype=wire_dtype)

    def wait(self) -> None:
        self._sum.wait()
        own = self._own.to(self._rounded.dtype)
        single.all_gather(self._rounded.view(torch.uint8), own.view(torch.uint8), group=self._group)
        self._buffer.copy_(self._rounded[: self._buffer.numel()])
