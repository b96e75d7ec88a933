"""Backwards: which ones run now, how many have ended, and whether one was cut short.

Autograd numbers its backwards (graph tasks) and calls back when one ends, but only code that runs
inside a backward can ask. So every hook of the engine that does run inside one calls ``observe``.
A backward that raised never calls back: it is found open once nothing runs any more. That makes its
partial sums known, and it is all that is decided here; no gradient depends on where a backward
ends.

Source: graph tasks and final callbacks are those of ``torch.autograd``'s engine
(``_current_graph_task_id``, ``queue_callback``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.utils.hooks import RemovableHandle

from onefold.errors import StateError, describe

NOT_RUNNING = -1


def current_task() -> int:
    """The number of the backward that this thread is inside of, or -1."""
    task: int = torch._C._current_graph_task_id()
    return task


class Backwards:
    """The backwards of one engine.

    Args:
        wants_scaled: an outermost backward must begin with a scaled loss (fp16).

    Attributes:
        num_ended: outermost backwards that ended well, since construction.
        outermost: the outermost backward that runs now, once something in it was observed.
        keeps_graph: a backward since the last flush ran under ``create_graph=True``.
        failure: the first backward since ``forgive`` that raised, in words; None if none did.
        on_begin: called with the task when an outermost backward is first observed.
        on_end: called with the task when an observed backward has ended, well or not.
        on_outermost_end: called after an outermost backward that ended well was counted.
    """

    def __init__(self, *, wants_scaled: bool = False) -> None:
        self.wants_scaled = wants_scaled
        self.num_ended = 0
        self.outermost: int | None = None
        self.keeps_graph = False
        self.failure: str | None = None
        self.on_begin: list[Callable[[int], None]] = []
        self.on_end: list[Callable[[int], None]] = []
        self.on_outermost_end: list[Callable[[], None]] = []
        self._open: list[int] = []  # observed and not ended, outermost first
        self._is_scaled = False  # the outermost one
        self._depth = 0  # engine.backward calls on the stack

    @property
    def is_running(self) -> bool:
        """This thread is inside a backward."""
        return self._depth > 0 or current_task() != NOT_RUNNING

    def observe(self, *, is_scaled: bool = False) -> int:
        """Take note of the backward that the caller runs in, and return its task (-1 for none).

        Args:
            is_scaled: the caller is the hook of a scaled loss, which runs before all others.
        """
        task = current_task()
        if task == NOT_RUNNING or task in self._open:
            return task
        self._open.append(task)
        Variable._execution_engine.queue_callback(partial(self._end, task))
        if self.outermost is None:
            self.outermost = task
            self._is_scaled = is_scaled
            for begin in self.on_begin:
                begin(task)
        return task

    def observe_gradient(self, *, is_scaled: bool = False) -> int:
        """``observe``, from a hook that got a gradient; there grad mode means ``create_graph``."""
        self.keeps_graph = self.keeps_graph or torch.is_grad_enabled()
        return self.observe(is_scaled=is_scaled)

    def watch_scaled(self, loss: Tensor) -> RemovableHandle:
        """Know the backward of ``loss``, which is scaled, by its first hook."""
        handle: RemovableHandle = loss.register_hook(self._note)
        return handle

    def check_scaled(self, name: str) -> None:
        """Refuse a gradient of parameter ``name`` that is not scaled though it must be.

        Raises:
            StateError: an outermost backward that began with an unscaled loss has come here.
        """
        if not self.wants_scaled:
            return
        self.observe()
        if not self._is_scaled:
            raise StateError(
                f"parameter {name} got a gradient of a loss that is not scaled, which fp16 cannot "
                "hold. Run engine.backward(loss), or engine.scale(loss).backward(), instead of "
                "loss.backward()."
            )

    @contextmanager
    def running(self, loss: Tensor) -> Iterator[None]:
        """A backward that ``engine.backward`` runs; its end and its failure are certain."""
        self.settle()
        is_outermost = not self.is_running
        self._depth += 1
        hook = self.watch_scaled(loss)
        try:
            yield
        except BaseException as error:
            self.fail(describe(error))
            raise
        finally:
            hook.remove()
            self._depth -= 1
            if is_outermost:
                self._close_stale()
        if is_outermost:
            self._count()

    def settle(self) -> None:
        """Find backwards that raised; called wherever a decision would rest on their sums."""
        if self._open and not self.is_running:
            self.fail("its end was never reached; the error was caught by the caller")
            self._close_stale()

    def fail(self, reason: str) -> None:
        """Remember that a backward has left partial sums."""
        self.failure = self.failure or reason

    def forgive(self) -> None:
        """The partial sums are gone."""
        self.settle()
        self.failure = None

    def _note(self, _grad: Tensor) -> None:
        self.observe_gradient(is_scaled=True)

    def _end(self, task: int) -> None:
        position = self._open.index(task)
        if self._open[position + 1 :]:
            self.fail("a nested backward never reached its end")
        for ended in reversed(self._open[position:]):
            for end in self.on_end:
                end(ended)
        del self._open[position:]
        if not self._open:
            self.outermost = None
            if self._depth == 0:
                self._count()

    def _close_stale(self) -> None:
        stale, self._open = self._open, []
        self.outermost = None
        for task in reversed(stale):
            for end in self.on_end:
                end(task)

    def _count(self) -> None:
        self.num_ended += 1
        for end in self.on_outermost_end:
            end()
