"""Which transport serves a group, decided once, alike on all of its ranks."""

import logging
from typing import Any, Final

import torch.distributed as dist

from onefold.wire.buffer import Arena
from onefold.wire.cross_memory import can_read, own_card
from onefold.wire.transports.base import Transport
from onefold.wire.transports.cross import CrossMemoryTransport
from onefold.wire.transports.direct import DirectTransport
from onefold.wire.transports.native import NativeTransport

log = logging.getLogger(__name__)

MAX_PAIRWISE_RANKS: Final = 64
"""Above this many ranks pairwise transports open too many connections."""

_PAIRWISE: Final = ("cross-memory", "direct")


def choose_transport(group: dist.ProcessGroup, choice: str, arena: Arena) -> Transport:
    """Make the transport of one group.

    Args:
        group: of two ranks or more.
        choice: ``cross-memory`` (ranks of one host that may read each other's memory), ``direct``
            or ``native``; ``auto`` is the first of them that can serve the group.
        arena: where transports lease their buffers; CPU memory for all but native.

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
        return NativeTransport(group)
    direct = DirectTransport(group, arena)
    if choice == "direct":
        return direct
    pids = _readable(group)
    if pids is not None:
        return CrossMemoryTransport(direct, pids)
    reason = f"the {size} ranks are not on one host, or may not read each other's memory"
    if choice == "cross-memory":
        raise ValueError(f"onefold.transport: {reason}. Use 'auto' or 'direct'.")
    if group.rank() == 0:
        log.info("transport direct instead of cross-memory: %s", reason)
    return direct


def _readable(group: dist.ProcessGroup) -> list[int] | None:
    """The ranks' process numbers, if every rank can read every other."""
    own = own_card()
    cards = _gathered(group, own)
    can = all(can_read(card, own) for card in cards)
    return [card.pid for card in cards] if all(_gathered(group, can)) else None


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    everyone = [value] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone
