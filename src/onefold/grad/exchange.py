"""The exchange with which every flush begins: a few integers per unit, one maximum over ranks.

It answers, before anything large is sent: did a body fail, did every rank launch the same
reductions, which units have something pending on any rank, which parameters were touched anywhere.
"""

import logging
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from onefold.errors import RankMismatchError
from onefold.grad.reduce import Reducer
from onefold.unit import Unit
from onefold.wire.control import Control

log = logging.getLogger(__name__)


class Place(IntEnum):
    """Where a rank stands when it comes to the exchange; the same on all ranks."""

    WINDOW_EXIT = 1
    STEP = 2
    REDUCE_GRADIENTS = 3

    @property
    def call(self) -> str:
        """The call as the user wrote it."""
        return ("the exit of coalesce_grad_reduction()", "step()", "reduce_gradients()")[self - 1]


class Agreement(NamedTuple):
    """What all ranks know after the exchange, alike."""

    failures: dict[int, str]
    """Why a rank failed, by rank; empty if none did."""
    pending: list[Unit]
    """Units with something unreduced on any rank, in plan order."""
    is_touched: bool
    """Any parameter was touched on any rank since the last step."""


def exchange(
    units: Sequence[Unit], reducer: Reducer, control: Control, place: Place, failure: str | None
) -> Agreement:
    """Agree on a flush, and bring every rank's launched reductions level.

    Args:
        units: trainable units in plan order; their gradients are collected.
        reducer: whose log is compared, and brought level with the longest.
        control: the control group.
        place: where this rank stands.
        failure: why this rank failed; None if it did not.

    Raises:
        RankMismatchError: ranks stand at different places, launched different reductions outside a
            window, or dropped reduced gradients on some ranks only. Raised on every rank.
    Communication: one all-reduce of (units + 2 * parameters + 7) integers on the control group;
        where ranks launched different reductions, their logs and one more all-reduce.
    """
    drops = _hash([unit.gradients.drops for unit in units])
    launched = _hash([launch.unit_index for launch in reducer.log])
    head = [place, -place, launched, -launched, drops, -drops, int(failure is not None)]
    pending = _pending(units)
    touched = [int(flag) for unit in units for flag in unit.gradients.touched]
    voids = [count for unit in units for count in unit.gradients.voids]
    largest = control.largest([*head, *pending, *touched, *voids])
    last, first, more, fewer, most, least, failed, *flags = largest
    if last != -first:
        places = {rank: Place(at).call for rank, at in enumerate(control.gather(int(place)))}
        raise RankMismatchError(
            f"ranks came to an exchange at different places: {places}. Every rank must open and "
            "close the same windows and call step() equally often."
        )
    is_pending, per_slot = flags[: len(units)], flags[len(units) :]
    if more != -fewer:
        try:
            reducer.catch_up(control.gather(reducer.log))
        except RuntimeError as error:
            if not failed:
                raise
            log.warning("reductions of a failed window could not be brought level: %s", error)
        is_pending = control.largest(_pending(units))  # what was just launched is not any more
    reducer.start_afresh()
    failures: dict[int, str] = {}
    if failed:
        reasons = control.gather(failure)
        failures = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    elif most != -least:
        raise RankMismatchError(
            "gradients that had been reduced were dropped (zero_grad(), or a parameter's grad set "
            "to None) on some ranks only. Drop them on every rank, or on none."
        )
    _tell(units, per_slot[: len(touched)], per_slot[len(touched) :])
    return Agreement(
        failures,
        [unit for unit, flag in zip(units, is_pending, strict=True) if flag],
        any(per_slot[: len(touched)]),
    )


def _pending(units: Sequence[Unit]) -> list[int]:
    return [int(unit.gradients.is_pending) for unit in units]


def _hash(value: object) -> int:
    """31 bits that tell whether ranks hold the same."""
    return zlib.crc32(repr(value).encode()) >> 1


def _tell(units: Sequence[Unit], touched: Sequence[int], voids: Sequence[int]) -> None:
    """Give every unit what the ranks agreed on about its parameters."""
    position = 0
    for unit in units:
        own = slice(position, position + len(unit.slots))
        unit.gradients.touched_anywhere = [bool(flag) for flag in touched[own]]
        unit.gradients.voids = list(voids[own])
        position = own.stop
