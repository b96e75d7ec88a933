"""Notes: messages of a few bytes between ranks of one host, over Unix sockets.

They cost a tenth of a gloo message, arrive whole and in order, and a rank that ends, in whatever
way, is noticed at once.
"""

import contextlib
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_FORMAT: Final = struct.Struct("<qqq")
_CONNECT_S: Final = 60.0


class Note(NamedTuple):
    """What one rank tells another.

    Attributes:
        tag: which unit's collective it is about.
        phase: of that collective.
        address: where the sender's buffer is, if that matters in this phase.
    """

    tag: int
    phase: int
    address: int

    def send(self, peer: socket.socket, *, blocks: bool = True) -> None:
        """Send it, as one packet.

        Raises:
            BlockingIOError: there is no room now, and it must not block.
            RuntimeError: the peer has ended.
        """
        try:
            peer.send(_FORMAT.pack(*self), 0 if blocks else socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError as error:
            raise RuntimeError(f"a rank of this host has left the group: {error}") from error

    @classmethod
    def receive(cls, peer: socket.socket) -> "Note | None":
        """The next note of a socket that has one; None if the peer has ended."""
        try:
            packet = peer.recv(_FORMAT.size)
        except ConnectionError:
            return None
        return cls(*_FORMAT.unpack(packet)) if packet else None


class Door:
    """Where this rank can be reached until all are connected; nothing lies in the file system."""

    def __init__(self) -> None:
        self.address = f"\0onefold-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen()

    def connect(self, rank: int, addresses: Sequence[str]) -> dict[int, socket.socket]:
        """A socket to every peer: this rank calls those before it, and is called by the others.

        Args:
            rank: this rank's.
            addresses: every rank's, which only the ranks know: they are the password, too.

        Raises:
            OSError: a peer cannot be reached, or did not call in time.
        """
        peers: dict[int, socket.socket] = {}
        try:
            for peer, address in enumerate(addresses[:rank]):
                peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peers[peer].connect(address)
                peers[peer].send(addresses[rank].encode())
            self._listener.settimeout(_CONNECT_S)
            while len(peers) < len(addresses) - 1:
                caller, _ = self._listener.accept()
                caller.settimeout(_CONNECT_S)
                name = caller.recv(256).decode(errors="replace")
                if name in addresses[rank + 1 :]:
                    caller.settimeout(None)
                    peers[addresses.index(name)] = caller
                else:
                    caller.close()
        except BaseException:
            hang_up(peers)
            raise
        return peers

    def close(self) -> None:
        """Nobody can call any more."""
        self._listener.close()


def hang_up(peers: Mapping[int, socket.socket]) -> None:
    """End the connections; the peers notice."""
    for peer in peers.values():
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
        peer.close()
