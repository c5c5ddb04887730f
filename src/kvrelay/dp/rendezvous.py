"""How the processes of a group's ranks learn the port of their common store: the process that serves it takes a free
one and tells the coordinator, which the others ask.

    process of rank 0 ──StorePort(41873)──> coordinator <──StorePort(0)── processes of the other ranks
                                                        ──StorePort(41873)──> all of them
"""

from __future__ import annotations

from kvrelay.dp import messages
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.server import READ_BYTES
from kvrelay.errors import FatalError, PeerLostError, ProtocolError

CONNECT_TIMEOUT_S = 5.0
"""The group is formed, so the coordinator listens, unless it has ended."""


def store_port(address: GroupAddress, own_port: int, timeout_s: float) -> int:
    """The store's port. ``own_port``: this process serves it there; 0: wait for the one that does. Raises PeerLostError
    if the coordinator ends meanwhile."""
    reader = messages.FrameReader(messages.FromCoordinator)
    reason = "it has ended"
    try:
        with address.connect(CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(messages.encode(messages.StorePort(own_port)))
            while data := connection.recv(READ_BYTES):
                for message in reader.feed(data):
                    if isinstance(message, messages.StorePort):
                        return message.port
    except (OSError, FatalError, ProtocolError) as exc:
        reason = str(exc)
    raise PeerLostError(f"the coordinator at {address} does not tell where the group's store is: {reason}")
