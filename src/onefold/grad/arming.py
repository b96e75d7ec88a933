"""Arming: during the last backward of a step's gradients, units leave as they get ready.

Only an outermost backward is armed. A backward nested in it (a cached loss, a reentrant checkpoint)
turns arming off: its readiness says nothing about the outer one. Armed units leave in plan order,
so that ranks cannot disagree about the order: a unit that is ready early waits for those before it,
and the rest goes with the next flush. If more backwards follow they are kept and flushed.
"""

from collections.abc import Callable, Sequence

from onefold.grad.reduce import Reducer
from onefold.unit import Unit


class Arming:
    """Whether the backward that runs is armed, and which units have left.

    Args:
        units: trainable units in plan order.
        reducer: where they leave to.
        is_last: whether the outermost backward that begins now is known to be the last.
    """

    def __init__(
        self, units: Sequence[Unit], reducer: Reducer, is_last: Callable[[], bool]
    ) -> None:
        self._units = units
        self._reducer = reducer
        self._is_last = is_last
        self._task: int | None = None
        self._is_spent = False
        self._num_left = 0
        self._ready: set[int] = set()

    @property
    def expects(self) -> bool:
        """The next outermost backward will be armed, so somebody must watch its units."""
        return not self._is_spent and self._is_last()

    def begin(self, task: int) -> None:
        """An outermost backward begins."""
        if self.expects:
            self._task = task
            self._is_spent = True

    def watches(self, task: int) -> bool:
        """Whether readiness in backward ``task`` counts; a nested one disarms."""
        if self._task is None:
            return False
        if self._task != task:
            self._task = None
            return False
        return True

    def ready(self, unit: Unit) -> None:
        """``unit`` is complete: it leaves as soon as all before it have left."""
        self._ready.add(unit.index)
        while self._num_left < len(self._units):
            following = self._units[self._num_left]
            if following.index not in self._ready:
                return
            following.gradients.collect()
            self._reducer.free_arrived()
            self._reducer.launch(following)
            self._num_left += 1

    def end(self) -> None:
        """The outermost backward has ended."""
        self._task = None

    def drop(self) -> None:
        """The gradients of a running step were dropped on this rank.

        Nothing leaves before the ranks have exchanged: a launch after the drop must not meet
        another rank's from before it.
        """
        self._task = None
        self._is_spent = True
        self._ready.clear()

    def reset(self) -> None:
        """The gradients were flushed or dropped: another backward may be armed."""
        self._task = None
        self._is_spent = False
        self._num_left = 0
        self._ready.clear()
