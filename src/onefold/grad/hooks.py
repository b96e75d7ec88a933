"""Station 1, ready. From: autograd. To: ``grad/window``'s question, then ``grad/reduce``.

Two hooks per trainable parameter, attached only where somebody waits for them: of units that no
open scope keeps, and for the armed backward of a window. Of units that are kept nothing runs per
parameter.

The first runs before autograd accumulates and binds the unit's gradients, so that what follows is
accumulated in place. The second runs after, and counts: a unit is complete when the last of its
parameters that require gradients is ready in this backward.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from onefold.backward import Backwards
from onefold.errors import StateError
from onefold.grad.arming import Arming
from onefold.grad.reduce import Reducer
from onefold.grad.window import Keeper
from onefold.unit import Unit


class ReadyHooks:
    """The hooks of one engine's trainable units."""

    def __init__(
        self,
        units: Sequence[Unit],
        backwards: Backwards,
        keeper: Keeper,
        reducer: Reducer,
        arming: Arming,
    ) -> None:
        self._units = units
        self._backwards = backwards
        self._keeper = keeper
        self._reducer = reducer
        self._arming = arming
        self._ready: dict[int, set[int]] = {unit.index: set() for unit in units}
        self._awaited: dict[int, int] = {}
        self._streams = _Streams(units[0].spec.device if units else torch.device("cpu"))
        self._watches: dict[int, list[_Watch]] = {}  # by unit
        backwards.on_begin.append(self._begin)

    def watch(self, units: Iterable[Unit]) -> None:
        """Watch the parameters of ``units``, and no others: their gradients are bound."""
        if self._backwards.wants_scaled:
            units = self._units  # somebody always waits: an unscaled backward must be refused
        wanted = {unit.index: unit for unit in units}
        for index in self._watches.keys() - wanted.keys():
            self._unwatch(index)
        for index in wanted.keys() - self._watches.keys():
            self._watches[index] = self._watched(wanted[index])

    def remove(self) -> None:
        """Take the hooks off the user's parameters."""
        for index in list(self._watches):
            self._unwatch(index)

    def _unwatch(self, index: int) -> None:
        for watch in self._watches.pop(index):
            watch.end()

    def _watched(self, unit: Unit) -> list["_Watch"]:
        return [
            _Watch(param, partial(self._before, unit, index), partial(self._after, unit, index))
            for index, param in enumerate(unit.params)
        ]

    def _begin(self, task: int) -> None:
        for ready in self._ready.values():
            ready.clear()
        self._streams.clear()
        # What the user did to `.grad` since the last backward; later it could not be told from
        # what autograd does in this one.
        for unit in self._units:
            if unit.index in self._watches and unit.gradients.grad_full is not None:
                unit.gradients.collect(keeps_graph=self._backwards.keeps_graph)
        self._arming.begin(task)

    def _before(self, unit: Unit, index: int, _grads: object) -> None:
        self._backwards.check_scaled(unit.slots[index].name)
        if unit.gradients.grad_full is not None:
            return
        self._backwards.observe()
        if unit.frees_parameters and not unit.is_unsharded:
            raise StateError(
                f"parameter {unit.slots[index].name} got a gradient while it was sharded: it was "
                "read outside the forward of its module, where it is NaN. Read it inside a module's"
                " forward, or run forward and backward inside coalesce_grad_reduction() or "
                "full_parameters()."
            )
        unit.gradients.bind()

    def _after(self, unit: Unit, index: int, *_grads: object) -> None:
        task = self._backwards.observe()
        unit.gradients.absorb(index)
        self._streams.note()
        if self._keeper.keeps(unit) or not unit.spec.home.shards_gradients:
            if self._arming.watches(task) and self._completes(unit, index):
                self._streams.join()
                self._arming.ready(unit)
        elif self._completes(unit, index):
            self._ready[unit.index].clear()
            self._streams.join()
            unit.gradients.collect()
            self._reducer.make_room(unit)
            self._reducer.launch(unit, crosses=self._keeper.crosses(unit))

    def _completes(self, unit: Unit, index: int) -> bool:
        ready = self._ready[unit.index]
        if not ready:
            self._awaited[unit.index] = sum(param.requires_grad for param in unit.params)
        ready.add(index)
        return len(ready) >= self._awaited[unit.index]


class _Streams:
    """The streams on which a backward accumulates gradients.

    Autograd joins them with the caller's when the backward ends. What reads a unit earlier, on the
    stream of whichever parameter came last, has to wait for the others by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """A gradient was accumulated on the current stream."""
        if self._device.type == "cuda":
            self._seen.add(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Let the current stream wait for all of them."""
        for stream in self._seen:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def clear(self) -> None:
        """Another backward begins."""
        self._seen.clear()


class _Watch:
    """Hooks around the node that accumulates into one parameter, while this object lives.

    torch makes the node anew when nobody holds it, so no trace of the hooks is left. Hooks of the
    parameter itself would leave one: for a tensor that once had hooks torch calls into Python for
    ever, which made every backward in a window 9% slower for a model of 800 small parameters.
    """

    def __init__(
        self,
        param: nn.Parameter,
        before: Callable[..., None],
        after: Callable[..., None],
    ) -> None:
        requires_grad = param.requires_grad
        param.requires_grad_(True)  # it may be frozen just now
        self._node = torch.autograd.graph.get_gradient_edge(param).node
        param.requires_grad_(requires_grad)
        self._handles = [self._node.register_prehook(before), self._node.register_hook(after)]

    def end(self) -> None:
        """Take the hooks off; a graph may hold the node."""
        for handle in self._handles:
            handle.remove()
