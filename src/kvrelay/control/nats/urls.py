"""Control URLs of NATS: ``nats://[USER:PASSWORD@|TOKEN@]HOST:PORT`` or ``tls://...[?ca=FILE&cert=FILE&key=FILE]``."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvrelay.control.tls import TLS_OPTIONS, TlsFiles
from kvrelay.errors import ConfigError

SCHEMES = ("nats", "tls")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
URL_OPTIONS = (*TLS_OPTIONS, "creds")


def parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.strip())
        is_valid = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port or 4222) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        shown = url.rpartition("@")[2]
        raise ConfigError(
            f"{shown!r} is not a control URL: expected nats://HOST:PORT or tls://HOST:PORT", param="control"
        )
    return parts


def client_options(servers: list[SplitResult]) -> dict[str, Any]:
    """The login and the options of the URLs, as the library's keyword arguments.

    The first login that is given serves for all servers. Options may be in any of the URLs.
    """
    parts = next((server for server in servers if server.username is not None), servers[0])
    query = dict(pair for server in servers for pair in parse_qsl(server.query))
    unknown = sorted(set(query) - set(URL_OPTIONS))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]} in the control URL (known: {', '.join(URL_OPTIONS)})")
    options: dict[str, Any] = {}
    if "creds" in query:
        options["user_credentials"] = query["creds"]
    if parts.password is not None:
        user = options["user"] = unquote(parts.username or "")
        options["password"] = unquote(parts.password)
        if PLAIN_NAME.fullmatch(user):
            # A server's permissions can tell the users' inboxes apart, so that each user reads only its own answers.
            options["inbox_prefix"] = f"_INBOX_{user}"
    elif parts.username is not None:
        options["token"] = unquote(parts.username)
    files = TlsFiles.of_url("control", query, is_tls=any(server.scheme == "tls" for server in servers))
    if files is not None:
        options["tls"] = files.context()
    return options
