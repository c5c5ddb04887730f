"""Who may talk to a process, and the connections to workers: made from their entries in discovery, with a key that our
own entry announces.

The rules are checked before any port is bound. The request plane always authenticates its callers. HTTP, metrics and KV
transfer need no authentication if only this machine can reach them; otherwise they do, unless ``--insecure`` is given.
The mechanisms are elsewhere: CURVE in ``rpc``, API keys and TLS in ``frontend``, credentials of the control plane in
``control``.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from kvrelay.config import ControlConfig, FrontendConfig, MetricsConfig, TransferConfig
from kvrelay.config.addresses import is_loopback
from kvrelay.control import connect_control
from kvrelay.control.base import ControlPlane, Keys, Lease
from kvrelay.core.workers import CallerInfo, WorkerInfo
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.rpc import Context, CurveKeys, Heartbeat, RpcClient, ZmqRpcClient, new_curve_keys

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


@asynccontextmanager
async def connected(config: ControlConfig) -> AsyncIterator[ControlPlane]:
    """The control plane, until the context ends. Raises ControlUnavailableError."""
    control = await connect_control(config)
    try:
        yield control
    finally:
        await control.close()


def client_of(
    info: WorkerInfo, keys: CurveKeys, connect_timeout_s: float = CONNECT_TIMEOUT_S, context: Context | None = None
) -> ZmqRpcClient:
    """A client of that worker, not started yet. The worker's lease, not ours, decides when its silence is too long."""
    return ZmqRpcClient(
        info.address,
        connect_timeout_s,
        heartbeat=Heartbeat.for_lease(info.lease_ttl_s),
        server_key=info.public_key.encode() or None,
        curve_keys=keys,
        context=context,
    )


def connector(heartbeat: Heartbeat, keys: CurveKeys | None) -> Callable[[str, str], Awaitable[RpcClient]]:
    """Makes a worker's clients of other workers: to their address, with their public key and its own keys."""

    async def connect(address: str, public_key: str) -> RpcClient:
        client = ZmqRpcClient(address, heartbeat=heartbeat, server_key=public_key.encode() or None, curve_keys=keys)
        await client.start()
        return client

    return connect


@asynccontextmanager
async def frontend_known(
    control: ControlPlane, config: ControlConfig, on_revoked: Callable[[], None], name: str, keys: CurveKeys, url: str
) -> AsyncIterator[None]:
    """Until the context ends, workers know the keys of the frontend ``name``, and operators its ``url``. ``on_revoked``
    is called if an operator revokes the lease, so that the frontend leaves.

    Raises ControlUnavailableError.
    """
    lease = await control.discovery.grant(config.lease_ttl_s)
    lease.on_revoked(on_revoked)
    async with _known(control, lease, Keys(config.namespace).frontend, name, keys, url):
        yield


@asynccontextmanager
async def operator_keys(control: ControlPlane, config: ControlConfig) -> AsyncIterator[CurveKeys]:
    """Keys of an operator, known to workers until the context ends. Raises ControlUnavailableError."""
    lease, keys = await control.discovery.grant(config.lease_ttl_s), new_curve_keys()
    async with _known(control, lease, Keys(config.namespace).operator, new_caller_id(), keys):
        yield keys


def new_caller_id() -> str:
    """Ten hexadecimal digits."""
    return uuid.uuid4().hex[:10]


@asynccontextmanager
async def _known(
    control: ControlPlane, lease: Lease, key_of: Callable[[str], str], caller_id: str, keys: CurveKeys, url: str = ""
) -> AsyncIterator[None]:
    info = CallerInfo(caller_id, keys.public.decode(), socket.gethostname(), os.getpid(), url=url)
    try:
        await control.discovery.put(key_of(caller_id), msgspec.json.encode(info), lease)
        yield
    finally:
        await give_back(lease)


async def give_back(lease: Lease) -> None:
    """Revoke it. If that fails it expires: nothing is raised, which could take the place of a cancellation."""
    try:
        await lease.revoke()
    except KvrelayError as exc:
        _log.debug("revoking our lease failed, it will expire: %s", exc)


LOOPBACK_DEVICE = "lo"


def request_plane_keys(host: str, control: ControlConfig) -> CurveKeys | None:
    """A fresh key pair for a worker; None if its request plane is to be open.

    Loopback is no exception: every user of the machine reaches it. Raises ConfigError if the request plane would be
    open without ``insecure``.
    """
    if control.request_plane_security == "curve":
        return new_curve_keys()
    if not control.insecure:
        raise ConfigError(
            f"a worker on {host} without CURVE would obey every client that can reach its port, including those of "
            f"other users of this machine: leave --request-plane-security at curve, or give --insecure if you trust "
            f"all of them",
            param="request_plane_security",
        )
    return None


def transfer_settings(host: str, transfer: TransferConfig) -> TransferConfig:
    """A worker on loopback also exchanges KV on loopback; by default UCX would listen on every network device."""
    if transfer.ucx_net_devices != "auto" or not is_loopback(host):
        return transfer
    return replace(transfer, ucx_net_devices=LOOPBACK_DEVICE)


def require_api_key(frontend: FrontendConfig, control: ControlConfig) -> None:
    """Raise ConfigError if the HTTP service would be open to other machines without ``insecure``."""
    has_key = bool(frontend.api_key or frontend.api_keys_file)
    _require_key("host", frontend.host, has_key, "--api-keys-file or --api-key", control)


def require_metrics_key(metrics: MetricsConfig, control: ControlConfig) -> None:
    """Raise ConfigError if a worker's metrics would be open to other machines without ``insecure``."""
    if metrics.metrics_port:
        has_key = bool(metrics.metrics_keys_file)
        _require_key("metrics_host", metrics.metrics_host, has_key, "--metrics-keys-file", control)


def _require_key(param: str, host: str, has_key: bool, remedy: str, control: ControlConfig) -> None:
    if is_loopback(host) or has_key or control.insecure:
        return
    raise ConfigError(
        f"--{param.replace('_', '-')} {host} is reachable from other machines and no API key is set: give {remedy}, "
        f"or --insecure on a network that you trust",
        param=param,
    )
