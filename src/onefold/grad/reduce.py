"""Station 3, reduce. From: ``grad/window`` (a unit that is not kept). To: ``optim/clip``.

``launch`` hands a unit's ``grad_full`` to the wire; ``finish`` adds this rank's slice of the sum to
``grad_shard``. On a mesh of two axes that is a reduce-scatter over ``shard`` and, when its sum is
there, an all-reduce over ``replicate``, which a scope may defer: then the sum over ``shard`` is
added to ``grad_part`` and crosses with the flush.

Every launch is written into a log. At an exchange the ranks compare the lengths of their logs, and
a rank that launched less (its body failed, or it ran fewer backwards) follows the longest log, so
that every started collective has all its partners and nothing hangs.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from torch import Tensor

from onefold.errors import RankMismatchError
from onefold.unit import Unit
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Handle

log = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 3
"""Units on the wire at once where a unit's memory is to be freed soon: one arriving, one being
summed, one being sent."""


class Launch(NamedTuple):
    """An entry of the log."""

    unit_index: int
    crosses: bool
    """Summed over the replicate axis, too."""
    voids: tuple[int, ...]


@dataclass(slots=True)
class Reduction:
    """One unit's reduction on the wire."""

    unit: Unit
    grad_full: Tensor | None  # [N], leased; held until the wire is done with it; None from then on
    summed: Tensor  # [S], leased, or grad_full itself where S = N
    handle: Handle
    crosses: bool
    voids: Sequence[int]
    """The unit's ``voids`` at launch: what was dropped since is dropped on arrival."""
    is_crossing: bool = False

    def cross(self) -> None:
        """When the sum over the shard axis is there, start the one over the replicate axis."""
        has_peers = self.unit.spec.num_replicas > 1  # else nobody waits for the sum before its turn
        if self.crosses and has_peers and not self.is_crossing:
            self.is_crossing = True
            self.handle.wait()
            spec = self.unit.spec
            self.handle = self.unit.wire.start_all_reduce(
                self.summed, spec.index, spec.name, spec.wire_dtype
            )


