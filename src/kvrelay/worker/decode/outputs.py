"""Sends a step's outputs to one frontend: in one message, or in several if the transport's limit requires it.

It does not know the requests' owners. If a frontend cannot be reached, the request plane ends its connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.messages import OutputBatch, TokenOutput
from kvrelay.errors import PayloadTooLargeError
from kvrelay.rpc.base import Peer, RpcServer


def send_outputs(server: RpcServer, peer: Peer, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
    """Send ``outputs`` in order. Returns the outputs that are too large for a message of their own; they were not
    sent."""
    try:
        server.send(peer, OutputBatch(tuple(outputs)))
    except PayloadTooLargeError:
        if len(outputs) == 1:
            return list(outputs)
        half = len(outputs) // 2
        return send_outputs(server, peer, outputs[:half]) + send_outputs(server, peer, outputs[half:])
    return []
