"""Native transport: the backend's own collectives (NCCL on GPUs, gloo's algorithms on CPUs).

Where a buffer is as wide as the wire the order in which ranks are summed is the backend's, and
contract line 6 is not promised. A ring in a narrow dtype would round at every hop, so there the
slices go by all-to-all and are summed in the dtype of the result: the same bytes, one rounding of
each term. Up to 64 ranks are added one after another, in rank order; more of them in one call, so
that the host's work does not grow with the ranks.
"""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.wire import single
from onefold.wire.buffer import Arena
from onefold.wire.transports.base import Work

MAX_ORDERED_RANKS: Final = 64
"""Up to so many terms of a narrow sum are added one after another."""


class _NativeWork:
    def __init__(self, work: dist.Work | None, *buffers: Tensor) -> None:
        self._work = work
        self._buffers = buffers  # held until wait(): the backend may not keep them alive

    def is_done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._buffers = ()


class NativeTransport:
    """The collectives of the process group's backend; narrow copies of terms lie in ``arena``."""

    name = "native"

    def __init__(self, group: dist.ProcessGroup, arena: Arena) -> None:
        self.group = group
        self.arena = arena

    def reduce_scatter(
        self, source: Tensor, out: Tensor, tag: int, wire_dtype: torch.dtype
    ) -> Work:
        """See ``Transport.reduce_scatter``.

        Memory: where the wire is narrower 2 * N elements of its dtype until the wait.
        """
        if not source.dtype == wire_dtype == out.dtype:
            return _NarrowSum(self, source, out, wire_dtype)
        work = single.reduce_scatter(out, source, group=self.group, async_op=True)
        return _NativeWork(work, source, out)

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.all_gather``."""
        work = single.all_gather(out, shard, group=self.group, async_op=True)
        return _NativeWork(work, shard, out)

    def all_reduce(self, buffer: Tensor, tag: int, wire_dtype: torch.dtype) -> Work:
        """See ``Transport.all_reduce``."""
        if buffer.dtype != wire_dtype:
            return _NarrowAllReduce(self, buffer, wire_dtype)
        return _NativeWork(dist.all_reduce(buffer, group=self.group, async_op=True), buffer)

    def close(self) -> None:
        """See ``Transport.close``; the backend's threads end with the group."""


class _NarrowSum:
    """Slices of ``source`` by all-to-all in ``wire_dtype``; this rank's are summed into ``out``.

    What ``source`` lacks to W slices of the length of ``out`` counts as zeros.
    """

    def __init__(
        self, transport: NativeTransport, source: Tensor, out: Tensor, wire_dtype: torch.dtype
    ) -> None:
        size = transport.group.size()
        self._arena = transport.arena
        self._out = out
        self._sent = self._arena.lease(size * out.numel(), wire_dtype)
        self._sent[: source.numel()].copy_(source)
        self._sent[source.numel() :].zero_()
        self._received = self._arena.lease(size * out.numel(), wire_dtype)
        self._terms = self._received.view(size, -1)
        self._work = dist.all_to_all_single(
            self._received.view(torch.uint8),  # not every backend moves every dtype
            self._sent.view(torch.uint8),
            group=transport.group,
            async_op=True,
        )

    def is_done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        sum_of_terms(self._terms, self._out)
        self._arena.give_back(self._sent)
        self._arena.give_back(self._received)


def sum_of_terms(terms: Tensor, out: Tensor) -> None:
    """Sum the rows of ``terms`` ``[W, S]`` into ``out`` ``[S]``, in its dtype.

    Up to 64 rows are added in rank order, one after another; more in one call, in an order of
    torch's choosing which is the same in every run on one kind of device.

    Memory: above 64 rows, on the CPU, the terms in the dtype of ``out``.
    """
    if len(terms) > MAX_ORDERED_RANKS:
        torch.sum(terms, dim=0, dtype=out.dtype, out=out)
        return
    first, *rest = terms
    out.copy_(first)
    for term in rest:
        out.add_(term)


class _NarrowAllReduce:
    """In place: a narrow sum of equal slices, then an all-gather of the rounded sums."""

    def __init__(self, transport: NativeTransport, buffer: Tensor, wire_dtype: torch.dtype) -> None:
        self._transport = transport
        self._buffer = buffer
        self._wire_dtype = wire_dtype
        # Slices of equal length, the last ones of padding: all-gather knows no others.
        slice_numel = -(-buffer.numel() // transport.group.size())
        self._own = transport.arena.lease(slice_numel, buffer.dtype)
        self._sum = _NarrowSum(transport, buffer, self._own, wire_dtype)

    def is_done(self) -> bool:
        return False  # the gather starts when somebody waits

    def wait(self) -> None:
        self._sum.wait()
        group, arena = self._transport.group, self._transport.arena
        with arena.leased(group.size() * self._own.numel(), self._wire_dtype) as rounded:
            own = rounded.view(group.size(), -1)[group.rank()].copy_(self._own)
            single.all_gather(rounded.view(torch.uint8), own.view(torch.uint8), group=group)
            self._buffer.copy_(rounded[: self._buffer.numel()])
        arena.give_back(self._own)
