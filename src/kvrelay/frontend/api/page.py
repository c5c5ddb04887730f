"""The page at ``/ui/``: static files of the package, served under a strict content security policy.

The page has no data of its own: it reads ``/debug``. Every file is revalidated by its ETag, so a new release shows at
the next load and nothing is sent twice.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from kvrelay.http import Exchange, Response

PAGE = "/ui/"
FOLDER = Path(__file__).parents[1] / "ui"
CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
"""Other files of the folder, such as licences, are not served."""
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Page:
    """The handlers that ``FrontendApp`` expects."""

    def __init__(self) -> None:
        files = [file for file in FOLDER.rglob("*") if file.suffix in CONTENT_TYPES]
        self._files = {PAGE + file.relative_to(FOLDER).as_posix(): file for file in files}
        self._files[PAGE] = FOLDER / "index.html"

    @property
    def paths(self) -> list[str]:
        """Of all files. No other path reaches the disk."""
        return list(self._files)

    async def redirect(self, exchange: Exchange, request_id: str) -> None:
        """To the page, from ``/`` or ``/ui``; relative, so that it works behind a proxy's prefix."""
        exchange.respond(Response(307, headers=[(b"location", PAGE.lstrip("/").encode())]))

    async def show(self, exchange: Exchange, request_id: str) -> None:
        """A file, or 304 if the browser has it."""
        file = self._files[exchange.request.path]
        content, etag = _content(file)
        headers = (*HEADERS, (b"etag", etag.encode()))
        if etag in exchange.request.headers.get("if-none-match", ""):
            exchange.respond(Response(304, b"", CONTENT_TYPES[file.suffix], headers))
        else:
            exchange.respond(Response(200, content, CONTENT_TYPES[file.suffix], headers))


@cache
def _content(file: Path) -> tuple[bytes, str]:
    """The file's bytes and its entity tag."""
    content = file.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:20]}"'
