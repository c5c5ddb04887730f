"""One short HTTP call, off the event loop: for health checks and for an operator's requests to a frontend."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from urllib.parse import urlsplit

from kvrelay.errors import InvalidInputError, WorkerUnavailableError


async def http_call(
    url: str,
    method: str,
    path: str,
    *,
    body: object = None,
    api_key: str | None = None,
    timeout_s: float = 10.0,
    verify: bool = True,
) -> tuple[int, bytes]:
    """Status and body of the answer; ``body`` is sent as JSON. ``verify=False`` takes any certificate.

    Raises InvalidInputError for an invalid URL, WorkerUnavailableError if no answer comes within ``timeout_s``.
    """
    return await asyncio.to_thread(_call, url, method, path, body, api_key, timeout_s, verify)


def _call(
    url: str, method: str, path: str, body: object, api_key: str | None, timeout_s: float, verify: bool
) -> tuple[int, bytes]:
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an URL needs http:// or https:// and a host")
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        if parts.scheme == "https":
            context = ssl.create_default_context() if verify else ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
    except ValueError as exc:
        raise InvalidInputError(f"{url!r} is not an http URL: {exc}", param="url") from exc
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request(
            method, parts.path.rstrip("/") + path, json.dumps(body) if body is not None else None, headers
        )
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise WorkerUnavailableError(f"no frontend answers at {url}: {exc or type(exc).__name__}") from exc
    finally:
        connection.close()
