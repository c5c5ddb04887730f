"""How long threads have been ready to run without getting a core, by the kernel's own count.

The count never falls, so two readings give the time between them. It is read at most once in ``INTERVAL_S``, however
many requests ask. Elsewhere than on Linux, or without the kernel's statistics, it is 0.
"""

from __future__ import annotations

import os
from contextlib import suppress

NS_PER_S = 1e9
MAX_BYTES = 96
INTERVAL_S = 0.02
"""A reading takes the kernel some microseconds, as much as all other marks of a short request."""


class RunQueue:
    """The threads of this process that watched themselves: each calls ``watch`` once."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._waited_s = self._due_s = 0.0

    def watch(self) -> None:
        """From now on the calling thread counts."""
        with suppress(OSError):
            self._files.append(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))

    def waited_s(self, now_s: float) -> float:
        """Of all watched threads that still run, at most ``INTERVAL_S`` ago. From any thread."""
        if now_s >= self._due_s:
            self._due_s = now_s + INTERVAL_S
            self._read()
        return self._waited_s

    def _read(self) -> None:
        waited_ns = 0
        for file in self._files:
            with suppress(OSError, ValueError, IndexError):
                waited_ns += int(os.pread(file, MAX_BYTES, 0).split(None, 2)[1])
        self._waited_s = max(self._waited_s, waited_ns / NS_PER_S)

    def close(self) -> None:
        """Idempotent."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)
