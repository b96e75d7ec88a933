"""Progress: one thread per group that carries started collectives on as their notes arrive.

A collective is a generator: it yields the phase in which it needs a note of every peer, and is
resumed with the addresses in those notes. Whichever collective has its notes goes on, so neither
the order in which ranks start them nor the order in which they wait can block the ranks.
"""

import contextlib
import selectors
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import torch

from onefold.wire.transports.notes import Note, hang_up

Steps = Generator[int, list[int], None]
"""Yields phases; is sent every rank's address (0 for the own) out of that phase's notes."""

_PATIENCE_S: Final = 5.0


@dataclass(slots=True, eq=False)
class _Running:
    """A collective that has not ended, and the kind of note that it waits for."""

    tag: int
    steps: Steps
    future: "Future[None]"
    deadline_s: float
    kind: tuple[int, int] = (0, 0)


class Progress:
    """The thread of one transport. It never keeps the program alive.

    Args:
        peers: a socket to every other rank.
        timeout_s: seconds a collective may take.
    """

    def __init__(self, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._loop = _Loop(peers)
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._loop.run, name="onefold-progress", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._loop.start, None)  # also if nobody closes it

    def tell(self, peer: int, note: Note) -> None:
        """Send ``note``; on the caller's thread, before its collective is started."""
        note.send(self._loop.peers[peer])

    def tell_on_thread(self, peer: int, note: Note) -> None:
        """Send ``note`` from within a collective's steps."""
        self._loop.tell(peer, note)

    def start(self, tag: int, steps: Steps) -> "Future[None]":
        """Carry a collective out.

        Raises:
            RuntimeError: the thread was ended.
        """
        if not self._end.alive:
            raise RuntimeError("a collective was started on a group that was destroyed")
        future: Future[None] = Future()
        deadline_s = time.monotonic() + self._timeout_s
        self._loop.start(_Running(tag, steps, future, deadline_s))
        return future

    def close(self) -> None:
        """End the thread and the connections; what has not ended by now fails."""
        self._end()
        self._thread.join(_PATIENCE_S)


class _Loop:
    """What the thread holds; it does not hold the transport, so that both can end."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self.peers = dict(peers)
        self._started: SimpleQueue[_Running | None] = SimpleQueue()
        self._running: dict[_Running, None] = {}  # in the order of their deadlines
        self._waiting: dict[tuple[int, int], deque[_Running]] = defaultdict(deque)
        self._notes: dict[tuple[int, int], dict[int, deque[int]]] = defaultdict(
            lambda: {peer: deque() for peer in self.peers}
        )
        self._arrived: list[tuple[int, int]] = []
        self._gone: set[int] = set()
        self._bell, self._ringer = socket.socketpair()
        self._ringer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for peer, connection in self.peers.items():
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def start(self, running: _Running | None) -> None:
        """Hand the thread a collective, or None to end it; called on other threads."""
        self._started.put(running)
        with contextlib.suppress(OSError):  # it rings already, or the thread has ended
            self._ringer.send(b"\0")

    @torch.no_grad()
    def run(self) -> None:
        """Take notes and started collectives, and carry on what can go on."""
        try:
            while self._admit():
                self._listen(self._patience_s())
                arrived, self._arrived = self._arrived, []
                for kind in arrived:
                    while self._waiting[kind] and self._is_complete(kind):
                        self._resume(self._waiting[kind].popleft())
                self._fail_late()
        finally:
            self._fail(lambda _running: "its group was destroyed")
            hang_up(self.peers)
            for closed in (self._selector, self._bell, self._ringer):
                closed.close()

    def tell(self, peer: int, note: Note) -> None:
        """Send ``note``, and take those that arrive while there is no room for it."""
        while True:
            try:
                note.send(self.peers[peer], blocks=False)
            except BlockingIOError:
                self._listen(0.001)  # the peer's thread may be in here, too
            else:
                return

    def _admit(self) -> bool:
        """Begin what was started; False to end."""
        while not self._started.empty():
            running = self._started.get()
            if running is None:
                return False
            self._running[running] = None
            self._resume(running)
        return True

    def _listen(self, patience_s: float | None) -> None:
        """Take what arrives within ``patience_s``."""
        for key, _ in self._selector.select(patience_s):
            if key.fileobj is self._bell:
                self._bell.recv(4096)
                continue
            note = Note.receive(self.peers[key.data])
            if note is None:
                self._selector.unregister(key.fileobj)
                self._gone.add(key.data)
                self._fail(self._lost)
            else:
                kind = note.tag, note.phase
                self._notes[kind][key.data].append(note.address)
                self._arrived.append(kind)

    def _is_complete(self, kind: tuple[int, int]) -> bool:
        return all(self._notes[kind].values())

    def _take(self, kind: tuple[int, int]) -> list[int]:
        addresses = [0] * (len(self.peers) + 1)
        for peer, told in self._notes[kind].items():
            addresses[peer] = told.popleft()
        return addresses

    def _resume(self, running: _Running) -> None:
        """Carry ``running``, new or with its notes complete, on as far as it gets."""
        is_new = running.kind == (0, 0)
        try:
            while is_new or self._is_complete(running.kind):
                phase = (
                    next(running.steps) if is_new else running.steps.send(self._take(running.kind))
                )
                running.kind, is_new = (running.tag, phase), False
                if self._waiting[running.kind]:
                    break  # an earlier one with this tag has the first right to the notes
        except StopIteration:
            self._end(running).set_result(None)
        except Exception as error:
            self._end(running).set_exception(error)
        else:
            self._waiting[running.kind].append(running)
            if self._gone:  # perhaps before this one was started
                self._fail(self._lost)

    def _end(self, running: _Running) -> "Future[None]":
        del self._running[running]
        return running.future

    def _patience_s(self) -> float | None:
        if self._arrived:  # while there was no room for a note of ours
            return 0.0
        first = next(iter(self._running), None)
        return None if first is None else max(0.0, first.deadline_s - time.monotonic())

    def _fail_late(self) -> None:
        now_s = time.monotonic()
        if any(running.deadline_s <= now_s for running in list(self._running)[:1]):
            self._fail(lambda one: "no answer in time" if one.deadline_s <= now_s else None)

    def _lost(self, running: _Running) -> str | None:
        told = self._notes[running.kind]
        lost = next((peer for peer in sorted(self._gone) if not told[peer]), None)
        return None if lost is None else f"rank {lost} of it has ended or left"

    def _fail(self, reason_of: Callable[[_Running], str | None]) -> None:
        for running in list(self._running):
            is_waiting = running in self._waiting[running.kind]  # else it runs just now
            reason = reason_of(running) if is_waiting else None
            if reason is not None:
                self._waiting[running.kind].remove(running)
                error = RuntimeError(f"a collective among ranks of this host failed: {reason}")
                self._end(running).set_exception(error)