class Reducer:
    """Starts and finishes the reductions of one engine's units.

    Attributes:
        log: what was launched since the last exchange.
    """

    def __init__(self, units: Sequence[Unit], arena: Arena) -> None:
        self._units = units
        self._arena = arena
        self._in_flight: deque[Reduction] = deque()
        self._num_arrived = 0  # of the oldest in flight, as far as somebody has looked
        self.log: list[Launch] = []

    def launch(
        self,
        unit: Unit,
        *,
        crosses: bool = True,
        voids: Sequence[int] | None = None,
        is_empty: bool = False,
    ) -> None:
        """Start reducing what ``unit`` has accumulated; zeros where this rank has nothing.

        Args:
            unit: its gradients are collected.
            crosses: sum over the replicate axis now, too; else when ``reduce`` is called.
            voids: what another rank noted at the launch that this one follows.
            is_empty: send zeros, and keep what is pending.
        Communication: over ``shard`` one reduce-scatter of N elements, over ``replicate`` one
            all-reduce of S elements; only over axes of more than one rank.
        Memory: N + S elements until ``finish`` (and the transport's receive buffers).
        Source: ZeRO (arXiv:1910.02054) sec. 5.2; bucketing after DDP (arXiv:2006.15704) sec. 3.2;
            two axes after FSDP (arXiv:2304.11277) sec. 3.2.2.
        """
        spec, gradients = unit.spec, unit.gradients
        grad_full = gradients.nothing() if is_empty else gradients.take()
        voids = tuple(gradients.voids if voids is None else voids)
        self.log.append(Launch(unit.index, crosses, voids))
        if unit.layout.num_shards == 1 and grad_full.dtype == gradients.shard_dtype:
            reduction = Reduction(unit, None, grad_full, Handle(unit.wire), crosses, voids)
        else:
            summed = self._arena.lease(unit.layout.shard_numel, gradients.shard_dtype)
            handle = unit.wire.start_reduce_scatter(
                grad_full, summed, unit.index, unit.name, spec.wire_dtype
            )
            reduction = Reduction(unit, grad_full, summed, handle, crosses, voids)
        if unit.layout.num_shards == 1:
            reduction.cross()
        self._in_flight.append(reduction)

    def free_arrived(self) -> None:
        """Give the full gradients of the oldest reductions back, as far as they have arrived.

        Waits for nothing. Their sums stay where they are until ``finish_all``, which is called when
        the ranks have exchanged.
        """
        for reduction in islice(self._in_flight, self._num_arrived, None):
            if not reduction.handle.is_done():
                return
            self._arrive(reduction)
            self._num_arrived += 1

    def make_room(self, unit: Unit) -> None:
        """Finish the oldest reductions until there is room for ``unit``, which goes once at a time.

        Memory: of no unit two full gradients are on the wire.
        """
        while len(self._in_flight) >= MAX_IN_FLIGHT or self.is_in_flight(unit):
            self._finish_oldest()

    def finish_all(self) -> None:
        """Wait for everything on the wire."""
        while self._in_flight:
            self._finish_oldest()

    def reduce(self, units: Iterable[Unit]) -> None:
        """Launch and finish ``units``, in their order, a few at a time; then what was deferred.

        Everything that was launched before has arrived.
        """
        for unit in units:
            self.make_room(unit)
            # Where something waits to cross already, this goes along with it.
            self.launch(unit, crosses=unit.gradients.grad_part is None)
        self.finish_all()
        for unit in self._units:
            part = unit.gradients.take_part()
            if part is not None:
                self.make_room(unit)
                voids = tuple(unit.gradients.voids)
                deferred = Reduction(unit, None, part, Handle(unit.wire), True, voids)
                deferred.cross()
                self._in_flight.append(deferred)
        self.finish_all()

    def is_in_flight(self, unit: Unit) -> bool:
        """Whether a reduction of ``unit`` has not arrived yet."""
        return any(reduction.unit is unit for reduction in self._in_flight)

    def abandon(self) -> None:
        """Wait for everything on the wire, as far as it arrives, and drop it."""
        while self._in_flight:
            reduction = self._in_flight.popleft()
            try:
                reduction.cross()  # another rank may have crossed already, and waits
                self._land(reduction)
            except RuntimeError as error:
                log.warning("an abandoned reduction never arrived: %s", error)
        self.start_afresh()

    def catch_up(
        self, logs: Sequence[Sequence[Launch]], all_voids: Mapping[int, Sequence[int]]
    ) -> None:
        """Launch what other ranks launched and this one did not.

        Args:
            logs: every rank's log since the last exchange.
            all_voids: what the ranks agreed on about drops, by unit.

        Raises:
            RankMismatchError: the logs are not beginnings of one another.
        """
        longest = max(logs, key=len)
        for rank, log in enumerate(logs):
            if [one[:2] for one in log] != [one[:2] for one in longest[: len(log)]]:
                theirs, expected = (
                    [self._units[one.unit_index].name for one in each] for each in (log, longest)
                )
                raise RankMismatchError(
                    "outside a window every rank must run the same backwards through the same "
                    f"units; rank {rank} reduced {theirs}, another rank {expected}. Put backwards "
                    "that differ between ranks inside coalesce_grad_reduction()."
                )
        for unit_index, crosses, voids in longest[len(self.log) :]:
            unit = self._units[unit_index]
            # Somebody has dropped what it launched: what is pending here came after the drop.
            is_void = tuple(all_voids[unit_index]) != tuple(voids)
            self.launch(unit, crosses=crosses, voids=voids, is_empty=is_void)

    def start_afresh(self) -> None:
        """The ranks have exchanged and agree: begin a new log."""
        self.log = []
        self._num_arrived = 0
        for reduction in self._in_flight:
            reduction.unit.gradients.has_home = True

    def _finish_oldest(self) -> None:
        for reduction in list(self._in_flight)[:2]:  # the next one crosses while this one arrives
            reduction.cross()
        self._land(self._in_flight.popleft())

    def _arrive(self, reduction: Reduction) -> None:
        reduction.handle.wait()
        if reduction.grad_full is not None:
            self._arena.give_back(reduction.grad_full)
            reduction.grad_full = None

    def _land(self, reduction: Reduction) -> None:
        self._arrive(reduction)
        gradients = reduction.unit.gradients
        add = gradients.add_reduced if reduction.crosses else gradients.add_part
        add(reduction.summed, reduction.voids)
