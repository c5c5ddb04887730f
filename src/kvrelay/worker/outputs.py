"""A step's outputs on their way to one frontend: in one message, or in as many as the transport's limit asks for.

It does not know who asked for what, nor what becomes of a frontend that cannot be reached: the request plane ends its
connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.messages import OutputBatch, TokenOutput
from kvrelay.errors import PayloadTooLargeError
from kvrelay.rpc.base import Peer, RpcServer


def send_outputs(server: RpcServer, peer: Peer, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
    """Send ``outputs`` in order. Returns those that fit into no message even alone; they were not sent."""
    try:
        server.send(peer, OutputBatch(tuple(outputs)))
    except PayloadTooLargeError:
        if len(outputs) == 1:
            return list(outputs)
        half = len(outputs) // 2
        return send_outputs(server, peer, outputs[:half]) + send_outputs(server, peer, outputs[half:])
    return []
