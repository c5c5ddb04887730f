"""Cross-origin requests: which web pages of other origins may ask (the Fetch standard, "CORS protocol"). Pure."""

from __future__ import annotations

import re

from kvrelay.errors import ConfigError
from kvrelay.http import HttpRequest, Response

Headers = list[tuple[bytes, bytes]]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^\s/,]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-, ]{1,1000}")
_EXPOSED = b"x-request-id, x-kvrelay-worker, x-kvrelay-decision, retry-after"
_DEFAULT_HEADERS = "authorization, content-type, x-request-id, x-request-timeout-s"
MAX_AGE_S = 600


class AllowedOrigins:
    """``setting``: origins such as ``https://example.org``, separated by commas; ``*`` for all; empty for none.

    Raises ConfigError for what is no origin.
    """

    def __init__(self, setting: str) -> None:
        self._origins = frozenset(item.strip() for item in setting.split(",") if item.strip())
        for origin in self._origins - {"*"}:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin} is no origin such as https://example.org", param="allowed_origins"
                )

    def headers(self, request: HttpRequest) -> Headers:
        """What an answer to ``request`` carries."""
        if not self._origins:
            return []
        origin = request.headers.get("origin", "")
        if "*" in self._origins:
            allowed = b"*"
        elif origin in self._origins:
            allowed = origin.encode()
        else:
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight(self, request: HttpRequest, method: str) -> Response | None:
        """The answer to a browser's question whether it may send ``method``; None if ``request`` is none."""
        if request.method != "OPTIONS" or "access-control-request-method" not in request.headers:
            return None
        headers = self.headers(request)
        if len(headers) < 2:
            return None
        wanted = request.headers.get("access-control-request-headers", _DEFAULT_HEADERS)
        names = wanted if _HEADER_NAMES.fullmatch(wanted) else _DEFAULT_HEADERS
        headers += [
            (b"access-control-allow-methods", method.encode()),
            (b"access-control-allow-headers", names.encode()),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]
        return Response(200, headers=headers)
