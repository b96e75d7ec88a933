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
from typing import Final, NamedTuple

from torch import Tensor

from onefold.errors import RankMismatchError
from onefold.unit import Unit
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Collectives, Handle

log = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 3
"""Units on the wire at once where a unit's memory is to be freed soon: one arriving, one being
summed, one being sent."""


class Launch(NamedTuple):
    """An entry of the log."""

    unit_index: int
    voids: tuple[int, ...]


@dataclass(slots=True)
class Reduction:
    """One unit's reduction on the wire."""

    unit: Unit
    grad_full: Tensor  # [N], leased; held until the wire is done with it
    summed: Tensor  # [S], leased, or grad_full itself where S = N
    handle: Handle
    voids: Sequence[int]
    """The unit's ``voids`` at launch: what was dropped since is dropped on arrival."""


class Reducer:
    """Starts and finishes the reductions of one engine's units.

    Attributes:
        log: what was launched since the last exchange.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, arena: Arena) -> None:
        self._units = units
        self._collectives = collectives
        self._arena = arena
        self._in_flight: deque[Reduction] = deque()
        self.log: list[Launch] = []

    def launch(self, unit: Unit, voids: Sequence[int] | None = None) -> None:
        """Start reducing what ``unit`` has accumulated; zeros where this rank has nothing.

        Args:
            unit: its gradients are collected.
            voids: what another rank noted at the launch that this one follows.
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
        voids = tuple(unit.gradients.voids if voids is None else voids)
        self._in_flight.append(Reduction(unit, grad_full, summed, handle, voids))
        self.log.append(Launch(unit.index, voids))

    def make_room(self) -> None:
        """Finish the oldest reductions until there is room for one more on the wire."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish_oldest()

    def finish_all(self) -> None:
        """Wait for everything on the wire."""
        while self._in_flight:
            self._finish_oldest()

    def reduce(self, units: Iterable[Unit]) -> None:
        """Launch and finish ``units``, in their order, a few at a time."""
        for unit in units:
            self.make_room()
            self.launch(unit)
        self.finish_all()

    def is_in_flight(self, unit: Unit) -> bool:
        """Whether a reduction of ``unit`` has not arrived yet."""
        return any(reduction.unit is unit for reduction in self._in_flight)

    def abandon(self) -> None:
        """Wait for everything on the wire, as far as it arrives, and drop it."""
        while self._in_flight:
            try:
                self._finish_oldest()
            except RuntimeError as error:
                log.warning("an abandoned reduction never arrived: %s", error)
        self.start_afresh()

    def catch_up(self, logs: Sequence[Sequence[Launch]]) -> None:
        """Launch what other ranks launched and this one did not.

        Args:
            logs: every rank's log since the last exchange.

        Raises:
            RankMismatchError: the logs are not beginnings of one another.
        """
        longest = max(logs, key=len)
        for rank, log in enumerate(logs):
            theirs, expected = (
                [self._units[one.unit_index].name for one in each[: len(log)]]
                for each in (log, longest)
            )
            if theirs != expected:
                raise RankMismatchError(
                    "outside a window every rank must run the same backwards through the same "
                    f"units; rank {rank} reduced {theirs}, another rank {expected}. Put backwards "
                    "that differ between ranks inside coalesce_grad_reduction()."
                )
        for unit_index, voids in longest[len(self.log) :]:
            self.launch(self._units[unit_index], voids)

    def start_afresh(self) -> None:
        """The ranks have exchanged and agree: begin a new log."""
        self.log = []
        for reduction in self._in_flight:
            reduction.unit.gradients.has_home = True

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.handle.wait()
        if reduction.summed is not reduction.grad_full:
            self._arena.give_back(reduction.grad_full)
        reduction.unit.gradients.add_reduced(reduction.summed, reduction.voids)
