"""The HTTP proxy that the environment names for a URL: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY."""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kvrelay.config.addresses import is_loopback
from kvrelay.errors import ConfigError


def proxy_for(url: str) -> str | None:
    """The proxy's URL, or None; a server on loopback needs none. A proxy without a scheme is an HTTP proxy, as in other
    tools.

    Raises ConfigError for a proxy that is no HTTP proxy. The message shows no password.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = getproxies()
    name = parts.scheme if proxies.get(parts.scheme) else "all"
    proxy = proxies.get(name, "").strip()
    if not proxy or is_loopback(host) or proxy_bypass(host) or proxy_bypass(f"{host}:{parts.port}"):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        found = urlsplit(proxy)
        is_possible = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        is_possible = False
    if not is_possible:
        raise ConfigError(
            f"{name}_proxy in the environment is no URL of an HTTP proxy: expected http://HOST:PORT; "
            f"no_proxy={host} goes without",
            param="upstream",
        )
    return proxy
