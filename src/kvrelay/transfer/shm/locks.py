"""Who may touch a pool, kept by the kernel: a lock on one byte per worker in the pool's file.

    copier   holds its byte, shared, while it copies        (its own open file)
    owner    takes the copier's byte, exclusive, to bar it  (the owner's open file)

The owner gets the byte only while the copier is not copying, and while the owner has it the copier cannot begin. The
kernel takes a lock back when the copier's process has ended and its mapping is gone, so a copier that is killed frees
its byte, and one that is stopped in the middle of a copy keeps it for as long as it may wake. No clock is involved.

These are locks of an open file description (F_OFD_SETLK): two that one process opened exclude each other too, and
closing another descriptor of the same file frees nothing. The bytes lie far behind the end of the file.
"""

from __future__ import annotations

import errno
import fcntl
import struct

import xxhash

from kvrelay.transfer.values import worker_of

_BUSY = (errno.EAGAIN, errno.EACCES)


class WorkerLock:
    """The byte of ``worker_id``, of a rank its worker's, through the open file ``fd``. Never blocks. Raises OSError for
    what is no answer."""

    def __init__(self, fd: int, worker_id: str) -> None:
        self._fd = fd
        self._byte = xxhash.xxh3_64_intdigest(worker_of(worker_id).encode()) >> 2

    def share(self) -> bool:
        """For the copier. False: the owner has barred it."""
        return self._set(fcntl.F_RDLCK)

    def take(self) -> bool:
        """For the owner. False: the copier is in the middle of a copy."""
        return self._set(fcntl.F_WRLCK)

    def release(self) -> None:
        self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, 0, self._byte, 1, 0))
        except OSError as exc:
            if exc.errno in _BUSY:
                return False
            raise
        return True
