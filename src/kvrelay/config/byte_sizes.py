"""Amounts of memory as an operator writes them."""

from __future__ import annotations

import re

from kvrelay.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
MAX_BYTES = 2**62


def parse_bytes(text: str, param: str = "kv_cache_memory") -> int:
    """Bytes in "512MiB", "4GiB", "1.5GB" or "1048576". Raises ConfigError, which names the setting ``param``."""
    match = re.fullmatch(r"\s*+(\d++(?:\.\d++)?)\s*+([A-Za-z]*+)\s*+", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{param} is not an amount of memory, e.g. 512MiB or 4GiB: {text[:40]!r}", param=param)
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size >= MAX_BYTES:
        raise ConfigError(f"{param}: no machine has so much memory: {text[:40]!r}", param=param)
    return int(size)


def shown_bytes(num_bytes: int) -> str:
    """As an operator reads them: "4.0GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _UNITS[unit.lower()]
        if num_bytes >= size:
            return f"{num_bytes / size:.1f}{unit}"
    return f"{num_bytes} bytes"
