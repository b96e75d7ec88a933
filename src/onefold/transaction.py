"""Transaction: everything between two steps, kept or dropped as a whole.

It opens and closes scopes, flushes, and drops; the engine asks it, and it orders the stations of
``grad`` and ``param``, which do not know one another.

At the exit of the outermost window every rank comes to one exchange, at every stage: that is how
the ranks whose body went well learn of one that failed. Only then are reductions added, where
gradients are Shard; where they are Partial they wait for ``step()``.
"""

import logging
from collections.abc import Callable, Set
from typing import NoReturn

from onefold.backward import Backwards
from onefold.budget import Budget
from onefold.errors import StateError, WindowAborted, describe
from onefold.grad.arming import Arming
from onefold.grad.exchange import Agreement, Place, compare_budgets, exchange
from onefold.grad.hooks import ReadyHooks
from onefold.grad.reduce import MAX_IN_FLIGHT, Reducer
from onefold.grad.window import GradWindow, Keeper, NoSync, Scope
from onefold.optim.accumulation import Accumulation
from onefold.param.unshard import Unsharder
from onefold.parts import Parts
from onefold.wire.collectives import Connection
from onefold.wire.ledger import Total

log = logging.getLogger(__name__)


class Transaction:
    """The gradients of one engine between two steps.

    Attributes:
        budget: what scopes may keep.
        keeper: the open scopes.
        reducer: the reductions on the wire.
        last_window: the last outermost window that ended.
        num_full: ``full_parameters()`` blocks that are open.
    """

    def __init__(
        self,
        parts: Parts,
        backwards: Backwards,
        accumulation: Accumulation,
        unsharder: Unsharder,
        divisor: Callable[[], float],
    ) -> None:
        self.budget = Budget(parts.plan, MAX_IN_FLIGHT)
        self.keeper = Keeper()
        self.last_window: GradWindow | None = None
        self.num_full = 0
        self._plan = parts.plan
        self._home = parts.plan.home
        self._units = parts.units
        self._trainable = [unit for unit in parts.units if unit.spec.is_trainable]
        self._connections: tuple[Connection, ...] = (*parts.wires, *parts.exchanges)
        self._ledger = parts.ledger
        self._control = parts.world.control
        self._backwards = backwards
        self._accumulation = accumulation
        self._divisor = divisor
        self._unsharder = unsharder
        self._arena = parts.arena
        self._mark: dict[str, Total] = {}
        self._is_aborted = False
        self._num_exchanged = 0  # outermost backwards before the last exchange
        self.reducer = Reducer(parts.units, parts.arena)
        self._arming = Arming(self._trainable, self.reducer, self._next_is_last)
        self._hooks = ReadyHooks(
            self._trainable, backwards, self.keeper, self.reducer, self._arming
        )
        self._hooks.watch(self._trainable)
        backwards.on_outermost_end.append(self._after_outermost_backward)

    def detach(self) -> None:
        """Take the hooks off the user's parameters."""
        self._hooks.remove()

    # -- scopes --------------------------------------------------------------------------------

    def open(self, scope: Scope) -> None:
        """Open a scope; what it is the first to keep becomes resident, or bound."""
        blocks, units = self.keeper.blocks, self.keeper.units
        everything = self.budget.everything
        keeps_all = units == everything.units and blocks == everything.blocks
        self.keeper.push(scope)
        try:
            if scope.kept.max_bytes is not None and not keeps_all:
                compare_budgets(self._trainable, self._control, scope.kept.max_bytes)
        except BaseException:
            self.keeper.pop(scope)
            raise
        if scope is self.keeper.outermost:
            self._mark = self._ledger.mark()
        if self.keeper.blocks == blocks and self.keeper.units == units:
            return
        try:
            self._unsharder.enter(self.keeper.blocks - blocks)
            self._bind_kept()
        except BaseException as error:  # out of memory on this rank, say: the others must hear
            self.close(scope, error)
            raise

    def _bind_kept(self) -> None:
        """Units that are kept are bound, and nobody watches them unless a backward is armed."""
        for unit in self._trainable:
            if self.keeper.keeps(unit):
                unit.gradients.bind()
        self._watch()

    def _watch(self) -> None:
        self._hooks.watch([unit for unit in self._trainable if not self.keeper.keeps(unit)])
        self.watch_if_armed()

    def watch_if_armed(self) -> None:
        """Watch every unit if the next backward will be armed."""
        if self._arming.expects:
            self._hooks.watch(self._trainable)

    def close(self, scope: Scope, error: BaseException | None) -> None:
        """Close a scope whose body ended, with ``error`` if it raised; see ``GradWindow``."""
        self._backwards.settle()
        if isinstance(scope, GradWindow):
            reason = None if error is None else describe(error)
            scope.failure = scope.failure or reason or self._backwards.failure
            scope.outcome = "kept"
        lost = self._leave(self.keeper.kept_only_by(scope))
        if lost is not None:
            scope.failure = scope.failure or describe(lost)
        units = self.keeper.units
        is_outermost = self.keeper.pop(scope)
        if self.keeper.units != units:
            self._watch()
        if is_outermost:
            if isinstance(scope, NoSync):
                if scope.failure is not None:
                    self._backwards.fail(scope.failure)
            else:
                self._end_window(scope, error or lost)
        if lost is not None and error is None:
            raise lost

    def _leave(self, blocks: Set[int]) -> RuntimeError | None:
        """End a residency; a gather that never arrived must not keep us from the exchange."""
        try:
            self._unsharder.leave(blocks)
        except RuntimeError as error:
            return error
        return None

    def _end_window(self, window: Scope, error: BaseException | None) -> None:
        """Flush or abandon; an ``error`` that is on its way up is not replaced by another."""
        assert isinstance(window, GradWindow)
        self.last_window = window
        try:
            agreement = self._flush(Place.WINDOW_EXIT, window.failure)
            self._report(window)
            if not agreement.failures:
                window.outcome = "flushed" if self._home.shards_gradients else "kept"
                return
            window.outcome = "aborted"
            self._abandon()
        except Exception:
            if error is None:
                raise
            log.exception("while a window was abandoned after %r", error)
            return
        if error is None:
            rank, reason = next(iter(agreement.failures.items()))
            raise WindowAborted(rank, reason, window.backwards)

    def _report(self, window: GradWindow) -> None:
        kept = window.kept
        blocks = [self._plan.blocks[index] for index in kept.blocks]
        full = [self._units[index] for block in blocks for index in block.units]
        window.bytes_held = sum(unit.full_bytes for unit in full if unit.frees_parameters)
        for unit in self._trainable:
            if unit.index in kept.units:
                window.bytes_held += unit.gradients.full_bytes
            elif unit.spec.num_replicas > 1:
                window.bytes_held += unit.gradients.part_bytes
        window.bytes_sent_per_backward = self._plan.bytes_per_backward(window.backwards)
        changes = self._ledger.since(self._mark)
        window.collectives = {kind: total.count for kind, total in changes.items()}
        window.bytes_sent = sum(total.bytes_out for total in changes.values())
        window.exposed_ms = 1e3 * sum(total.waited_s for total in changes.values())

    def _after_outermost_backward(self) -> None:
        self._arming.end()
        window = self.keeper.window
        if window is not None:
            window.backwards += 1
            self.watch_if_armed()

    def _next_is_last(self) -> bool:
        """Whether the outermost backward that begins next is known to be the step's last."""
        if self.keeper.outermost is None:
            if self._home.shards_gradients:
                return False  # reduced as it goes
            is_kth = self._accumulation.is_declared and self._accumulation.is_boundary
            return self._accumulation.is_marked or is_kth
        window = self.keeper.window
        if window is None or not window.kept.arms:
            return False
        is_nth = window.declared_backwards == window.backwards + 1
        return is_nth or self._accumulation.is_marked

    # -- flush ---------------------------------------------------------------------------------

    def reduce(self, place: Place) -> None:
        """Bring every gradient home, divided."""
        self._backwards.settle()
        agreement = self._flush(place, self._backwards.failure)
        if agreement.failures:
            self._refuse_failed(place.call, agreement)
        if self._is_aborted and not agreement.is_touched:
            raise StateError(
                f"{place.call} after an aborted window: its gradients were dropped and no backward "
                "has run since, on any rank. Run the step's backwards again first."
            )
        self._is_aborted = False
        self._unsharder.free_ahead()
        self._arena.settle()
        for unit in self._trainable:
            unit.gradients.divide(self._divisor())

    def _flush(self, place: Place, failure: str | None) -> Agreement:
        """The exchange, then every pending unit's reduction, where this place reduces."""
        try:
            for unit in self._trainable:
                unit.gradients.collect(keeps_graph=self._backwards.keeps_graph)
            self._backwards.keeps_graph = False
            if place is not Place.WINDOW_EXIT:
                for unit in self._units:
                    unit.check_storage()
                    if unit.is_unsharded and unit.was_written():
                        unit.keep_writes()
        except StateError as error:
            failure = failure or str(error)
        self._num_exchanged = self._backwards.num_ended
        agreement = exchange(self._trainable, self.reducer, self._control, place, failure)
        reduces = place is not Place.WINDOW_EXIT or self._home.shards_gradients
        if reduces and not agreement.failures:
            self.reducer.finish_all()
            self.reducer.reduce(agreement.pending)
            for unit in self._trainable:
                unit.gradients.release()
            self._arming.reset()
        return agreement

    def _refuse_failed(self, call: str, agreement: Agreement) -> NoReturn:
        rank, reason = next(iter(agreement.failures.items()))
        raise StateError(
            f"{call}: rank {rank} cannot step ({reason}), so no rank does. If a backward raised, "
            "its gradients are partial sums: call zero_grad() on every rank and run the step again."
        )

    def refuse_inside(self, call: str) -> None:
        """Raise StateError inside a scope, a backward or a ``full_parameters()`` block."""
        if self.num_full:
            raise StateError(f"{call} inside full_parameters(). Leave the with-block first.")
        scope = self.keeper.outermost
        if scope is not None:
            pending = sum(unit.gradients.collect() for unit in self._trainable)
            raise StateError(
                f"{call} inside {scope.call}: gradients of {pending} units are still pending on "
                f"rank {self._control.rank}. Leave the with-block first."
            )
        if self._backwards.is_running:
            raise StateError(f"{call} inside a backward. Call it after the backward has returned.")

    def refuse_unstepped(self, call: str) -> None:
        """Raise StateError where ``refuse_inside`` does, and with gradients since the last step."""
        self.refuse_inside(call)
        self._backwards.settle()
        for unit in self._trainable:
            if unit.gradients.collect() or unit.gradients.has_home:
                raise StateError(
                    f"{call}: rank {self._control.rank} has gradients since the last step, for "
                    f"{unit.name} among others, and a checkpoint holds none. Call step() first, or "
                    "zero_grad()."
                )

    # -- dropping ------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget everything since the last step on this rank; an open window stays doomed."""
        self._backwards.settle()
        # Ranks may have launched different reductions since they last exchanged.
        has_run = self._backwards.num_ended > self._num_exchanged or self._backwards.failure
        in_step = bool(self.keeper.outermost is not None or has_run)
        window = self.keeper.window
        if window is not None:  # a doomed window stays doomed
            window.failure = window.failure or self._backwards.failure
        self._backwards.forgive()
        for unit in self._trainable:
            unit.gradients.drop()
        self._accumulation.drop()
        if in_step:
            self._arming.drop()
        else:
            self._arming.reset()
        self._drop_untrained()
        if self.keeper.units:
            self._bind_kept()

    def _abandon(self) -> None:
        """Drop everything since the last step, on every rank; ``step()`` waits for a backward."""
        self.restart()
        self._is_aborted = True

    def restart(self) -> None:
        """Drop everything since the last step, on every rank, and forget why."""
        self._is_aborted = False
        self.reducer.abandon()
        are_broken = self._control.largest([int(one.is_broken) for one in self._connections])
        for connection, is_broken in zip(self._connections, are_broken, strict=True):
            if is_broken:
                connection.rebuild()
        self._backwards.forgive()
        self.end_step()

    def end_step(self) -> None:
        """The step has consumed the gradients, or all ranks dropped them."""
        for unit in self._trainable:
            unit.gradients.end_step()
        self._unsharder.end_step()
        self._drop_untrained()
        self._accumulation.restart()
        self._arming.reset()
        self._arena.trim()

    def _drop_untrained(self) -> None:
        """A parameter in no param group may still require gradients; nobody will read them."""
        for unit in self._units:
            if not unit.spec.is_trainable:
                for param in unit.params:
                    param.grad = None
