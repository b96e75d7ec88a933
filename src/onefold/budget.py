"""Budget: what a scope keeps, decided from the plan alone, so that every rank decides the same.

A scope keeps the gradients of some units (they stay Partial) and the parameters of some blocks
(they stay unsharded); the rest goes as outside of scopes. ``max_bytes`` picks a rung of a ladder
that leads from as little as possible to everything. First comes the root block, which is in use
through a whole pass and so costs nothing to keep; then parameters, block by block in plan order,
because each byte of them saves two volumes per backward; then gradients, which save one.

[Note: what is counted] All that a rank holds above what it holds between steps, in the memory of
the device: what is kept, and what passes through. That is, of parameters that are not kept, three
blocks: a backward holds a block before it leaves the one after it, and one more is gathered ahead.
Of gradients that are not kept, two blocks that are being filled, and the units on the wire; of all
units the sums, and what transports receive, on the wire; and the shards, as they come home. So it
is a bound for models whose blocks follow one another, in which a backward that reaches a block
reaches all of its parameters. Others hold more, as they do outside of windows.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Final, Literal, NamedTuple

from onefold.plan import Plan
from onefold.unit import UnitSpec

log = logging.getLogger(__name__)

BLOCKS_PASSING: Final = 3
"""Blocks unsharded at once: the one in use, the one that is left and the one gathered ahead."""
BLOCKS_FILLING: Final = 2
"""Blocks with incomplete gradients at once: buckets and operations do not end together."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a scope keeps; data, decided when the scope is made."""

    blocks: frozenset[int]
    """Blocks whose parameters stay unsharded."""
    units: frozenset[int]
    """Units whose gradients stay Partial on the shard axis."""
    arms: bool
    """The last backward may be armed."""
    max_bytes: int | None = None
    """What it was decided for, if there is a limit."""


class Rung(NamedTuple):
    """One step of the ladder."""

    kept: Kept
    num_bytes: int
    """The peak while it is kept."""


