"""Native transport: the backend's own collectives (NCCL on GPUs, gloo's algorithms on CPUs).

The order in which ranks are summed is the backend's; contract line 6 is not promised here. A ring
in a narrow dtype would round at every hop, so there the slices go by all-to-all and are summed in
the dtype of the result: the same bytes, one rounding of each term.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.wire.transports.base import Work

# torch 2.13 renamed the two single-buffer collectives and warns about the older names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        """See ``Transport.reduce_scatter``."""
        if not source.dtype == wire_dtype == out.dtype:
            return _NarrowSum(self.group, source, out, wire_dtype)
        work = _reduce_scatter(out, source, group=self.group, async_op=True)
        return _NativeWork(work, source, out)

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.all_gather``."""
        return _NativeWork(_all_gather(out, shard, group=self.group, async_op=True), shard, out)

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
        self._received = torch.empty_like(self._sent).view(group.size(), -1)
        self._work = dist.all_to_all_single(
            self._received.view(-1).view(torch.uint8),  # not every backend moves every dtype
            self._sent.view(torch.uint8),
            group=group,
            async_op=True,
        )

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        terms = list(self._received)
        terms[self._rank] = self._own
        total = terms[0].to(self._out.dtype, copy=True)
        for term in terms[1:]:
            total.add_(term)
        self._out.copy_(total)


class _NarrowAllReduce:
    """In place: a narrow sum of nearly equal slices, then an all-gather of the rounded sums."""

    def __init__(self, group: dist.ProcessGroup, buffer: Tensor, wire_dtype: torch.dtype) -> None:
        size = group.size()
        self._group = group
        self._buffer = buffer
        self._wire_dtype = wire_dtype
        # Slices of equal length, the last ones of padding: all-gather knows no others.
        self._slice_numel = -(-buffer.numel() // size)
        self._padded = buffer.new_zeros(self._slice_numel * size)
        self._padded[: buffer.numel()] = buffer
        own = self._padded.split(self._slice_numel)[group.rank()]
        self._sum = _NarrowSum(group, self._padded, own, wire_dtype)

    def wait(self) -> None:
        self._sum.wait()
        own = self._padded.split(self._slice_numel)[self._group.rank()].to(self._wire_dtype)
        rounded = own.new_empty(self._padded.numel())
        _all_gather(rounded.view(torch.uint8), own.view(torch.uint8), group=self._group)
        self._buffer.copy_(rounded[: self._buffer.numel()])
