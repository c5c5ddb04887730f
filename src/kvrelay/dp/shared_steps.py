"""The step protocol between processes of one host: the coordinator's state in shared memory, and a bell for each
rank.

    memory (memfd)     [ step: int64 ]           written under a lock, read by every rank
    bells (eventfd)    one per rank              rung when the step has risen

There is no message to a coordinator: the rank that begins a step takes the lock, runs ``protocol.Coordinator`` on the
shared state, and rings. A rank sleeps in ``poll`` on its bell. The kernel releases the lock if its holder dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence

from kvrelay.dp.protocol import Coordinator, StartStep, Step, StepsUntil

_LOCK, _UNLOCK = (struct.pack("hhqqi", kind, 0, 0, 1, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))


def create_descriptors(num_ranks: int) -> list[int]:
    """The memory, then the bells. Each rank gets copies of all descriptors; the caller closes its own."""
    memory = os.memfd_create("kvrelay-dp-step")
    os.ftruncate(memory, mmap.PAGESIZE)
    return [memory, *(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num_ranks))]


class SharedSteps:
    """One rank's end. Owns the given descriptors. One thread calls ``start_step``, one calls ``heard``."""

    def __init__(self, descriptors: Sequence[int], rank: int, lookahead: int) -> None:
        memory, *self._bells = descriptors
        # Open the file again: locks belong to open files, and a passed descriptor shares its sender's open file.
        self._lock_fd = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(memory, mmap.PAGESIZE)
        os.close(memory)
        self._step = memoryview(self._map).cast("q")
        self._lookahead = lookahead
        self.bell = self._bells[rank]
        self._in_order = [*self._bells[rank + 1 :], *self._bells[: rank + 1]]
        """The others' bells first: our own thread, once awake, would take the interpreter from the ringer."""

    def start_step(self, message: StartStep) -> int:
        """Raise the shared step if this one is not covered, and wake every rank. Returns the number of ranks woken."""
        fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLKW, _LOCK)
        try:
            told = Coordinator(self._lookahead, self._step[0]).start_step(message.step)
            if told is None:
                return 0
            self._step[0] = told.step
            # Under the lock: a bell's reader does not take it, and a rank sleeps shorter by a system call.
            for bell in self._in_order:
                os.eventfd_write(bell, 1)
        finally:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLKW, _UNLOCK)
        return len(self._bells)

    def take(self) -> StepsUntil:
        """The bell has rung."""
        try:
            os.eventfd_read(self.bell)
        except BlockingIOError:
            pass
        return StepsUntil(self._step[0])

    @property
    def step(self) -> Step:
        return int(self._step[0])

    def close(self) -> None:
        self._step.release()
        self._map.close()
        for fd in (self._lock_fd, *self._bells):
            os.close(fd)
