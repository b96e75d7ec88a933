"""The exchange with which every flush begins: a few integers per unit, one maximum over ranks.

It answers, before anything large is sent: did a body fail, did every rank launch the same
reductions, which units have something pending on any rank, which parameters were touched anywhere.
"""

import logging
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import Final, NamedTuple

from onefold.errors import RankMismatchError
from onefold.grad.reduce import Reducer
from onefold.unit import Unit
from onefold.wire.control import Control

log = logging.getLogger(__name__)

_BOTTOM: Final = -(2**31)


class Place(IntEnum):
    """Where a rank stands when it comes to the exchange; the same on all ranks."""

    WINDOW_EXIT = 1
    STEP = 2
    REDUCE_GRADIENTS = 3
    WINDOW_ENTRY = 4

    @property
    def call(self) -> str:
        """The call as the user wrote it."""
        return (
            "the exit of coalesce_grad_reduction()",
            "step()",
            "reduce_gradients()",
            "the entry of coalesce_grad_reduction(max_bytes=)",
        )[self - 1]


class Agreement(NamedTuple):
    """What all ranks know after the exchange, alike."""

    failures: dict[int, str]
    """Why a rank failed, by rank; empty if none did."""
    pending: list[Unit]
    """Units with something unreduced on any rank, in plan order."""
    is_touched: bool
    """Any parameter was touched on any rank since the last step."""


def compare_budgets(units: Sequence[Unit], control: Control, max_bytes: int) -> None:
    """Before the first gather of a window that keeps what fits, see that all ranks keep the same.

    Raises:
        RankMismatchError: ``max_bytes`` differs between ranks, or not all ranks are here. Raised on
            every rank that is at an exchange.
    Communication: one maximum, as long as that of ``exchange``, which other ranks may be at.
    """
    place, said = Place.WINDOW_ENTRY, _hash(max_bytes)
    last, first, most, least, *_ = control.largest(
        [place, -place, said, -said, 0, *chain.from_iterable(_flags(units))]
    )
    if last != -first:
        raise _different_places(control, place)
    if most != -least:
        raise RankMismatchError(
            "coalesce_grad_reduction(max_bytes=): expected the same on every rank, because it "
            f"decides who gathers what, got {control.gather(max_bytes)} in the order of the ranks. "
            "Pass the smallest of them on every rank."
        )


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
    Communication: one maximum of (units + 2 * parameters + 7) integers on the control group (of
        experts, as many parameters as their axis has ranks); where ranks launched different
        reductions, their logs and one more maximum.
    """
    launched = _hash([launch[:2] for launch in reducer.log])
    head = [place, -place, launched, -launched, int(failure is not None)]
    pending, drops, touched, voids = _flags(units)
    said = [*head, *pending, *drops, *touched, *voids]
    last, first, more, fewer, failed, *flags = control.largest(said)
    if last != -first:
        raise _different_places(control, place)
    is_pending, flags = flags[: len(units)], flags[len(units) :]
    all_drops, per_slot = flags[: len(drops)], flags[len(drops) :]
    any_touched, all_voids = per_slot[: len(touched)], per_slot[len(touched) :]
    if more != -fewer:
        try:
            by_unit = dict(zip((u.index for u in units), _of_holder(units, all_voids), strict=True))
            reducer.catch_up(control.gather(reducer.log), by_unit)
        except RuntimeError as error:
            if not failed:
                raise
            log.warning("reductions of a failed window could not be brought level: %s", error)
        is_pending = control.largest(_pending(units))  # what was just launched is not any more
    reducer.start_afresh()
    reasons = control.gather(failure) if failed else []
    failures = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if not failed and any(
        most != -least for most, least in zip(all_drops[::2], all_drops[1::2], strict=True)
    ):
        raise RankMismatchError(
            "gradients that had been reduced were dropped (zero_grad(), or a parameter's grad set "
            "to None) on some ranks only. Drop them on every rank, or on none."
        )
    _tell(units, any_touched, all_voids)
    return Agreement(
        failures,
        [unit for unit, flag in zip(units, is_pending, strict=True) if flag],
        any(any_touched),
    )


def _tell(units: Sequence[Unit], any_touched: Sequence[int], all_voids: Sequence[int]) -> None:
    """Give every unit what the ranks agreed on about its parameters."""
    agreed = zip(_of_holder(units, any_touched), _of_holder(units, all_voids), strict=True)
    for unit, (touched, voids) in zip(units, agreed, strict=True):
        unit.gradients.touched_anywhere = [bool(flag) for flag in touched]
        unit.gradients.voids = voids


def _different_places(control: Control, place: Place) -> RankMismatchError:
    places = {rank: Place(at).call for rank, at in enumerate(control.gather(int(place)))}
    return RankMismatchError(
        f"ranks came to an exchange at different places: {places}. Every rank must open and close "
        "the same windows and call step() equally often."
    )


def _flags(units: Sequence[Unit]) -> tuple[list[int], list[int], list[int], list[int]]:
    """What this rank says of its gradients: pending, drops, touched, voids."""
    touched = [[int(is_touched) for is_touched in unit.gradients.touched] for unit in units]
    return (
        _pending(units),
        _drops(units),
        _by_holder(units, touched),
        _by_holder(units, [unit.gradients.voids for unit in units]),
    )


def _pending(units: Sequence[Unit]) -> list[int]:
    return [int(unit.gradients.is_pending) for unit in units]


def _hash(value: object) -> int:
    """31 bits that tell whether ranks hold the same."""
    return zlib.crc32(repr(value).encode()) >> 1


# [Note: holders] Ranks at different places of an expert axis hold different parameters in the same
# unit. What is said of one parameter is therefore written into a field of its holders' own, which
# the other ranks leave at the bottom. Dense parameters have one field: everybody is a holder.


def _by_holder(units: Sequence[Unit], values: Sequence[Sequence[int]]) -> list[int]:
    """``values`` of every unit's parameters, in fields of their holders."""
    fields: list[int] = []
    for unit, own in zip(units, values, strict=True):
        expert = unit.wire.mesh.expert
        for holder in range(len(expert.members)):
            fields += own if holder == expert.rank else [0] * len(own)
    return fields


def _of_holder(units: Sequence[Unit], fields: Sequence[int]) -> Iterator[list[int]]:
    """What the ranks agreed on about this rank's parameters, unit by unit."""
    begin = 0
    for unit in units:
        expert, numel = unit.wire.mesh.expert, len(unit.slots)
        own = begin + expert.rank * numel
        yield list(fields[own : own + numel])
        begin += len(expert.members) * numel


def _drops(units: Sequence[Unit]) -> list[int]:
    """Per reduce group and holder a hash of the drops and its negative: equal, or they differ."""
    fields: list[int] = []
    groups = {unit.spec.reduce_group: unit.wire.mesh.expert for unit in units}
    for group, expert in groups.items():
        drops = _hash([u.gradients.drops for u in units if u.spec.reduce_group == group])
        for holder in range(len(expert.members)):
            fields += [drops, -drops] if holder == expert.rank else [_BOTTOM, _BOTTOM]
    return fields
