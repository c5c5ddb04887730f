"""Who may look at the page and at ``/debug``: keys as a bearer token, or as the password of HTTP Basic (RFC 7617),
which a browser asks its user for. Pure.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.access.api_keys import ApiKeys

BASIC_CHALLENGE = b'Basic realm="kvrelay: any name, and an API key as the password"'


class NotPermittedError(InvalidInputError):
    """The key is valid and does not open this."""

    status = 403


@dataclass(frozen=True, slots=True)
class Viewer:
    """``name``: of the key, as in its file; empty if no key is needed. ``sees_all``: every request, else only those
    that were sent with this key. ``sees_cluster``: workers, load and rates of all."""

    name: str
    sees_all: bool
    sees_cluster: bool


class Viewers:
    """Keys of the metrics file see everything. Other API keys see their own requests, and the cluster only if there is
    no metrics file. Without any key everyone sees everything."""

    def __init__(self, keys: ApiKeys, metrics_keys: ApiKeys) -> None:
        self._keys = keys
        self._metrics_keys = metrics_keys

    def viewer(self, authorization: str) -> Viewer | None:
        """The owner of the key in an authorization header; None if no key matches."""
        if not (self._keys or self._metrics_keys):
            return Viewer("", sees_all=True, sees_cluster=True)
        bearer = as_bearer(authorization)
        if self._metrics_keys and (name := self._metrics_keys.name_of(bearer)) is not None:
            return Viewer(name, sees_all=True, sees_cluster=True)
        if self._keys and (name := self._keys.name_of(bearer)) is not None:
            return Viewer(name, sees_all=False, sees_cluster=not self._metrics_keys)
        return None


def as_bearer(authorization: str) -> str:
    """The same key as a bearer token; what is no Basic credential stays as it is."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        pair = base64.b64decode(credentials.strip(), validate=True).decode("latin-1")
    except (binascii.Error, ValueError):
        return ""
    return f"Bearer {pair.partition(':')[2]}"
