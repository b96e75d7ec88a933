"""Collectives: the one door to the wire for flat buffers, with a ledger at the door.

Every collective is started here and hands out a ``Handle``. On an axis of one rank a collective is
a copy (nothing at all where source and result are the same memory) and the ledger stays as it is.
"""

import time
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.wire.ledger import Entry, Ledger
from onefold.wire.mesh import Mesh
from onefold.wire.transports import Work

_TAGS_PER_UNIT: Final = 3  # one per collective, so that a gather never meets a reduction


class Connection(Protocol):
    """Groups of ranks that can be made anew."""

    is_broken: bool

    def rebuild(self) -> None:
        """Make them anew; every rank calls it, after they have agreed to."""


class Handle:
    """A started collective. ``wait`` orders the result before its first use; once is enough."""

    def __init__(
        self, owner: "Collectives", entry: Entry | None = None, work: Work | None = None
    ) -> None:
        self._owner = owner
        self._entry = entry
        self._work = work

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once; False also where that cannot be known."""
        return self._work is None or self._work.is_done()

    def wait(self) -> None:
        """Block until the result may be read, and enter the exposed time in the ledger."""
        work, self._work = self._work, None
        if work is None:
            return
        begin = time.perf_counter()
        try:
            work.wait()
        except RuntimeError:
            self._owner.is_broken = True
            raise
        if self._entry is not None:
            self._owner.ledger.close(self._entry, time.perf_counter() - begin)


class Collectives:
    """Reduce-scatter, all-gather and all-reduce of flat buffers over the axes of one mesh.

    ``index`` and ``unit`` name the unit for the transport and the ledger. The calling order must be
    the same on every rank, except that the direct transport tells units apart. Terms of a sum
    travel in ``wire_dtype``, which may be narrower than the buffers.

    Attributes:
        mesh: whose axes these are; every reduce group has one.
        is_broken: a collective of a data group failed, so the groups must be rebuilt.
    """

    def __init__(self, mesh: Mesh, ledger: Ledger) -> None:
        self.mesh = mesh
        self.ledger = ledger
        self.is_broken = False

    def rebuild(self) -> None:
        """Make new data groups; every rank calls it, after they have agreed to."""
        self.mesh.rebuild()
        self.is_broken = False

    def start_reduce_scatter(
        self, source: Tensor, out: Tensor, index: int, unit: str, wire_dtype: torch.dtype
    ) -> Handle:
        """Start summing ``source`` over the shard axis; this rank's slice lands in ``out``.

        Args:
            source: ``[N]``, contiguous. Owned by the call until the handle is waited for.
            out: ``[S]``, same device, overwritten; the sum is in its dtype. May be slice r of
                ``source``.
            index: the unit's place in the plan.
            unit: the unit's name.
            wire_dtype: in which terms travel.
        Communication: one reduce-scatter; (W-1)/W * N * itemsize of the wire's dtype, out and in.
        Source: ZeRO (arXiv:1910.02054) sec. 5.2.
        """
        group = self.mesh.shard
        if group.transport is None:
            _copy(source, out)
            return Handle(self)
        moved = out.numel() * wire_dtype.itemsize * (group.size - 1)
        entry = self.ledger.open("reduce_scatter", unit, moved, moved)
        work = group.transport.reduce_scatter(source, out, index * _TAGS_PER_UNIT, wire_dtype)
        return Handle(self, entry, work)

    def start_all_gather(self, shard: Tensor, out: Tensor, index: int, unit: str) -> Handle:
        """Start collecting every rank's ``shard`` over the shard axis into ``out``.

        Args:
            shard: ``[S]``. May be slice r of ``out``.
            out: ``[N]``, same dtype and device, overwritten.
            index: the unit's place in the plan.
            unit: the unit's name.
        Communication: one all-gather; (W-1)/W * N * itemsize bytes out and in.
        Source: ZeRO (arXiv:1910.02054) sec. 5.3.
        """
        group = self.mesh.shard
        if group.transport is None:
            _copy(shard, out)
            return Handle(self)
        moved = shard.nbytes * (group.size - 1)
        entry = self.ledger.open("all_gather", unit, moved, moved)
        work = group.transport.all_gather(shard, out, index * _TAGS_PER_UNIT + 1)
        return Handle(self, entry, work)

    def start_all_reduce(
        self, buffer: Tensor, index: int, unit: str, wire_dtype: torch.dtype
    ) -> Handle:
        """Start summing ``buffer`` over the replicate axis, in place.

        Args:
            buffer: ``[S]``, contiguous. Owned by the call until the handle is waited for.
            index: the unit's place in the plan.
            unit: the unit's name.
            wire_dtype: in which terms, and the sum, travel.
        Communication: one all-reduce; 2 * (R-1)/R * S * itemsize of the wire's dtype, out and in.
        Source: DDP (arXiv:2006.15704) sec. 2.3.
        """
        group = self.mesh.replicate
        if group.transport is None:
            return Handle(self)
        moved = 2 * buffer.numel() * wire_dtype.itemsize * (group.size - 1) // group.size
        entry = self.ledger.open("all_reduce", unit, moved, moved)
        work = group.transport.all_reduce(buffer, index * _TAGS_PER_UNIT + 2, wire_dtype)
        return Handle(self, entry, work)

    def broadcast(self, tensor: Tensor, unit: str) -> None:
        """Overwrite ``tensor`` with that of the first rank of the mesh. Blocks; used at start only.

        Communication: one broadcast per axis of more than one rank.
        """
        # First between replicas, then from shard to shard: everybody ends up with rank (0, 0)'s.
        for group in (self.mesh.replicate, self.mesh.shard):
            if group.process_group is None or not tensor.numel():
                continue
            sent, received = (tensor.nbytes, 0) if group.rank == 0 else (0, tensor.nbytes)
            entry = self.ledger.open("broadcast", unit, sent, received)
            begin = time.perf_counter()
            # as bytes: not every backend moves every dtype
            contiguous = tensor.detach().contiguous()
            raw = contiguous.view(-1).view(torch.uint8)
            dist.broadcast(raw, group=group.process_group, group_src=0)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(contiguous)
            self.ledger.close(entry, time.perf_counter() - begin)


def _copy(source: Tensor, out: Tensor) -> None:
    if source.data_ptr() != out.data_ptr():
        out.copy_(source)
