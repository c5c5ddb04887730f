"""How discovery's keys are written as subjects of a NATS key-value bucket.

``kvrelay/NS/workers/ID`` becomes ``kvrelay.NS.workers.ID``: one token per level, so that a server's permissions and a
consumer's filter can name a level. Letters, digits, ``-`` and ``_`` stay as they are. Any other byte becomes ``=XX`` in
hexadecimal, and so does a ``/`` that would leave a level empty, which NATS forbids.
"""

from __future__ import annotations

import re

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")
_SLASH = ord("/")


def encode_key(key: str) -> str:
    """The key in NATS's form."""
    raw = key.encode()
    return "".join(_encoded(raw, index) for index in range(len(raw)))


def decode_key(encoded: str) -> str:
    """The inverse of ``encode_key``. Keys that another program wrote are decoded as far as possible."""
    raw = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), encoded.replace(".", "/"))
    try:
        return raw.encode("latin-1").decode()
    except UnicodeError:
        return encoded


def _encoded(raw: bytes, index: int) -> str:
    byte = raw[index]
    if byte == _SLASH and not _is_bad_slash(raw, index):
        return "."
    return chr(byte) if byte in _PLAIN else f"={byte:02X}"


def _is_bad_slash(raw: bytes, index: int) -> bool:
    return index in (0, len(raw) - 1) or raw[index - 1] == _SLASH or raw[index + 1] == _SLASH
