"""Paths of Unix sockets: an address holds 107 bytes, and a directory's name may be longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_path(directory: Path, name: str) -> Iterator[str]:
    """A path of ``name`` in ``directory`` that fits into an address, to bind or connect within this context. Raises
    OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}" if os.path.isdir("/proc/self/fd") else str(directory / name)
    finally:
        os.close(fd)
