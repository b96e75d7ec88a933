"""Ledger: what crossed the wire, counted where it crosses.

Totals are kept for the engine's whole life; single entries are kept in a ring, so nothing grows
with the number of steps.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

RING_ENTRIES: Final = 8192


@dataclass(slots=True)
class Entry:
    """One collective as this rank saw it; times are ``time.perf_counter`` seconds."""

    kind: str
    """``reduce_scatter``, ``all_gather``, ``all_reduce``, ``all_to_all`` or ``broadcast``."""
    unit: str
    bytes_out: int
    bytes_in: int
    started_s: float
    finished_s: float | None = None
    waited_s: float = 0.0
    """Exposed time: how long somebody stood still for it."""


@dataclass(slots=True)
class Total:
    """The sum of the entries of one kind."""

    count: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    waited_s: float = 0.0

    def __sub__(self, other: "Total") -> "Total":
        return Total(
            self.count - other.count,
            self.bytes_out - other.bytes_out,
            self.bytes_in - other.bytes_in,
            self.waited_s - other.waited_s,
        )


@dataclass(slots=True)
class Ledger:
    """Counts every data collective of one engine that has somebody to talk to.

    A collective on a group of one rank sends nothing and is not entered.
    """

    totals: dict[str, Total] = field(default_factory=dict)
    recent: deque[Entry] = field(default_factory=lambda: deque(maxlen=RING_ENTRIES))

    def open(self, kind: str, unit: str, bytes_out: int, bytes_in: int) -> Entry:
        """Enter a collective that starts now."""
        entry = Entry(kind, unit, bytes_out, bytes_in, time.perf_counter())
        self.recent.append(entry)
        total = self.totals.setdefault(kind, Total())
        total.count += 1
        total.bytes_out += bytes_out
        total.bytes_in += bytes_in
        return entry

    def close(self, entry: Entry, waited_s: float) -> None:
        """Note that ``entry`` has finished and how long somebody waited for it."""
        entry.finished_s = time.perf_counter()
        entry.waited_s = waited_s
        self.totals[entry.kind].waited_s += waited_s

    def mark(self) -> dict[str, Total]:
        """A copy of the totals, to be given to ``since`` later."""
        return {kind: total - Total() for kind, total in self.totals.items()}

    def since(self, mark: dict[str, Total]) -> dict[str, Total]:
        """Totals since ``mark``, without the kinds that saw nothing."""
        changes = {kind: total - mark.get(kind, Total()) for kind, total in self.totals.items()}
        return {kind: change for kind, change in changes.items() if change.count}
