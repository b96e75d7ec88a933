"""Which transport serves a group, decided once, alike on all of its ranks."""

import contextlib
import logging
import socket
from typing import Any, Final

import torch.distributed as dist

from onefold.wire.buffer import Arena
from onefold.wire.cross_memory import can_read, own_card
from onefold.wire.transports.base import Transport
from onefold.wire.transports.cross import CrossMemoryTransport
from onefold.wire.transports.direct import DirectTransport
from onefold.wire.transports.native import NativeTransport
from onefold.wire.transports.notes import Door, hang_up

log = logging.getLogger(__name__)

MAX_PAIRWISE_RANKS: Final = 64
"""Above this many ranks pairwise transports open too many connections."""

_PAIRWISE: Final = ("cross-memory", "direct")


def choose_transport(
    group: dist.ProcessGroup, choice: str, arena: Arena, timeout_s: float
) -> Transport:
    """Make the transport of one group.

    Args:
        group: of two ranks or more.
        choice: ``cross-memory`` (ranks of one host that may read each other's memory), ``direct``
            or ``native``; ``auto`` is the first of them that can serve the group.
        arena: where transports lease their buffers; CPU memory for all but native.
        timeout_s: seconds a collective may take; as in ``group``.

    Raises:
        ValueError: the choice cannot serve this group; on all of its ranks.
    Communication: one exchange of small objects in the group, unless native or direct was asked.
    """
    size = group.size()
    is_pairwise = arena.device.type == "cpu" and size <= MAX_PAIRWISE_RANKS
    if choice in _PAIRWISE and not is_pairwise:
        raise ValueError(
            f"onefold.transport: {choice} serves CPU buffers and at most {MAX_PAIRWISE_RANKS} "
            f"ranks, got {arena.device.type} and {size} ranks. Use 'auto' or 'native'."
        )
    if choice == "native" or not is_pairwise:
        return NativeTransport(group, arena)
    if choice == "direct":
        return DirectTransport(group, arena)
    try:
        return _cross_memory(group, arena, timeout_s)
    except _NotReadable as problem:
        if choice == "cross-memory":
            raise ValueError(f"onefold.transport: {problem}. Use 'auto' or 'direct'.") from None
        if group.rank() == 0:
            log.info("transport direct instead of cross-memory: %s", problem)
        return DirectTransport(group, arena)


class _NotReadable(Exception):
    """The ranks of a group cannot use the cross-memory transport; all of them know."""


def _cross_memory(group: dist.ProcessGroup, arena: Arena, timeout_s: float) -> CrossMemoryTransport:
    """Try it: every rank reads every other, and only then are they connected."""
    rank, own, door = group.rank(), own_card(), Door()
    try:
        told = _gathered(group, (own, door.address))
        if not all(_gathered(group, all(can_read(card, own) for card, _ in told))):
            raise _NotReadable(
                f"the {group.size()} ranks are not on one host, or may not read each other's memory"
            )
        peers: dict[int, socket.socket] | None = None
        with contextlib.suppress(OSError):
            peers = door.connect(rank, [address for _, address in told])
        if not all(_gathered(group, peers is not None)) or peers is None:
            hang_up(peers or {})
            raise _NotReadable("the ranks of this host cannot reach each other's sockets")
    finally:
        door.close()
    return CrossMemoryTransport(rank, [card.pid for card, _ in told], peers, arena, timeout_s)


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    everyone = [value] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone
