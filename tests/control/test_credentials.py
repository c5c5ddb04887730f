"""A control plane on another machine must ask for credentials, whatever the way they are given."""

from __future__ import annotations

import pytest

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.credentials import require_credentials
from kvrelay.control.nats.urls import client_options, parse_url
from kvrelay.errors import ConfigError


@pytest.mark.parametrize(
    ("control", "discovery"),
    [
        ("nats://127.0.0.1:4222", ""),
        ("nats://localhost:4222,nats://127.0.0.2:4222", "etcd://127.0.0.1:2379"),
        ("nats://token@10.0.0.1:4222", ""),
        ("nats://user:password@10.0.0.1:4222,nats://10.0.0.2:4222", ""),
        ("tls://10.0.0.1:4222?ca=ca.pem&cert=me.pem&key=me.key", ""),
        ("nats://10.0.0.1:4222?creds=me.creds", ""),
        ("nats://token@10.0.0.1:4222", "etcds://user:password@10.0.0.1:2379"),
    ],
)
def test_urls_on_loopback_or_with_credentials_are_accepted(control: str, discovery: str) -> None:
    require_credentials(ControlConfig(control=control, discovery=discovery))


@pytest.mark.parametrize(
    ("control", "discovery", "name"),
    [
        ("nats://10.0.0.1:4222", "", "control"),
        ("tls://nats.example.org:4222?ca=ca.pem", "", "control"),
        ("nats://127.0.0.1:4222,nats://10.0.0.1:4222", "", "control"),
        ("nats://token@10.0.0.1:4222", "etcd://10.0.0.1:2379", "discovery"),
    ],
)
async def test_another_machine_without_credentials_is_refused(control: str, discovery: str, name: str) -> None:
    config = ControlConfig(control=control, discovery=discovery)
    with pytest.raises(ConfigError, match=f"--{name} .*--insecure") as caught:
        await connect_control(config)
    assert "token@" not in caught.value.message
    require_credentials(ControlConfig(control=control, discovery=discovery, insecure=True))


@pytest.mark.parametrize(
    "address", ["10.0.0.1:4222", "localhost:4222", "secret@10.0.0.1:4222", "nats://", "nats://[::1"]
)
def test_an_address_that_is_not_a_url_is_refused_as_such(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--control .* is not a URL: expected nats://HOST:PORT") as caught:
        require_credentials(ControlConfig(control=address))
    assert "secret" not in caught.value.message
    with pytest.raises(ConfigError, match=r"--discovery .* is not a URL: expected etcd://HOST:PORT"):
        require_credentials(ControlConfig(control="nats://127.0.0.1:4222", discovery=address))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nats://h?ca=ca.pem", "not a URL with TLS"),
        ("nats://h?cert=me.pem&key=me.key", "not a URL with TLS"),
        ("tls://h?key=me.key", "a key without a cert"),
        ("tls://h?ca=/does/not/exist.pem", "cannot read /does/not/exist.pem of the control URL: No such file"),
        ("tls://h?cert=/does/not/exist.pem", "cannot read /does/not/exist.pem"),
    ],
)
def test_certificates_that_would_not_be_used_are_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        client_options([parse_url(url)])


def test_the_first_login_and_the_options_of_all_urls_are_used() -> None:
    urls = "nats://10.0.0.1:4222,nats://me:secret@10.0.0.2:4222,nats://10.0.0.3:4222?creds=me.creds"
    options = client_options([parse_url(url) for url in urls.split(",")])
    assert options == {"user": "me", "password": "secret", "user_credentials": "me.creds", "inbox_prefix": "_INBOX_me"}
