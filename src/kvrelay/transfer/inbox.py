"""The commands of one thread, which sleeps until one comes or one of a few file descriptors becomes readable."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import suppress

Command = Callable[[], None]


class Inbox:
    """``put`` may be called from any thread, everything else on the one that takes. None as a command means the end."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._bell = -1
        """Rung at each command once file descriptors are watched: the queue's own lock ends no wait for those."""
        self._watched: select.epoll | None = None

    def watch(self, *fds: int) -> None:
        """From now on ``get`` also returns when one of ``fds`` is readable. Commands that are here already are not
        missed."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        watched = select.epoll()
        for each in (self._bell, *fds):
            watched.register(each, select.EPOLLIN)
        self._watched = watched

    def put(self, command: Command | None) -> None:
        self._commands.put(command)
        if self._watched is not None:
            with self._lock:
                if self._watched is not None:
                    os.eventfd_write(self._bell, 1)

    def empty(self) -> bool:
        return self._commands.empty()

    def get_nowait(self) -> Command | None:
        """Raises queue.Empty."""
        return self._commands.get_nowait()

    def get(self, timeout_s: float | None) -> Command | None:
        """Raises queue.Empty after ``timeout_s`` (None: never), or when a watched descriptor is readable."""
        if self._watched is None:
            return self._commands.get(timeout=timeout_s)
        if self._commands.empty():
            self._watched.poll(timeout_s)
        # Before the command is taken: whoever rings later has put one that is still there.
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return self._commands.get_nowait()

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        with self._lock:
            if self._watched is not None:
                self._watched.close()
                os.close(self._bell)
                self._watched = None
