"""Direct transport: each pair of ranks exchanges slices, and the owner sums them in rank order.

gloo's own reduce-scatter is slower than its all-reduce; two messages per pair and a local sum are
more than twice as fast and make the sum reproducible: ((g0 + g1) + g2) + ..., one add after
another, whatever the unit, bucket or overlap setting.

Source: pairwise exchange, Thakur et al., "Optimization of Collective Communication Operations in
MPICH" (2005), sec. 4.3.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.wire.buffer import Arena
from onefold.wire.transports.base import Work


class DirectTransport:
    """Pairwise isend/irecv over a gloo group.

    Messages carry the unit's tag, so two units may be reduced in different orders on two ranks.
    """

    name = "direct"

    def __init__(self, group: dist.ProcessGroup, arena: Arena) -> None:
        self._group = group
        self._arena = arena
        self.rank = group.rank()
        self.size = group.size()

    def reduce_scatter(self, source: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.reduce_scatter``. Memory: (W-1) * S elements until the wait."""
        slices = list(source.split(out.numel())) if out.numel() else [source] * self.size
        return _RankOrderedSum(self, slices, out, tag)

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.all_gather``. Received slices land in ``out`` without a copy."""
        slices = list(out.split(shard.numel())) if shard.numel() else [out] * self.size
        return _Gather(self, shard, slices, tag)

    def all_reduce(self, buffer: Tensor, tag: int) -> Work:
        """See ``Transport.all_reduce``. A rank-ordered reduce-scatter, then an all-gather."""
        cuts = [buffer.numel() * part // self.size for part in range(self.size + 1)]
        slices = [buffer[begin:end] for begin, end in pairwise(cuts)]
        return _AllReduce(self, slices, tag)

    def lease(self, numel: int, like: Tensor) -> Tensor:
        """A receive buffer ``[numel]``."""
        return self._arena.lease(numel, like.dtype)

    def give_back(self, buffer: Tensor) -> None:
        """End the lease of a receive buffer."""
        self._arena.give_back(buffer)

    def send(self, buffer: Tensor, peer: int, tag: int) -> list[dist.Work]:
        """Start sending; nothing is sent for an empty buffer."""
        return self._started(dist.isend, buffer, tag, group_dst=peer)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> list[dist.Work]:
        """Start receiving into ``buffer``."""
        return self._started(dist.irecv, buffer, tag, group_src=peer)

    def _started(self, start: object, buffer: Tensor, tag: int, **peer: int) -> list[dist.Work]:
        if not buffer.numel():
            return []
        assert callable(start)
        work = start(buffer, group=self._group, tag=tag, **peer)
        assert isinstance(work, dist.Work), "this rank is not part of the group"
        return [work]

    def peers(self) -> list[int]:
        """The other ranks, nearest first, so that not everybody starts with rank 0."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class _RankOrderedSum:
    """Slice p of ``slices`` goes to rank p; this rank's slices are summed into ``out``."""

    def __init__(
        self, transport: DirectTransport, slices: list[Tensor], out: Tensor, tag: int
    ) -> None:
        self._transport = transport
        self._own = slices[transport.rank]
        self._out = out
        own_numel = self._own.numel()
        self._received = transport.lease((transport.size - 1) * own_numel, self._own)
        self._by_rank: list[Tensor] = [self._own] * transport.size
        self._works: list[dist.Work] = []
        for position, peer in enumerate(transport.peers()):
            inbox = self._received[position * own_numel : (position + 1) * own_numel]
            self._by_rank[peer] = inbox
            self._works += transport.receive(inbox, peer, tag)
        for peer in transport.peers():
            self._works += transport.send(slices[peer], peer, tag)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        first, second, *rest = self._by_rank
        # Sums run in the first received slice where ``out`` may be a later term of the sum itself.
        total = self._out if self._transport.rank < 2 else first
        torch.add(first, second, out=total)
        for term in rest:
            total.add_(term)
        if total is not self._out:
            self._out.copy_(total)
        self._transport.give_back(self._received)


class _Gather:
    """Own ``shard`` to every peer; slice p of ``slices`` from rank p."""

    def __init__(
        self, transport: DirectTransport, shard: Tensor, slices: list[Tensor], tag: int
    ) -> None:
        self._works: list[dist.Work] = []
        self._shard = shard  # alive until the sends have ended
        for peer in transport.peers():
            self._works += transport.receive(slices[peer], peer, tag)
        for peer in transport.peers():
            self._works += transport.send(shard, peer, tag)
        own = slices[transport.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _AllReduce:
    """In place over ``slices``; the all-gather starts when somebody waits."""

    def __init__(self, transport: DirectTransport, slices: list[Tensor], tag: int) -> None:
        self._transport = transport
        self._slices = slices
        self._tag = tag
        self._sum = _RankOrderedSum(transport, slices, slices[transport.rank], tag)

    def wait(self) -> None:
        self._sum.wait()
        own = self._slices[self._transport.rank]
        _Gather(self._transport, own, self._slices, self._tag).wait()
