"""Progress: one thread that carries out started collectives, in the order they were started.

All ranks start the same collectives in the same order, so a thread that waits for its peers always
waits for something that they have before them, too: no order of waiting can block the ranks.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final

import torch

_PATIENCE_S: Final = 1.0

Task = Callable[[], None]
Tasks = SimpleQueue[tuple[Task, "Future[None]"] | None]


class Progress:
    """The thread of one transport. It never keeps the program alive."""

    def __init__(self) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._thread = threading.Thread(
            target=_carry_out, args=(self._tasks,), name="onefold-progress", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._tasks.put, None)  # also if nobody calls close()

    def start(self, task: Task) -> "Future[None]":
        """Carry ``task`` out after those before it. Once one has failed all others do.

        Raises:
            RuntimeError: the thread was ended.
        """
        if not self._end.alive:
            raise RuntimeError("a collective was started on a group that was destroyed")
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """End the thread, after what was started; one that waits for a lost peer is left behind."""
        self._end()
        self._thread.join(_PATIENCE_S)


@torch.no_grad()
def _carry_out(tasks: Tasks) -> None:
    failure = ""  # text: an exception would keep alive whoever was told of it
    while (following := tasks.get()) is not None:
        task, future = following
        try:
            if failure:
                raise RuntimeError(f"an earlier collective of this group failed: {failure}")
            task()
        except Exception as error:
            failure = failure or str(error) or type(error).__name__
            future.set_exception(error)
        else:
            future.set_result(None)
        del following, task, future  # what they hold may be freed now
