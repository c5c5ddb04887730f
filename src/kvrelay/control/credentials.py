"""Refuses a control plane beyond loopback that anybody could join. Pure: it reads URLs only."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvrelay.config import ControlConfig
from kvrelay.core.addresses import is_loopback
from kvrelay.errors import ConfigError

EXAMPLES = {"control": "nats://HOST:PORT", "discovery": "etcd://HOST:PORT"}


def require_credentials(config: ControlConfig) -> None:
    """Raise ConfigError when ``control`` or ``discovery`` is no URL, or names another machine without credentials.

    Credentials are a user, a token, or, for NATS, a credentials file or a client certificate in the URL's query.
    Whoever reaches an open control plane can register workers and learn the keys of the others.
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
                f"--{name} names another machine without credentials: anybody there could join; give user and password "
                f"or a token in the URL, or --insecure on a network that you trust",
                param=name,
            )


def _split(name: str, url: str) -> SplitResult:
    """Raises ConfigError, without what may be a password."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if not parts.hostname:
        shown = url.rpartition("@")[2]
        raise ConfigError(f"--{name} {shown!r} is no URL: expected {EXAMPLES[name]}", param=name)
    return parts
