"""Cross-memory transport: ranks of one host read each other's buffers where they lie.

One copy per byte instead of a socket's four, and no receive buffers: the owner of a slice adds its
peers' terms chunk by chunk out of their memory, in rank order, so the bits are those of the direct
transport. What travels as messages are notes of eight bytes: *ready* (here is the buffer) and
*done* (I have read it). A collective has ended when every peer is done, so a buffer is never reused
under a reader, and a rank that reads the memory of one that gave up is never told that it is done.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from onefold.wire.cross_memory import read
from onefold.wire.transports.base import Work, sum_in_rank_order
from onefold.wire.transports.direct import DirectTransport
from onefold.wire.transports.progress import Progress

CHUNK_BYTES: Final = 1 << 20
"""What is read at once of one peer: stays in the processor's cache until it is added."""


class _Phase(IntEnum):
    READY = 0
    SUMMED = 1
    DONE = 2


class CrossMemoryTransport:
    """Reads over ``process_vm_readv``, notes over a gloo group.

    Args:
        notes: the transport that carries notes, and owns the arena.
        pids: the process of every rank; each can read every other.
    """

    name = "cross-memory"

    def __init__(self, notes: DirectTransport, pids: Sequence[int]) -> None:
        self.notes = notes
        self.pids = tuple(pids)
        self._progress = Progress()
        # A row for what is read of each peer; the own row holds sums wider than their terms.
        self._scratch = torch.empty(notes.size, CHUNK_BYTES, dtype=torch.uint8)

    def reduce_scatter(
        self, source: Tensor, out: Tensor, tag: int, wire_dtype: torch.dtype
    ) -> Work:
        """See ``Transport.reduce_scatter``.

        Memory: none; N elements of ``wire_dtype`` until the wait where the wire is narrower.
        """
        slices = list(source.split(out.numel())) if out.numel() else [source] * self.notes.size
        terms = _Terms(self, slices, out, tag, wire_dtype)

        def carry_out() -> None:
            terms.add_up()
            terms.end()

        return _CrossMemoryWork(self._progress.start(carry_out), terms.release)

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.all_gather``. Slices are read straight into ``out``."""
        slices = list(out.split(shard.numel())) if shard.numel() else [out] * self.notes.size
        ready, done = (_Notes(self.notes, tag, phase) for phase in (_Phase.READY, _Phase.DONE))
        ready.send([shard] * self.notes.size)

        def carry_out() -> None:
            own = slices[self.notes.rank]
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
            self._read_slices(ready.wait(), slices)
            done.exchange()

        return _CrossMemoryWork(self._progress.start(carry_out))

    def all_reduce(self, buffer: Tensor, tag: int, wire_dtype: torch.dtype) -> Work:
        """See ``Transport.all_reduce``. A rank-ordered reduce-scatter, then an all-gather."""
        rank, arena = self.notes.rank, self.notes.arena
        slices = self.notes.cut(buffer)
        terms = _Terms(self, slices, slices[rank], tag, wire_dtype)
        summed = _Notes(self.notes, tag, _Phase.SUMMED)
        is_narrow = buffer.dtype != wire_dtype
        rounded = arena.lease(buffer.numel(), wire_dtype) if is_narrow else buffer
        results = self.notes.cut(rounded)

        def carry_out() -> None:
            terms.add_up()
            if is_narrow:  # the owner, too, takes the rounded sum: all ranks hold the same
                results[rank].copy_(slices[rank])
            summed.send([results[rank]] * self.notes.size)
            self._read_slices(summed.wait(), results)
            if is_narrow:
                buffer.copy_(rounded)
            terms.end()

        def release() -> None:
            terms.release()
            if is_narrow:
                arena.give_back(rounded)

        return _CrossMemoryWork(self._progress.start(carry_out), release)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._progress.close()

    def add_up(
        self, addresses: Sequence[int], own: Tensor, out: Tensor, dtype: torch.dtype
    ) -> None:
        """Sum ``own`` and what lies at the peers' ``addresses`` in ``dtype`` into ``out``.

        Runs on the progress thread, alone with the scratch.
        """
        step = CHUNK_BYTES // max(dtype.itemsize, out.dtype.itemsize)
        for begin in range(0, out.numel(), step):
            end = min(begin + step, out.numel())
            terms = [own[begin:end]] * self.notes.size
            for peer in self.notes.peers():
                terms[peer] = self._scratch[peer].view(dtype)[: end - begin]
                read(self.pids[peer], addresses[peer] + begin * dtype.itemsize, terms[peer])
            wide = self._scratch[self.notes.rank].view(out.dtype)[: end - begin]
            sum_in_rank_order(terms, out[begin:end], self.notes.rank, wide)

    def _read_slices(self, addresses: Sequence[int], slices: Sequence[Tensor]) -> None:
        for peer in self.notes.peers():
            read(self.pids[peer], addresses[peer], slices[peer])


class _Notes:
    """One note of eight bytes from and to every peer."""

    def __init__(self, transport: DirectTransport, tag: int, phase: _Phase) -> None:
        self._transport = transport
        self._tag = tag * len(_Phase) + phase
        self._received = torch.zeros(transport.size, dtype=torch.int64)
        self._sent = torch.zeros(transport.size, dtype=torch.int64)
        self._works = [
            work
            for peer in transport.peers()
            for work in transport.receive(self._received[peer : peer + 1], peer, self._tag)
        ]

    def send(self, buffers: Sequence[Tensor]) -> None:
        """Tell peer p where ``buffers[p]`` is."""
        self._sent = torch.tensor([buffer.data_ptr() for buffer in buffers])
        self._post()

    def wait(self) -> list[int]:
        """The addresses that the peers have told; also waits until the own notes have left."""
        for work in self._works:
            work.wait()
        return self._received.tolist()

    def exchange(self) -> None:
        """Tell every peer, and wait to be told by all of them."""
        self._post()
        self.wait()

    def _post(self) -> None:
        for peer in self._transport.peers():
            note = self._sent[peer : peer + 1]
            self._works += self._transport.send(note, peer, self._tag)


class _Terms:
    """Slice p of ``slices`` is for rank p; this rank's terms are summed into ``out``."""

    def __init__(
        self,
        transport: CrossMemoryTransport,
        slices: Sequence[Tensor],
        out: Tensor,
        tag: int,
        wire_dtype: torch.dtype,
    ) -> None:
        notes = transport.notes
        self._transport = transport
        self._own = slices[notes.rank]
        self._out = out
        self._wire_dtype = wire_dtype
        self._ready, self._done = (
            _Notes(notes, tag, phase) for phase in (_Phase.READY, _Phase.DONE)
        )
        self._arena = notes.arena
        self._narrow: Tensor | None = None
        if self._own.dtype != wire_dtype:
            numels = [part.numel() for part in slices]
            self._narrow = self._arena.lease(sum(numels), wire_dtype)
            narrow = self._narrow.split(numels)
            for peer in notes.peers():
                narrow[peer].copy_(slices[peer])
            slices = narrow
        self._ready.send(slices)

    def add_up(self) -> None:
        """Sum when every peer is ready; on the progress thread."""
        addresses = self._ready.wait()
        self._transport.add_up(addresses, self._own, self._out, self._wire_dtype)

    def end(self) -> None:
        """Return when every peer has read its slice; on the progress thread."""
        self._done.exchange()

    def release(self) -> None:
        """Give leases back; on the thread that leased them."""
        if self._narrow is not None:
            self._arena.give_back(self._narrow)


class _CrossMemoryWork:
    def __init__(self, future: "Future[None]", release: Callable[[], None] | None = None) -> None:
        self._future = future
        self._release = release

    def wait(self) -> None:
        self._future.result()
        if self._release is not None:
            self._release()
