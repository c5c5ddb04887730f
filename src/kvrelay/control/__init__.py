"""The entry point of the control plane: one function that connects to the configured servers."""

from __future__ import annotations

import re

from kvrelay.config import ControlConfig
from kvrelay.control.base import ControlPlane
from kvrelay.control.credentials import require_credentials
from kvrelay.control.redelivery import ack_wait_for_lease
from kvrelay.errors import ConfigError

__all__ = ["connect_control"]

NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Characters that are valid in keys, in subjects and in stream names."""


async def connect_control(config: ControlConfig) -> ControlPlane:
    """Connect to ``config.control`` (``nats://`` or ``tls://``), and to ``config.discovery`` when it names etcd.

    Raises ConfigError for a URL with an unknown scheme or without credentials. Raises ControlUnavailableError if the
    server cannot be reached within ``connect_timeout_s``.
    """
    if not config.control:
        raise ConfigError("no control server: give one with --control, e.g. nats://127.0.0.1:4222", param="control")
    if config.discovery and not config.discovery.startswith(("etcd://", "etcds://")):
        raise ConfigError(f"{config.discovery!r} is not a discovery URL: expected etcd://HOST:PORT", param="discovery")
    if NAMESPACE.fullmatch(config.namespace) is None:
        raise ConfigError(
            f"{config.namespace!r} is not a namespace: expected up to 64 letters, digits, - and _", param="namespace"
        )
    require_credentials(config)
    from kvrelay.control.nats.plane import NatsControlPlane

    discovery = None
    if config.discovery:
        from kvrelay.control.etcd import EtcdDiscovery

        discovery = await EtcdDiscovery.connect(
            config.discovery, namespace=config.namespace, connect_timeout_s=config.connect_timeout_s
        )
    try:
        return await NatsControlPlane.connect(
            config.control,
            config.namespace,
            config.connect_timeout_s,
            num_replicas=config.control_replicas,
            ack_wait_s=ack_wait_for_lease(config.lease_ttl_s),
            discovery=discovery,
        )
    except BaseException:
        if discovery is not None:
            await discovery.close()
        raise
