"""Cross-memory transport: ranks of one host read each other's buffers where they lie.

One copy per byte instead of a socket's four, and no receive buffers: the owner of a slice adds its
peers' terms chunk by chunk out of their memory, in rank order, so the bits are those of the direct
transport. What is sent are notes: *ready* (here is the buffer) and *done* (I have read it). A
collective has ended when every peer is done, so a buffer is never reused under a reader, and a rank
that reads the memory of one that gave up is never told that it is done.
"""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from onefold.wire.buffer import Arena
from onefold.wire.cross_memory import read
from onefold.wire.transports.base import Work, cut, peers_of, sum_in_rank_order
from onefold.wire.transports.notes import Note
from onefold.wire.transports.progress import Progress, Steps

CHUNK_BYTES: Final = 1 << 20
"""What is read at once of one peer: stays in the processor's cache until it is added."""


class _Phase(IntEnum):
    READY = 1
    SUMMED = 2
    DONE = 3


class CrossMemoryTransport:
    """Reads over ``process_vm_readv``; notes over Unix sockets.

    Args:
        rank: this rank's.
        pids: the process of every rank; each can read every other.
        peers: a socket to every other rank.
        arena: where narrower copies of terms are leased.
        timeout_s: seconds a collective may take.
    """

    name = "cross-memory"

    def __init__(
        self,
        rank: int,
        pids: Sequence[int],
        peers: Mapping[int, socket.socket],
        arena: Arena,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._size = len(pids)
        self._pids = tuple(pids)
        self._peers = peers_of(rank, len(pids))
        self._arena = arena
        self._progress = Progress(peers, timeout_s)
        self._scratch = {  # for what is read of each peer
            peer: torch.empty(CHUNK_BYTES, dtype=torch.uint8) for peer in self._peers
        }

    def reduce_scatter(
        self, source: Tensor, out: Tensor, tag: int, wire_dtype: torch.dtype
    ) -> Work:
        """See ``Transport.reduce_scatter``.

        Memory: none; N elements of ``wire_dtype`` until the wait where the wire is narrower.
        """
        rounded, leased = self._rounded(source, wire_dtype)
        terms = self._offer(rounded, tag)

        def steps() -> Steps:
            addresses = yield _Phase.READY
            self._add_up(addresses, terms, out)
            self._tell(tag, _Phase.DONE)
            yield _Phase.DONE

        return _CrossMemoryWork(self._progress.start(tag, steps()), self._arena, leased)

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """See ``Transport.all_gather``. Slices are read straight into ``out``."""
        slices = list(out.split(shard.numel())) if shard.numel() else [out] * self._size
        for peer in self._peers:
            self._progress.tell(peer, Note(tag, _Phase.READY, shard.data_ptr()))

        def steps() -> Steps:
            own = slices[self._rank]
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
            self._read_slices((yield _Phase.READY), slices)
            self._tell(tag, _Phase.DONE)
            yield _Phase.DONE

        return _CrossMemoryWork(self._progress.start(tag, steps()), self._arena, [])

    def all_reduce(self, buffer: Tensor, tag: int, wire_dtype: torch.dtype) -> Work:
        """See ``Transport.all_reduce``. A rank-ordered reduce-scatter, then an all-gather."""
        rounded, leased = self._rounded(buffer, wire_dtype)
        terms = self._offer(rounded, tag)
        total = cut(buffer, self._size)[self._rank]

        def steps() -> Steps:
            addresses = yield _Phase.READY
            self._add_up(addresses, terms, total)
            own = terms[self._rank]
            if rounded is not buffer:  # the owner, too, takes the rounded sum: all hold the same
                own.copy_(total)
            self._tell(tag, _Phase.SUMMED, own)
            # A peer that has summed has read its term, so its sum may lie there.
            self._read_slices((yield _Phase.SUMMED), terms)
            if rounded is not buffer:
                buffer.copy_(rounded)
            self._tell(tag, _Phase.DONE)
            yield _Phase.DONE

        return _CrossMemoryWork(self._progress.start(tag, steps()), self._arena, leased)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._progress.close()

    def _rounded(self, source: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """``source`` in ``wire_dtype``, and what was leased for that."""
        if source.dtype == wire_dtype:
            return source, []
        rounded = self._arena.lease(source.numel(), wire_dtype).copy_(source)
        return rounded, [rounded]

    def _offer(self, source: Tensor, tag: int) -> list[Tensor]:
        """Tell every peer where its slice of ``source`` lies; the slices."""
        slices = cut(source, self._size)
        for peer in self._peers:
            self._progress.tell(peer, Note(tag, _Phase.READY, slices[peer].data_ptr()))
        return slices

    # -- on the progress thread, one collective at a time ---------------------------------------

    def _add_up(self, addresses: Sequence[int], slices: Sequence[Tensor], out: Tensor) -> None:
        """Sum the own slice and those at the peers' ``addresses`` into ``out``."""
        own = slices[self._rank]
        dtype = own.dtype
        step = CHUNK_BYTES // max(dtype.itemsize, out.dtype.itemsize)
        for begin in range(0, out.numel(), step):
            end = min(begin + step, out.numel())
            chunk = [own[begin:end]] * self._size
            for peer in self._peers:
                chunk[peer] = self._scratch[peer].view(dtype)[: end - begin]
                read(self._pids[peer], addresses[peer] + begin * dtype.itemsize, chunk[peer])
            sum_in_rank_order(chunk, out[begin:end], self._rank)

    def _read_slices(self, addresses: Sequence[int], slices: Sequence[Tensor]) -> None:
        for peer in self._peers:
            read(self._pids[peer], addresses[peer], slices[peer])

    def _tell(self, tag: int, phase: _Phase, buffer: Tensor | None = None) -> None:
        address = 0 if buffer is None else buffer.data_ptr()
        for peer in self._peers:
            self._progress.tell_on_thread(peer, Note(tag, phase, address))


class _CrossMemoryWork:
    def __init__(self, future: "Future[None]", arena: Arena, leased: Sequence[Tensor]) -> None:
        self._future = future
        self._arena = arena
        self._leased = leased

    def is_done(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def wait(self) -> None:
        self._future.result()
        for buffer in self._leased:
            self._arena.give_back(buffer)
