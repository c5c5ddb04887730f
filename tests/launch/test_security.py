"""The rules for what may be bound: closed to other machines, or authenticated, or explicitly insecure."""

from __future__ import annotations

import pytest

from kvrelay.config import ControlConfig, FrontendConfig, MetricsConfig, TransferConfig
from kvrelay.errors import ConfigError
from kvrelay.launch.request_plane import request_plane_keys, require_api_key, require_metrics_key, transfer_settings


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("insecure", [False, True])
def test_a_request_plane_has_keys_wherever_it_listens(host: str, insecure: bool) -> None:
    assert request_plane_keys(host, ControlConfig(insecure=insecure)) is not None


def test_every_worker_has_keys_of_its_own() -> None:
    first, second = (request_plane_keys("127.0.0.1", ControlConfig()) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.public != second.public


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1"])
def test_an_open_request_plane_is_refused_also_on_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        request_plane_keys(host, ControlConfig(request_plane_security="none"))
    assert request_plane_keys(host, ControlConfig(request_plane_security="none", insecure=True)) is None


def test_kv_stays_on_loopback_with_a_worker_on_loopback() -> None:
    assert transfer_settings("127.0.0.1", TransferConfig()).ucx_net_devices == "lo"
    assert transfer_settings("127.0.0.1", TransferConfig(ucx_net_devices="eth0")).ucx_net_devices == "eth0"
    assert transfer_settings("10.0.0.1", TransferConfig()).ucx_net_devices == "auto"


def test_an_open_http_service_is_refused() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        require_api_key(FrontendConfig(host="0.0.0.0"), ControlConfig())


@pytest.mark.parametrize(
    ("frontend", "control"),
    [
        (FrontendConfig(), ControlConfig()),
        (FrontendConfig(host="0.0.0.0", api_key="k"), ControlConfig()),
        (FrontendConfig(host="::", api_keys_file="keys"), ControlConfig()),
        (FrontendConfig(host="0.0.0.0"), ControlConfig(insecure=True)),
    ],
)
def test_an_http_service_with_keys_or_on_loopback(frontend: FrontendConfig, control: ControlConfig) -> None:
    require_api_key(frontend, control)


def test_open_metrics_are_refused() -> None:
    with pytest.raises(ConfigError, match="give --metrics-keys-file, or --insecure"):
        require_metrics_key(MetricsConfig(metrics_port=9400, metrics_host="10.0.0.2"), ControlConfig())


@pytest.mark.parametrize(
    ("metrics", "control"),
    [
        (MetricsConfig(metrics_host="10.0.0.2"), ControlConfig()),
        (MetricsConfig(metrics_port=9400), ControlConfig()),
        (MetricsConfig(metrics_port=9400, metrics_host="0.0.0.0", metrics_keys_file="keys"), ControlConfig()),
        (MetricsConfig(metrics_port=9400, metrics_host="::"), ControlConfig(insecure=True)),
    ],
)
def test_metrics_with_keys_or_on_loopback_or_none(metrics: MetricsConfig, control: ControlConfig) -> None:
    require_metrics_key(metrics, control)
