"""Agree: work that succeeds on every rank or is an error on every rank."""

from collections.abc import Callable
from typing import TypeVar

from onefold.errors import CheckpointError, describe
from onefold.wire.control import Control

T = TypeVar("T")


def on_all_ranks(control: Control, call: str, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank; all raise if one does.

    Args:
        control: of the ranks that take part.
        call: what the user called, for the message.
        work: communicates nothing.

    Raises:
        Exception: this rank's own error, as it is.
        CheckpointError: another rank's; the message has its text.
    Communication: one exchange.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as found:
        error = found
    told = control.gather(None if error is None else describe(error))
    if error is not None:
        raise error
    for rank, theirs in enumerate(told):
        if theirs is not None:
            raise CheckpointError(f"{call}: rank {rank} failed: {theirs}")
    return result  # type: ignore[return-value]
