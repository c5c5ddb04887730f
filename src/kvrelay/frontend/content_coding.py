"""Bodies that clients send compressed. Pure."""

from __future__ import annotations

import zlib

from kvrelay.errors import InvalidInputError, PayloadTooLargeError
from kvrelay.frontend.openai.errors import RefusedError

_GZIP = 31
"""zlib's window bits for gzip with its header and checksum."""


def is_coded(coding: str) -> bool:
    """Whether a body of this content-encoding must be decoded. Raises RefusedError (415) unless that is gzip."""
    name = coding.strip().lower()
    if name in ("", "identity"):
        return False
    if name not in ("gzip", "x-gzip"):
        raise RefusedError(f"content-encoding {name[:64]} is not supported, only gzip", 415)
    return True


def gunzipped(body: bytes, max_bytes: int) -> bytes:
    """The body, of at most ``max_bytes``; no more than that is ever decoded.

    Raises PayloadTooLargeError, InvalidInputError for what is not gzip.
    """
    found: list[bytes] = []
    room = max_bytes + 1
    try:
        while body:
            decoder = zlib.decompressobj(_GZIP)
            found.append(decoder.decompress(body, room))
            room -= len(found[-1])
            if room <= 0:
                raise PayloadTooLargeError(f"the decoded body has more than {max_bytes} bytes")
            if not decoder.eof:
                raise InvalidInputError("the gzip body ends too early")
            body = decoder.unused_data
    except zlib.error as exc:
        raise InvalidInputError(f"the body is not gzip: {exc}") from exc
    return b"".join(found)
