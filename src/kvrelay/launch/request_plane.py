"""Connections to workers, made from what discovery says about them."""

from __future__ import annotations

from kvrelay.core.workers import WorkerInfo
from kvrelay.rpc import Heartbeat, ZmqRpcClient

CONNECT_TIMEOUT_S = 5.0


def client_of(info: WorkerInfo, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> ZmqRpcClient:
    """A client of that worker, not started yet. The worker's lease, not ours, says when its silence is too long."""
    return ZmqRpcClient(
        info.address,
        connect_timeout_s,
        heartbeat=Heartbeat.for_lease(info.lease_ttl_s),
        server_key=info.public_key.encode() or None,
    )
