"""The commands of one thread, which sleeps until one comes or a file descriptor becomes readable."""

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
        self._bell: int | None = None
        """Rung at each command once a file descriptor is watched: the queue's own lock ends no wait for that one."""
        self._poller = select.poll()

    @property
    def watches(self) -> bool:
        return self._bell is not None

    def watch(self, fd: int) -> None:
        """From now on ``get`` also returns when ``fd`` is readable. Commands that are here already are not missed."""
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for each in (fd, bell):
            self._poller.register(each, select.POLLIN)
        self._bell = bell

    def put(self, command: Command | None) -> None:
        self._commands.put(command)
        if self._bell is not None:
            with self._lock:
                if self._bell is not None:
                    os.eventfd_write(self._bell, 1)

    def empty(self) -> bool:
        return self._commands.empty()

    def get_nowait(self) -> Command | None:
        """Raises queue.Empty."""
        return self._commands.get_nowait()

    def get(self, timeout_s: float | None) -> Command | None:
        """Raises queue.Empty after ``timeout_s`` (None: never), or when the watched descriptor is readable."""
        if self._bell is None:
            return self._commands.get(timeout=timeout_s)
        if self._commands.empty():
            self._poller.poll(None if timeout_s is None else timeout_s * 1e3)
        # Before the command is taken: whoever rings later has put one that is still there.
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return self._commands.get_nowait()

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        with self._lock:
            if self._bell is not None:
                os.close(self._bell)
                self._bell = None
