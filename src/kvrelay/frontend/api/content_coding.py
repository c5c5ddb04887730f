"""Bodies as clients may encode them. Pure."""

from __future__ import annotations

import codecs
import zlib

from kvrelay.errors import InvalidInputError, PayloadTooLargeError
from kvrelay.frontend.side_threads import Pieces
from kvrelay.http.errors import RequestRefusedError

_GZIP = 31
"""zlib's window bits for gzip with its header and checksum."""
MAX_MEMBERS = 1024
"""Compressors write one, or one per some tens of kB."""
_PIECE_BYTES = 2**16
_DECODED_BYTES = 2**20
"""Of one piece, which takes some milliseconds."""


def utf8_json(body: bytes) -> bytes:
    """JSON without the byte order mark that some writers put before it (RFC 8259, 8.1).

    Raises InvalidInputError for UTF-16 and UTF-32, where one of the first bytes is a mark or zero.
    """
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in body[:4]:
        raise InvalidInputError("the body is not UTF-8 (it looks like UTF-16 or UTF-32): send JSON as UTF-8")
    return body.removeprefix(codecs.BOM_UTF8)


def is_coded(coding: str) -> bool:
    """Whether a body of this content-encoding must be decoded. Raises RequestRefusedError (415) unless that is gzip."""
    name = coding.strip().lower()
    if name in ("", "identity"):
        return False
    if name not in ("gzip", "x-gzip"):
        raise RequestRefusedError(f"content-encoding {name[:64]} is not supported, only gzip", 415)
    return True


def gunzipped(body: bytes, max_bytes: int) -> Pieces[bytes]:
    """The body, of at most ``max_bytes``; no more than that is ever decoded.

    Raises PayloadTooLargeError, InvalidInputError for what is not gzip.
    """
    found: list[bytes] = []
    room = max_bytes + 1
    start = num_members = 0
    coded, decoder = b"", None
    try:
        while coded or start < len(body):
            if not coded:
                # Of a small piece, what is left after a member is copied quickly.
                coded, start = body[start : start + _PIECE_BYTES], start + _PIECE_BYTES
            if decoder is None:
                num_members += 1
                if num_members > MAX_MEMBERS:
                    raise InvalidInputError(f"the gzip body has more than {MAX_MEMBERS} members")
                decoder = zlib.decompressobj(_GZIP)
            found.append(decoder.decompress(coded, min(room, _DECODED_BYTES)))
            room -= len(found[-1])
            if room <= 0:
                raise PayloadTooLargeError(f"the decoded body has more than {max_bytes} bytes")
            coded = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            if decoder.eof:
                decoder = None
            yield
    except zlib.error as exc:
        raise InvalidInputError(f"the body is not gzip: {exc}") from exc
    if decoder is not None:
        raise InvalidInputError("the gzip body ends too early")
    return b"".join(found)
