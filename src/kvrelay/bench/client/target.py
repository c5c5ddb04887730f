"""A server's address, as the connection needs it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvrelay.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Target:
    """Host, port, prefix of all paths (without a slash at the end), key for the Authorization header."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False
    api_key: str | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, content_length: int) -> bytes:
        """The head of a request with a JSON body."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Accept: */*",
            "Content-Type: application/json",
            f"Content-Length: {content_length}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def parse_target(url: str, api_key: str | None = None) -> Target:
    """Read ``http://host:port[/prefix]``; an OpenAI-style ``/v1`` at the end is taken off. Raises InvalidInputError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as exc:
        raise InvalidInputError(f"{url!r} is not a URL: {exc}", param="base_url") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.hostname.isprintable():
        raise InvalidInputError(f"{url!r} is not an http URL", param="base_url")
    if api_key is not None and not api_key.isprintable():
        raise InvalidInputError("the API key has characters that no header may have", param="api_key")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    tls = parts.scheme == "https"
    return Target(parts.hostname, port or (443 if tls else 80), prefix, tls, api_key)
