"""A lock on an open file, kept by the kernel: it ends with the process that holds it, however that ends.

Locks of an open file description (F_OFD_SETLK): two that one process opened exclude each other, too. Nothing here
blocks.
"""

from __future__ import annotations

import errno
import fcntl
import struct

_FORMAT = "hhqqi"
_BUSY = (errno.EAGAIN, errno.EACCES)


def try_lock(fd: int, *, is_shared: bool = False) -> bool:
    """False if another open file has it in a way that excludes this one."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_RDLCK if is_shared else fcntl.F_WRLCK))
    except OSError as exc:
        if exc.errno in _BUSY:
            return False
        raise
    return True


def unlock(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK))


def is_locked(fd: int) -> bool:
    """Whether another open file has it, in whatever way. Asks without taking it."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
    return bool(struct.unpack(_FORMAT, answer)[0] != fcntl.F_UNLCK)


def _request(kind: int) -> bytes:
    return struct.pack(_FORMAT, kind, 0, 0, 1, 0)
