"""How discovery's keys are written in a NATS key-value bucket.

Letters, digits and ``- / _ .`` stay as they are, so ``kvrelay/NS/workers/ID`` reads the same in ``nats kv ls``. All
else becomes ``=XX``, the byte in hexadecimal; so do ``=`` itself and dots at the ends or beside another dot, which NATS
forbids.
"""

from __future__ import annotations

import re

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-/_.")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")
_DOT = ord(".")


def encode_key(key: str) -> str:
    """The key as NATS takes it."""
    raw = key.encode()
    return "".join(
        chr(byte) if byte in _PLAIN and not (byte == _DOT and _is_bad_dot(raw, index)) else f"={byte:02X}"
        for index, byte in enumerate(raw)
    )


def decode_key(encoded: str) -> str:
    """The inverse of ``encode_key``. What somebody else wrote, in whatever form, comes back as well as it can."""
    raw = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), encoded)
    try:
        return raw.encode("latin-1").decode()
    except UnicodeError:
        return encoded


def _is_bad_dot(raw: bytes, index: int) -> bool:
    return index in (0, len(raw) - 1) or raw[index - 1] == _DOT or raw[index + 1] == _DOT