class Budget:
    """The ladder of one plan.

    Args:
        plan: blocks and units.
        max_in_flight: units on the wire at once where a backward reduces as it goes.

    Attributes:
        everything: what ``no_sync()`` and a window without limits keep.
    """

    def __init__(self, plan: Plan, max_in_flight: int) -> None:
        self._plan = plan
        self._max_in_flight = max_in_flight
        self._trainable = [unit for unit in plan.units if unit.is_trainable]
        self.everything = Kept(
            frozenset(range(len(plan.blocks))),
            frozenset(unit.index for unit in self._trainable),
            arms=True,
        )
        self._decided: dict[int, Kept] = {}

    def of_window(
        self, backwards: int | None, across: Literal["replicate"] | None, max_bytes: int | None
    ) -> Kept:
        """What ``coalesce_grad_reduction`` with these arguments keeps.

        Raises:
            ValueError: see ``Engine.coalesce_grad_reduction``.
        """
        if across is None:
            return self.everything if max_bytes is None else self._within(max_bytes)
        if across != "replicate":
            raise ValueError(
                f"coalesce_grad_reduction(across=): expected 'replicate' or None, got {across!r}. "
                "Leave it out to defer the whole reduction."
            )
        if backwards is not None or max_bytes is not None:
            raise ValueError(
                "coalesce_grad_reduction(across='replicate') with backwards= or max_bytes=: with "
                "across= every backward reduces over the shard axis as it goes, so there is "
                "nothing to arm, and nothing full is kept. Leave one of the two out."
            )
        plan = self._plan
        if plan.home.shards_gradients and plan.num_replicas == 1 and plan.num_shards > 1:
            raise ValueError(
                "coalesce_grad_reduction(across='replicate'): expected a mesh with a 'replicate' "
                f"axis, got all {plan.num_shards} ranks on the shard axis, where this would defer "
                "nothing. Pass initialize(mesh=) with the axes 'replicate' and 'shard', or leave "
                "across out."
            )
        return Kept(frozenset(), frozenset(), arms=True)

    def ladder(self) -> list[Rung]:
        """From as little as possible to everything; a rung may cost more than the next."""
        blocks = self._plan.blocks
        order = sorted(range(len(blocks)), key=lambda index: not blocks[index].is_root)
        roots = {index for index in order if blocks[index].is_root}
        kept_blocks = set(roots if self._plan.home.shards_parameters else order)
        kept_units = {unit for root in roots for unit in blocks[root].units}
        kept_units &= self.everything.units
        rungs = [self._rung(kept_blocks, kept_units)]
        for index in order:
            if index not in kept_blocks:
                kept_blocks.add(index)
                rungs.append(self._rung(kept_blocks, kept_units))
        for unit in self._trainable:
            if unit.index not in kept_units:
                kept_units.add(unit.index)
                rungs.append(self._rung(kept_blocks, kept_units))
        return rungs

    def _within(self, max_bytes: int) -> Kept:
        """The highest rung that stays within ``max_bytes``."""
        if not self._plan.home.shards_gradients:
            return self.everything  # full gradients and parameters are at home
        if max_bytes not in self._decided:
            rungs = self.ladder()
            fitting = [rung for rung in rungs if rung.num_bytes <= max_bytes]
            if not fitting:
                least = min(rung.num_bytes for rung in rungs)
                raise ValueError(
                    f"coalesce_grad_reduction(max_bytes=): expected at least {least} bytes, which "
                    f"is what this model passes through on its way if hardly anything is kept, got "
                    f"{max_bytes}. Raise it (everything takes {rungs[-1].num_bytes}), cut the "
                    "model into smaller blocks or buckets, or shard it over more ranks."
                )
            kept = fitting[-1].kept
            arms = kept.units == self.everything.units and self._armed_bytes() <= max_bytes
            self._decided[max_bytes] = kept = replace(kept, arms=arms, max_bytes=max_bytes)
            log.info(
                "max_bytes=%d keeps the parameters of %d of %d blocks and the gradients of %d of "
                "%d units; the last backward %s be armed",
                max_bytes,
                len(kept.blocks),
                len(self.everything.blocks),
                len(kept.units),
                len(self.everything.units),
                "may" if arms else "cannot",
            )
        return self._decided[max_bytes]

    def _rung(self, blocks: Iterable[int], units: Iterable[int]) -> Rung:
        kept = Kept(frozenset(blocks), frozenset(units), arms=False)
        return Rung(kept, self._bytes(kept))

    def _bytes(self, kept: Kept) -> int:
        """The most that is held at once; see the note."""
        dropped = [unit for unit in self._trainable if unit.index not in kept.units]
        total = sum(_full_bytes(unit) for unit in self._trainable if unit.index in kept.units)
        total += sum(nlargest(BLOCKS_FILLING, self._filled(kept)))
        total += sum(nlargest(self._max_in_flight, map(_full_bytes, dropped)))
        total += sum(nlargest(self._max_in_flight, map(_wire_bytes, self._trainable)))
        total += sum(_shard_bytes(u) for u in dropped if u.num_replicas > 1)  # until they cross
        total += sum(_shard_bytes(u) for u in self._trainable if not u.offloads_optimizer)
        if self._plan.home.shards_parameters:
            sizes = [self._param_bytes(index) for index in range(len(self._plan.blocks))]
            total += sum(sizes[index] for index in kept.blocks)
            passing = [size for index, size in enumerate(sizes) if index not in kept.blocks]
            total += sum(nlargest(BLOCKS_PASSING, passing))
        return total

    def _armed_bytes(self) -> int:
        """The same of everything, with all units on the wire at the end of an armed backward."""
        all_on_wire = sum(map(_wire_bytes, self._trainable))
        counted = sum(nlargest(self._max_in_flight, map(_wire_bytes, self._trainable)))
        return self._bytes(self.everything) + all_on_wire - counted

    def _param_bytes(self, block: int) -> int:
        units = (self._plan.units[index] for index in self._plan.blocks[block].units)
        return sum(unit.layout.numel * unit.dtype.itemsize for unit in units)

    def _filled(self, kept: Kept) -> list[int]:
        """Per block the bytes of its full gradients that are not kept."""
        dropped = self.everything.units - kept.units
        return [
            sum(_full_bytes(self._plan.units[index]) for index in block.units if index in dropped)
            for block in self._plan.blocks
        ]


def _full_bytes(unit: UnitSpec) -> int:
    """Of ``grad_full``."""
    return unit.layout.numel * unit.accumulation_dtype.itemsize


def _shard_bytes(unit: UnitSpec) -> int:
    """Of ``grad_shard``, and of a sum on its way there."""
    return unit.layout.shard_numel * unit.master_dtype.itemsize


def _wire_bytes(unit: UnitSpec) -> int:
    """Of a reduction on the wire, beside ``grad_full``, whatever the transport."""
    shard, wire, sum_ = unit.layout.shard_numel, unit.wire_dtype.itemsize, _shard_bytes(unit)
    if unit.accumulation_dtype == unit.wire_dtype == unit.master_dtype:
        received = shard * wire * (unit.layout.num_shards - 1)
        crossing = shard * wire
    else:  # what is sent is a copy, too, and so is the sum
        received = 2 * shard * wire * unit.layout.num_shards + sum_
        crossing = 3 * shard * wire + 2 * sum_
    return sum_ + max(received, crossing if unit.num_replicas > 1 else 0)
