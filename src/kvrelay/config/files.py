"""Small files that a user names: read to their end, or to a limit, because a device has no end."""

from __future__ import annotations

import errno
from pathlib import Path

MAX_BYTES = 64 * 1024 * 1024


def read_file(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file or pipe. Raises OSError, also for one that is larger."""
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is above {max_bytes:,} bytes", str(path))
    return content
