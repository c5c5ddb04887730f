"""The proxy of the environment: as other tools read it, and refused if it is none."""

from __future__ import annotations

import os

import pytest

from kvrelay.config.proxy import proxy_for
from kvrelay.errors import ConfigError


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "http://gpu1:8000", None),
        ({"http_proxy": "http://u:p@proxy:3128"}, "http://gpu1:8000", "http://u:p@proxy:3128"),
        ({"http_proxy": "proxy:3128"}, "http://gpu1:8000", "http://proxy:3128"),
        ({"http_proxy": "proxy:3128"}, "https://gpu1", None),
        ({"all_proxy": "http://proxy:3128"}, "https://gpu1", "http://proxy:3128"),
        ({"all_proxy": "http://other", "https_proxy": "http://proxy"}, "https://gpu1", "http://proxy"),
        ({"http_proxy": "proxy:3128", "no_proxy": "gpu1"}, "http://gpu1:8000", None),
        ({"http_proxy": "proxy:3128", "no_proxy": "gpu1:8000"}, "http://gpu1:8000", None),
        ({"http_proxy": "proxy:3128", "no_proxy": "gpu1:8001"}, "http://gpu1:8000", "http://proxy:3128"),
        ({"http_proxy": "proxy:3128", "no_proxy": "*"}, "http://gpu1:8000", None),
        ({"http_proxy": "socks5://proxy"}, "http://127.0.0.1:8000", None),
        ({"http_proxy": "socks5://proxy"}, "http://[::1]:8000", None),
        ({"http_proxy": "socks5://proxy"}, "http://localhost:8000", None),
    ],
)
def test_the_proxy_of_a_url(
    environment: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy


@pytest.mark.parametrize("value", ["socks5://u:secret@proxy:1080", "http://:::", "http://", "http://u:secret@proxy:x"])
def test_what_is_no_http_proxy_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", value)
    with pytest.raises(ConfigError, match="http_proxy in the environment is no URL of an HTTP proxy") as caught:
        proxy_for("http://gpu1:8000")
    assert "secret" not in caught.value.message
