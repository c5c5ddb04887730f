"""Who may talk to a process: the rules that are checked before any port is bound.

This module owns the decision, not the mechanisms: CURVE is in ``rpc``, API keys and TLS in ``frontend``, credentials of
the control plane in ``control``. The request plane always authenticates its callers. HTTP, metrics and KV transfer need
no authentication if only this machine can reach them; otherwise they do. ``--insecure`` lifts these rules.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.config import ControlConfig, FrontendConfig, MetricsConfig, TransferConfig
from kvrelay.core.addresses import is_loopback
from kvrelay.errors import ConfigError
from kvrelay.rpc import CurveKeys, new_curve_keys

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
