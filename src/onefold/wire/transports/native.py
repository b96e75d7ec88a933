"""Native transport: the backend's own collectives (NCCL on GPUs, gloo's algorithms on CPUs).

The order in which ranks are summed is the backend's; contract line 6 is not promised here.
"""

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
        self._group = group

    def reduce_scatter(self, source: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.reduce_scatter``."""
        work = _reduce_scatter(out, source, group=self._group, async_op=True)
        return _NativeWork(work, source, out)

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.all_gather``."""
        return _NativeWork(_all_gather(out, shard, group=self._group, async_op=True), shard, out)

    def all_reduce(self, buffer: Tensor, tag: int) -> Work:
        """See ``Transport.all_reduce``."""
        return _NativeWork(dist.all_reduce(buffer, group=self._group, async_op=True), buffer)
