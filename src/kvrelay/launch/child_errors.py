"""Passes the children's stderr on to ours: the same error of n equal workers once, not n times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import IO

WINDOW_S = 10.0
ERROR_PREFIX = b"kvrelay: "
"""The start of the line in which the command line gives its reason to end. Other lines pass unchanged."""


class ChildErrors:
    """Passes lines on to ``write``. It drops an error that another child reported word for word within ``WINDOW_S``."""

    def __init__(self, write: Callable[[bytes], None], now: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._now = now
        self._told: dict[bytes, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def follow(self, name: str, stream: IO[bytes]) -> None:
        """Pass on the lines of child ``name`` until it closes ``stream``."""
        thread = threading.Thread(target=self._run, args=(name, stream), name=f"stderr of {name}", daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    def pass_on(self, name: str, line: bytes) -> None:
        """One line of child ``name``."""
        with self._lock:
            if line.startswith(ERROR_PREFIX) and self._is_told(name, line):
                return
            self._write(line)

    def finish(self, timeout_s: float) -> None:
        """Wait until all lines of the ended children are passed on."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _is_told(self, name: str, line: bytes) -> bool:
        now_s = self._now()
        self._told = {told: (by, at) for told, (by, at) in self._told.items() if now_s - at < WINDOW_S}
        by, _ = self._told.setdefault(line, (name, now_s))
        return by != name

    def _run(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self.pass_on(name, line)
