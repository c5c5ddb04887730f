"""Where requests go, and with which key: nothing of it is guessed, and no password is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.config import UpstreamConfig
from kvrelay.engines.openai.address import address_of, shown_url
from kvrelay.errors import ConfigError


@pytest.mark.parametrize(
    ("upstream", "shown"),
    [
        ("http://gpu1:8000/", "http://gpu1:8000"),
        ("https://gpu1/base/v1/", "https://gpu1/base"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://user:pass@gpu1:8000", "http://gpu1:8000"),
    ],
)
def test_a_url_is_shown_without_password(upstream: str, shown: str) -> None:
    assert shown_url(upstream) == shown


@pytest.mark.parametrize(
    "upstream",
    ["", "gpu1:8000", "http://", "http://a..b", f"http://{'a' * 70}.b", "http://a?b=c", "http://a#b", "http://[::1"],
)
def test_what_is_no_servers_url_is_refused(upstream: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a server"):
        shown_url(upstream)


def test_the_refusal_shows_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        shown_url("ftp://user:secret@gpu1")
    assert "secret" not in caught.value.message


def test_a_request_has_the_urls_user_or_the_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert (
        address_of(UpstreamConfig(upstream="http://gpu1", upstream_api_key_file=str(key))).authorization
        == "Bearer secret"
    )
    assert address_of(UpstreamConfig(upstream="http://u:p%40@gpu1")).authorization == "Basic dTpwQA=="
    assert not address_of(UpstreamConfig(upstream="http://gpu1")).authorization
    with pytest.raises(ConfigError, match="one of them"):
        address_of(UpstreamConfig(upstream="http://u:p@gpu1", upstream_api_key_file=str(key)))


@pytest.mark.parametrize("content", ["", "two\nlines", "a b", "nul\0"])
def test_a_file_without_a_key_is_refused(content: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    with pytest.raises(ConfigError, match="has no key"):
        address_of(UpstreamConfig(upstream="http://gpu1", upstream_api_key_file=str(key)))
