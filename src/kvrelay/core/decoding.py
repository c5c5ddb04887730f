"""What a decoder of untrusted bytes raises."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What msgspec's decoders raise for data from outside: malformed, no UTF-8, nested too deeply."""
