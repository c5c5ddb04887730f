"""Where a server is and how requests reach it: its URL, the proxy before it, and the key."""

from __future__ import annotations

import base64

import msgspec
from yarl import URL

from kvrelay.config import UpstreamConfig
from kvrelay.config.files import read_file
from kvrelay.config.proxy import proxy_for
from kvrelay.errors import ConfigError


class Address(msgspec.Struct, frozen=True):
    """``url`` has no credentials, so that messages may show it, and no ``/v1``. ``authorization`` is the header's value
    or empty. ``proxy``: an HTTP proxy's URL, perhaps with credentials, or None."""

    url: str
    authorization: str = ""
    proxy: str | None = None


def address_of(config: UpstreamConfig) -> Address:
    """Raises ConfigError for settings with which no request can be made."""
    url = shown_url(config.upstream)
    parts = URL(config.upstream.strip())
    authorization = ""
    if parts.user is not None or parts.password is not None:
        if config.upstream_api_key_file:
            raise ConfigError(
                f"the URL of {url} has a user and --upstream-api-key-file is set: a request has one of them",
                param="upstream",
            )
        pair = f"{parts.user or ''}:{parts.password or ''}".encode()
        authorization = f"Basic {base64.b64encode(pair).decode()}"
    elif config.upstream_api_key_file:
        authorization = f"Bearer {_key(config.upstream_api_key_file)}"
    return Address(url, authorization, proxy_for(url))


def shown_url(upstream: str) -> str:
    """The URL without user, password, final slashes and ``/v1``. Raises ConfigError if it is none of a server."""
    try:
        url = URL(upstream.strip())
        # Not every name can be sent to a name server.
        (url.host or "").encode("idna")
        is_possible = url.scheme in ("http", "https") and bool(url.host) and not url.query_string and not url.fragment
    except ValueError:
        is_possible = False
    if not is_possible:
        shown = upstream.rpartition("@")[2]
        raise ConfigError(f"{shown!r} is no URL of a server: expected http://HOST:PORT", param="upstream")
    return str(url.with_user(None)).rstrip("/").removesuffix("/v1")


def _key(path: str) -> str:
    try:
        key = read_file(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the key of the server: {exc}", param="upstream_api_key_file") from exc
    if not key.isprintable() or not key or " " in key:
        raise ConfigError(f"{path} has no key: expected one line without spaces", param="upstream_api_key_file")
    return key
