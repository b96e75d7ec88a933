"""Station 0, unshard. From: a sharded unit. To: the module's forward and backward.

Outside scopes a unit is gathered before its block's forward and backward and freed after; the next
one is gathered ahead, in the order that was seen last time. Blocks that a scope keeps are resident:
gathered once at entry, in plan order, and freed at the end. The others go as outside.

Where parameters are Replicate all of this is counting, and nothing is sent or freed.
"""

from collections.abc import Callable, Sequence, Set

from onefold.plan import Block
from onefold.unit import Unit


class Unsharder:
    """Holds blocks for forwards and backwards, and gathers one ahead.

    Attributes:
        resident: the blocks that are held by a scope.
        on_leave: called when blocks have ceased to be resident.
    """

    def __init__(self, blocks: Sequence[Block], units: Sequence[Unit]) -> None:
        self._blocks = blocks
        self._block_units = [[units[index] for index in block.units] for block in blocks]
        self._successor: dict[tuple[str, int], int] = {}
        self._last: dict[str, int] = {}
        self._backward_holds: dict[int, dict[int, set[int]]] = {}  # task, block, uses
        self._kept: set[int] = set()
        self._regraphed: set[int] = set()
        self._ahead: int | None = None  # the block that was gathered ahead last
        self.resident: set[int] = set()
        self.on_leave: list[Callable[[], None]] = []
        # Registration order: what forward uses first comes first.
        self.gather_order = [unit for block in reversed(self._block_units) for unit in block]

    # -- a scope's entry and end ------------------------------------------------------------

    def enter(self, entering: Set[int]) -> None:
        """Make blocks resident; only the root block is waited for.

        Communication: one all-gather per sharded unit of theirs, in plan order on every rank.
        """
        self.resident |= entering
        units = self._in_gather_order(entering)
        for unit in units:
            unit.holds += 1
        for unit in units:
            unit.start_unshard()
        for block in entering:
            if self._blocks[block].is_root:
                for unit in self._block_units[block]:
                    # A custom method of the model may read these without any module's forward.
                    unit.finish_unshard()

    def leave(self, leaving: Set[int]) -> None:
        """End the residency of blocks: parameters go home, which sends nothing."""
        self.resident -= leaving
        failures: list[RuntimeError] = []
        for unit in self._in_gather_order(leaving):
            try:
                unit.release()
            except RuntimeError as error:  # a gather that never arrived; the others go home too
                failures.append(error)
        self._forbid_graphs(leaving)
        for call in self.on_leave:
            call()
        if failures:
            raise failures[0]

    def has_everything(self) -> bool:
        """Nothing is to be gathered, or will be freed when a forward ends."""
        return all(
            unit.is_unsharded and (block in self.resident or not unit.frees_parameters)
            for block, units in enumerate(self._block_units)
            for unit in units
        )

    def _in_gather_order(self, blocks: Set[int]) -> list[Unit]:
        return [unit for block in sorted(blocks, reverse=True) for unit in self._block_units[block]]

    def _forbid_graphs(self, leaving: Set[int]) -> None:
        """Graphs that ``create_graph`` made in the scope end with it; torch refuses their use.

        They are not kept, because inside scopes ranks may run different backwards, and then a
        later gather would have no partner.
        """
        graphs = self._regraphed & leaving
        self._regraphed -= leaving
        for block in graphs - self._kept:
            for unit in self._block_units[block]:
                if unit.frees_parameters:
                    unit.publish_version()

    # -- forwards ---------------------------------------------------------------------------

    def hold(self, block: int) -> None:
        """A forward of ``block`` begins."""
        units = self._block_units[block]
        by_scope = int(block in self.resident)
        is_first = all(unit.holds == by_scope for unit in units)  # else a module around it was
        for unit in units:
            unit.hold()
        if is_first:
            self._gather_ahead("forward", block)

    def release(self, block: int) -> None:
        """A forward of ``block`` has ended."""
        for unit in self._block_units[block]:
            unit.release()

    def start_pass(self, blocks: Sequence[int]) -> None:
        """An outermost forward, of ``blocks``, begins: what else was gathered ahead is freed."""
        if len(self.resident) == len(self._blocks):
            return
        self._last.pop("forward", None)
        if self._ahead not in blocks:
            self.free_ahead()

    # -- backwards --------------------------------------------------------------------------

    def hold_for_backward(self, block: int, use: int, task: int) -> None:
        """Backward ``task`` reaches a use of ``block``; the last use to be left releases it.

        A resident block is held by its scope, which no backward that runs in it outlives.
        """
        if block in self.resident:
            for unit in self._block_units[block]:
                unit.finish_unshard()  # this may be its first use in the scope
            return
        held = self._backward_holds.setdefault(task, {})
        if block in held:
            held[block].add(use)
            return
        if not held:
            self._last.pop("backward", None)
        held[block] = {use}
        for unit in self._block_units[block]:
            unit.hold()
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
            self.free_ahead()

    def keep(self, block: int) -> None:
        """A backward under ``create_graph`` reaches ``block``: its own graph reads the parameters.

        Nothing of the engine runs before the first node of a backward through that graph, so they
        stay unsharded: inside a scope as long as it is open, outside until the step, which ends
        every graph.
        """
        if block in self.resident:
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

    def free_ahead(self) -> None:
        """Free what was gathered ahead and nobody holds; it must not outlive a step."""
        ahead, self._ahead = self._ahead, None
        for unit in self._block_units[ahead] if ahead is not None else []:
            unit.reshard()

    def _gather_ahead(self, direction: str, block: int) -> None:
        previous = self._last.get(direction)
        if previous == block or len(self.resident) == len(self._blocks):
            return
        if previous is not None:
            self._successor[direction, previous] = block
        self._last[direction] = block
        following = self._next_to_gather(direction, block)
        if self._ahead not in (block, following):
            self.free_ahead()  # the order was another one this time
        self._ahead = following
        for unit in self._block_units[following] if following is not None else []:
            unit.start_unshard()

    def _next_to_gather(self, direction: str, block: int) -> int | None:
        """The block after ``block`` in the order seen last time that is not resident."""
        following = self._successor.get((direction, block))
        seen = {block}
        while following in self.resident and following not in seen:
            seen.add(following)
            following = self._successor.get((direction, following))
        return None if following in seen else following
