"""Bytes from outside: what a decoder raises for them, and what an error body says."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What msgspec's decoders raise for data from outside: malformed, no UTF-8, nested too deeply."""


def error_text(body: bytes, max_chars: int = 200) -> str:
    """The message in a server's error body, in one line. Whose server it is, is not known: errors may be anything."""
    try:
        decoded = msgspec.json.decode(body)
    except UNREADABLE:
        decoded = body.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(decoded, dict) and key in decoded:
            decoded = decoded[key]
    return " ".join(str(decoded).split())[:max_chars]
