"""Cross-memory transport: ranks of one host read each other's buffers where they lie.

One copy per byte instead of a socket's four, and no receive buffers: the owner of a slice adds its
peers' terms chunk by chunk out of their memory, in rank order, so the bits are those of the direct
transport. What is sent are notes: *ready* (here is the buffer) and *done* (I have read it). A
collective has ended when every peer is done, so a buffer is never reused under a reader, and a rank
that reads the memory of one that gave up is never told that it is done.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import Final, NamedTuple

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
        # A row for what is read of each peer; the own row holds sums wider than their terms.
        self._scratch = torch.empty(self._size, CHUNK_BYTES, dtype=torch.uint8)

    def reduce_scatter(
        self, source: Tensor, out: Tensor, tag: int, wire_dtype: torch.dtype
    ) -> Work:
        """See ``Transport.reduce_scatter``.

        Memory: none; N elements of ``wire_dtype`` until the wait where the wire is narrower.
        """
        slices = list(source.split(out.numel())) if out.numel() else [source] * self._size
        terms, release = self._offer(slices, tag, wire_dtype)

        def steps() -> Steps:
            addresses = yield _Phase.READY
            self._add_up(addresses, terms, out)
            self._tell(tag, _Phase.DONE)
            yield _Phase.DONE

        return _CrossMemoryWork(self._progress.start(tag, steps()), release)

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

        return _CrossMemoryWork(self._progress.start(tag, steps()))

    def all_reduce(self, buffer: Tensor, tag: int, wire_dtype: torch.dtype) -> Work:
        """See ``Transport.all_reduce``. A rank-ordered reduce-scatter, then an all-gather."""
        slices = cut(buffer, self._size)
        terms, release_terms = self._offer(slices, tag, wire_dtype)
        is_narrow = buffer.dtype != wire_dtype
        rounded = self._arena.lease(buffer.numel(), wire_dtype) if is_narrow else buffer
        results = cut(rounded, self._size)

        def steps() -> Steps:
            addresses = yield _Phase.READY
            self._add_up(addresses, terms, slices[self._rank])
            own = results[self._rank]
            if is_narrow:  # the owner, too, takes the rounded sum: all ranks hold the same
                own.copy_(slices[self._rank])
            self._tell(tag, _Phase.SUMMED, own)
            self._read_slices((yield _Phase.SUMMED), results)
            if is_narrow:
                buffer.copy_(rounded)
            self._tell(tag, _Phase.DONE)
            yield _Phase.DONE

        def release() -> None:
            release_terms()
            if is_narrow:
                self._arena.give_back(rounded)

        return _CrossMemoryWork(self._progress.start(tag, steps()), release)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._progress.close()

    def _offer(
        self, slices: Sequence[Tensor], tag: int, wire_dtype: torch.dtype
    ) -> tuple["_Terms", Callable[[], None]]:
        """Tell every peer where its term lies, in ``wire_dtype``; how to end that is returned."""
        own = slices[self._rank]
        leased: list[Tensor] = []
        if own.dtype != wire_dtype:
            numels = [part.numel() for part in slices]
            leased = [self._arena.lease(sum(numels), wire_dtype)]
            narrow = leased[0].split(numels)
            for peer in self._peers:
                narrow[peer].copy_(slices[peer])
            slices = narrow
        for peer in self._peers:
            self._progress.tell(peer, Note(tag, _Phase.READY, slices[peer].data_ptr()))

        def release() -> None:
            for buffer in leased:
                self._arena.give_back(buffer)

        return _Terms(own, wire_dtype), release

    # -- on the progress thread, one collective at a time ---------------------------------------

    def _add_up(self, addresses: Sequence[int], terms: "_Terms", out: Tensor) -> None:
        """Sum the own term and those at the peers' ``addresses`` into ``out``."""
        dtype, own = terms.dtype, terms.own
        step = CHUNK_BYTES // max(dtype.itemsize, out.dtype.itemsize)
        for begin in range(0, out.numel(), step):
            end = min(begin + step, out.numel())
            chunk = [own[begin:end]] * self._size
            for peer in self._peers:
                chunk[peer] = self._scratch[peer].view(dtype)[: end - begin]
                read(self._pids[peer], addresses[peer] + begin * dtype.itemsize, chunk[peer])
            wide = self._scratch[self._rank].view(out.dtype)[: end - begin]
            sum_in_rank_order(chunk, out[begin:end], self._rank, wide)

    def _read_slices(self, addresses: Sequence[int], slices: Sequence[Tensor]) -> None:
        for peer in self._peers:
            read(self._pids[peer], addresses[peer], slices[peer])

    def _tell(self, tag: int, phase: _Phase, buffer: Tensor | None = None) -> None:
        address = 0 if buffer is None else buffer.data_ptr()
        for peer in self._peers:
            self._progress.tell_on_thread(peer, Note(tag, phase, address))


class _Terms(NamedTuple):
    """The terms of one sum: the own one, and the dtype of the peers'."""

    own: Tensor
    dtype: torch.dtype


class _CrossMemoryWork:
    def __init__(self, future: "Future[None]", release: Callable[[], None] | None = None) -> None:
        self._future = future
        self._release = release

    def wait(self) -> None:
        self._future.result()
        if self._release is not None:
            self._release()
