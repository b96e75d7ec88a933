"""Station 0, unshard. From: a sharded unit. To: the module's forward and backward.

Outside scopes a unit is gathered before its block's forward and backward and freed after; the next
one is gathered ahead, in the order that was seen last time. Inside a scope every unit is resident:
gathered once at entry, in plan order, and freed at the end.

Where parameters are Replicate all of this is counting, and nothing is sent or freed.
"""

from collections.abc import Sequence

from onefold.plan import Block
from onefold.unit import Unit


class Unsharder:
    """Holds blocks for forwards and backwards, and gathers one ahead.

    Attributes:
        is_resident: every unit is held by a scope.
    """

    def __init__(self, blocks: Sequence[Block], units: Sequence[Unit]) -> None:
        self._blocks = blocks
        self._units = units
        self._block_units = [[units[index] for index in block.units] for block in blocks]
        self._successor: dict[tuple[str, int], int] = {}
        self._last: dict[str, int] = {}
        self._backward_holds: dict[int, dict[int, set[int]]] = {}  # task, block, uses
        self._kept: set[int] = set()
        self._regraphed: set[int] = set()
        self.is_resident = False
        # Registration order: what forward uses first comes first.
        self.gather_order = [unit for block in reversed(self._block_units) for unit in block]
        self._root_units = [
            units[index] for block in blocks if block.is_root for index in block.units
        ]

    # -- a scope's entry and end ------------------------------------------------------------

    def enter(self) -> None:
        """Make every unit resident; only the root block is waited for.

        Communication: one all-gather per sharded unit, in plan order on every rank.
        """
        self.is_resident = True
        for unit in self.gather_order:
            unit.holds += 1
        for unit in self.gather_order:
            unit.start_unshard()
        for unit in self._root_units:
            # A custom method of the model may read these without any module's forward.
            unit.finish_unshard()

    def leave(self) -> None:
        """End the residency: parameters go home, which sends nothing."""
        self.is_resident = False
        failures: list[RuntimeError] = []
        for unit in self.gather_order:
            try:
                unit.release()
            except RuntimeError as error:  # a gather that never arrived; the others go home too
                failures.append(error)
        self._forbid_graphs()
        if failures:
            raise failures[0]

    def _forbid_graphs(self) -> None:
        """Graphs that ``create_graph`` made in the scope end with it; torch refuses their use.

        They are not kept, because inside scopes ranks may run different backwards, and then a
        later gather would have no partner.
        """
        graphs, self._regraphed = self._regraphed - self._kept, set()
        for block in graphs:
            for unit in self._block_units[block]:
                if unit.frees_parameters:
                    unit.publish_version()

    # -- forwards ---------------------------------------------------------------------------

    def hold(self, block: int) -> None:
        """A forward of ``block`` begins."""
        units = self._block_units[block]
        is_first = not any(unit.holds for unit in units)  # else a module around it came before
        for unit in units:
            unit.hold()
        if is_first:
            self._gather_ahead("forward", block)

    def release(self, block: int) -> None:
        """A forward of ``block`` has ended."""
        for unit in self._block_units[block]:
            unit.release()

    def start_pass(self) -> None:
        """An outermost forward begins: what was gathered ahead and not used is freed."""
        self._last.pop("forward", None)
        self._free_unused()

    # -- backwards --------------------------------------------------------------------------

    def hold_for_backward(self, block: int, use: int, task: int) -> None:
        """Backward ``task`` reaches a use of ``block``; the last use to be left releases it."""
        held = self._backward_holds.setdefault(task, {})
        if block in held:
            held[block].add(use)
            return
        if not held:
            self._last.pop("backward", None)
        held[block] = {use}
        for unit in self._block_units[block]:
            unit.hold()
        if not self.is_resident:
            self._gather_ahead("backward", block)

    def release_after_backward(self, block: int, use: int, task: int) -> None:
        """Backward ``task`` has left a use of ``block``."""
        held = self._backward_holds.get(task, {})
        uses = held.get(block, set())
        uses.discard(use)
        if block in held and not uses:
            del held[block]
            self.release(block)

    def end_backward(self, task: int) -> None:
        """Backward ``task`` has ended, well or not."""
        for block in self._backward_holds.pop(task, {}):
            self.release(block)
        if not self._backward_holds:
            self._free_unused()

    def keep(self, block: int) -> None:
        """A backward under ``create_graph`` reaches ``block``: its own graph reads the parameters.

        Nothing of the engine runs before the first node of a backward through that graph, so they
        stay unsharded: inside a scope as long as it is open, outside until the step, which ends
        every graph.
        """
        if self.is_resident:
            self._regraphed.add(block)
        elif block not in self._kept:
            self._kept.add(block)
            for unit in self._block_units[block]:
                unit.hold()

    def end_step(self) -> None:
        """Graphs made before are over; what ``keep`` kept goes home."""
        kept, self._kept = self._kept, set()
        for block in kept:
            self.release(block)

    # -- prefetch ---------------------------------------------------------------------------

    def _gather_ahead(self, direction: str, block: int) -> None:
        previous = self._last.get(direction)
        if previous == block:
            return
        if previous is not None:
            self._successor[direction, previous] = block
        self._last[direction] = block
        following = self._successor.get((direction, block))
        if following is not None:
            for unit in self._block_units[following]:
                unit.start_unshard()

    def _free_unused(self) -> None:
        for unit in self._units:
            if not unit.holds:
                unit.reshard()
