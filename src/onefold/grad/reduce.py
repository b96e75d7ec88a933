"""Station 3, reduce. From: ``grad/window`` (a unit that is not kept). To: ``optim/clip``.

``launch`` hands a unit's ``grad_full`` to the wire; ``finish`` adds this rank's slice of the sum to
``grad_shard``. Every launch is written into a log. At an exchange the ranks compare the lengths of
their logs, and a rank that launched less (its body failed, or it ran fewer backwards) follows the
longest log, so that every started collective has all its partners and nothing hangs.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from onefold.errors import RankMismatchError
from onefold.unit import Unit
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Collectives, Handle

log = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 3
"""Units on the wire at once where a unit's memory is to be freed soon: one arriving, one being
summed, one being sent."""


@dataclass(slots=True)
class Reduction:
    """One unit's reduction on the wire."""

    unit: Unit
    grad_full: Tensor  # [N], leased; held until the wire is done with it
    summed: Tensor  # [S], leased, or grad_full itself where S = N
    handle: Handle
    clears: Sequence[int]
    position: int
    """Its place in the log."""
    is_agreed: bool = False
    """The ranks have exchanged since it was launched, so all of them have it."""
    is_void: bool = False
    """Its result is dropped on arrival."""


class Reducer:
    """Starts and finishes the reductions of one engine's units.

    Attributes:
        log: unit indices launched since the last exchange.
        voided: how much of the log this rank has voided by dropping its gradients.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, arena: Arena) -> None:
        self._units = units
        self._collectives = collectives
        self._arena = arena
        self._in_flight: deque[Reduction] = deque()
        self.log: list[int] = []
        self.voided = 0

    def launch(self, unit: Unit) -> None:
        """Start reducing what ``unit`` has accumulated; zeros where this rank has nothing.

        Communication: over ``shard`` one reduce-scatter of N elements, over ``replicate`` one
        all-reduce of S elements; whichever axis has more than one rank.
        Memory: N + S elements until ``finish`` (and the transport's receive buffers).
        Source: ZeRO (arXiv:1910.02054) sec. 5.2; bucketing after DDP (arXiv:2006.15704) sec. 3.2.
        """
        grad_full = unit.gradients.take()
        if unit.layout.num_shards == 1:
            summed = grad_full
            handle = self._collectives.start_all_reduce(summed, unit.index, unit.name)
        else:
            summed = self._arena.lease(unit.layout.shard_numel, grad_full.dtype)
            handle = self._collectives.start_reduce_scatter(
                grad_full, summed, unit.index, unit.name
            )
        clears = tuple(unit.gradients.clears)
        reduction = Reduction(unit, grad_full, summed, handle, clears, len(self.log))
        self._in_flight.append(reduction)
        self.log.append(unit.index)

    def limit_in_flight(self) -> None:
        """Finish the oldest reductions until few enough are on the wire."""
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._finish_oldest()

    def finish_all(self) -> None:
        """Wait for everything on the wire."""
        while self._in_flight:
            self._finish_oldest()

    def reduce(self, units: Iterable[Unit]) -> None:
        """Launch and finish ``units``, in their order, a few at a time."""
        for unit in units:
            self.launch(unit)
            self.limit_in_flight()
        self.finish_all()

    def is_in_flight(self, unit: Unit) -> bool:
        """Whether a reduction of ``unit`` has not arrived yet."""
        return any(reduction.unit is unit for reduction in self._in_flight)

    def abandon(self) -> None:
        """Wait for everything on the wire, as far as it arrives, and drop it."""
        self.void_in_flight()
        while self._in_flight:
            try:
                self._finish_oldest()
            except RuntimeError as error:
                log.warning("an abandoned reduction never arrived: %s", error)
        self.start_afresh()

    def void_in_flight(self) -> None:
        """The gradients were dropped: what is on the wire is dropped on arrival, everywhere."""
        for reduction in self._in_flight:
            reduction.is_void = True
            if reduction.is_agreed:
                reduction.unit.gradients.note_dropped()
        self.voided = len(self.log)

    def catch_up(self, logs: Sequence[Sequence[int]], voided: int) -> None:
        """Launch what other ranks launched and this one did not, and void what any rank voided.

        Args:
            logs: every rank's log since the last exchange.
            voided: the longest voided part of any log.

        Raises:
            RankMismatchError: the logs are not beginnings of one another.
        """
        longest = max(logs, key=len)
        for rank, log in enumerate(logs):
            if list(log) != list(longest[: len(log)]):
                names = [[self._units[index].name for index in each] for each in (log, longest)]
                raise RankMismatchError(
                    "outside a window every rank must run the same backwards through the same "
                    f"units; rank {rank} reduced {names[0]}, another rank {names[1]}. Put "
                    "backwards that differ between ranks inside coalesce_grad_reduction()."
                )
        for index in longest[len(self.log) :]:
            self.launch(self._units[index])
        for reduction in self._in_flight:
            if not reduction.is_agreed and reduction.position < voided:
                reduction.is_void = True

    def start_afresh(self) -> None:
        """The ranks have exchanged and agree: begin a new log."""
        self.log = []
        self.voided = 0
        for reduction in self._in_flight:
            reduction.is_agreed = True

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.handle.wait()
        if reduction.summed is not reduction.grad_full:
            self._arena.give_back(reduction.grad_full)
        if reduction.is_void:
            self._arena.give_back(reduction.summed)
        else:
            reduction.unit.gradients.add_reduced(reduction.summed, reduction.clears)
