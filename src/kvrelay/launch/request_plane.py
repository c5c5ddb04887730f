"""Connections to workers: made from their entries in discovery, with a key that our own entry announces."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from kvrelay.config import ControlConfig
from kvrelay.control.base import ControlPlane, Keys, Lease
from kvrelay.core.workers import CallerInfo, WorkerInfo
from kvrelay.errors import KvrelayError
from kvrelay.rpc import CurveKeys, Heartbeat, RpcClient, ZmqRpcClient, new_curve_keys

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


def client_of(info: WorkerInfo, keys: CurveKeys, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> ZmqRpcClient:
    """A client of that worker, not started yet. The worker's lease, not ours, decides when its silence is too long."""
    return ZmqRpcClient(
        info.address,
        connect_timeout_s,
        heartbeat=Heartbeat.for_lease(info.lease_ttl_s),
        server_key=info.public_key.encode() or None,
        curve_keys=keys,
    )


def connector(heartbeat: Heartbeat, keys: CurveKeys | None) -> Callable[[str, str], Awaitable[RpcClient]]:
    """Makes a worker's clients of other workers: to their address, with their public key and its own keys."""

    async def connect(address: str, public_key: str) -> RpcClient:
        client = ZmqRpcClient(address, heartbeat=heartbeat, server_key=public_key.encode() or None, curve_keys=keys)
        await client.start()
        return client

    return connect


@asynccontextmanager
async def frontend_keys(
    control: ControlPlane, config: ControlConfig, on_revoked: Callable[[], None]
) -> AsyncIterator[CurveKeys]:
    """Keys of a frontend, known to workers until the context ends. ``on_revoked`` is called if an operator revokes the
    lease, so that the frontend leaves.

    Raises ControlUnavailableError.
    """
    lease = await control.discovery.grant(config.lease_ttl_s)
    lease.on_revoked(on_revoked)
    async with _known(control, lease, Keys(config.namespace).frontend) as keys:
        yield keys


@asynccontextmanager
async def operator_keys(control: ControlPlane, config: ControlConfig) -> AsyncIterator[CurveKeys]:
    """Keys of an operator, known to workers until the context ends. Raises ControlUnavailableError."""
    lease = await control.discovery.grant(config.lease_ttl_s)
    async with _known(control, lease, Keys(config.namespace).operator) as keys:
        yield keys


@asynccontextmanager
async def _known(control: ControlPlane, lease: Lease, key_of: Callable[[str], str]) -> AsyncIterator[CurveKeys]:
    keys = new_curve_keys()
    caller_id = uuid.uuid4().hex[:10]
    info = CallerInfo(caller_id, keys.public.decode(), socket.gethostname(), os.getpid())
    try:
        await control.discovery.put(key_of(caller_id), msgspec.json.encode(info), lease)
        yield keys
    finally:
        try:
            await lease.revoke()
        except KvrelayError as exc:
            _log.debug("revoking our lease failed, it will expire: %s", exc)
