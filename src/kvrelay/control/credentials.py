"""Refuses a control plane beyond loopback without credentials. Pure: it reads URLs only."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvrelay.config import ControlConfig
from kvrelay.config.addresses import is_loopback
from kvrelay.errors import ConfigError

EXAMPLES = {"control": "nats://HOST:PORT", "discovery": "etcd://HOST:PORT"}


def require_credentials(config: ControlConfig) -> None:
    """Raise ConfigError if ``control`` or ``discovery`` is not a URL, or names another machine without credentials.

    Credentials are a user, a token, or, for NATS, a credentials file or a client certificate in the URL's query.
    Any process that reaches an open control plane can register workers and learn the keys of the others.
    """
    if config.insecure:
        return
    for name, urls in (("control", config.control), ("discovery", config.discovery)):
        parts = [_split(name, url) for url in urls.split(",") if url]
        if all(is_loopback(part.hostname or "") for part in parts):
            continue
        queries = {key for part in parts for key, _ in parse_qsl(part.query)}
        if not (any(part.username for part in parts) or queries & {"creds", "cert"}):
            raise ConfigError(
                f"--{name} names another machine without credentials, so any process on that network could join; give "
                f"user and password or a token in the URL (best in KVRELAY_{name.upper()}), or --insecure on a network "
                f"that you trust",
                param=name,
            )


def _split(name: str, url: str) -> SplitResult:
    """Raises ConfigError; its message leaves out a possible password."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if not parts.hostname:
        shown = url.rpartition("@")[2]
        raise ConfigError(f"--{name} {shown!r} is not a URL: expected {EXAMPLES[name]}", param=name)
    return parts
