"""Transports: how the three collectives on flat buffers are carried out over one group."""

from onefold.wire.transports.base import Transport, Work
from onefold.wire.transports.choice import choose_transport
from onefold.wire.transports.cross import CrossMemoryTransport
from onefold.wire.transports.direct import DirectTransport
from onefold.wire.transports.native import NativeTransport

__all__ = [
    "CrossMemoryTransport",
    "DirectTransport",
    "NativeTransport",
    "Transport",
    "Work",
    "choose_transport",
]
