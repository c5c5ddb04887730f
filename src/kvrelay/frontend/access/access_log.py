"""One line per request, always: who asked for what, what came of it, and where it ran.

The lines have a file or stdout of their own. They are no log messages: neither a level nor the limit of repeated lines
drops any. Neither prompts nor keys are ever written; a key is named as in the keys file.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime

import msgspec

from kvrelay.errors import ConfigError

_log = logging.getLogger(__name__)

STDOUT = 1


class Generated(msgspec.Struct, frozen=True):
    """What is known of a request that generated an answer; None: of one that did not. ``ttft_s``: from arrival to the
    first token of its first sequence, None if there was none."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    worker: str | None = None


NOTHING = Generated()


class AccessLog:
    """``mode``: ``off``, ``text`` or ``json``. ``path``: the file, empty for stdout. The file is opened again after it
    was renamed or removed, as ``logrotate`` does. Processes may share one: each line is one write at its end."""

    def __init__(self, mode: str, path: str = "") -> None:
        """Raises ConfigError if the file cannot be written."""
        self._mode = mode
        self._path = path
        self._fd = STDOUT
        self._generated: dict[str, Generated] = {}
        if self.is_on and path:
            try:
                self._open()
            except OSError as exc:
                raise ConfigError(f"cannot write the access log: {exc}", param="access_log_file") from exc

    @property
    def is_on(self) -> bool:
        return self._mode != "off"

    def note(self, request_id: str, generated: Generated) -> None:
        """Keep it for the request's line."""
        if self.is_on:
            self._generated[request_id] = generated

    def write(self, request_id: str, key: str, method: str, path: str, status: str, duration_s: float) -> None:
        """The request has ended now. ``status`` is an HTTP status, ``disconnected`` or ``broken``. ``request_id`` is
        ``-`` for a request that was refused by its head; ``method`` and ``path`` are empty if not even those were
        readable."""
        if not self.is_on:
            return
        found = self._generated.pop(request_id, NOTHING)
        line = {
            "time": datetime.now(UTC),
            "id": request_id,
            "key": key,
            "method": method,
            "path": path[:200],
            "status": status,
            "duration_s": round(duration_s, 6),
            "prompt_tokens": found.prompt_tokens,
            "output_tokens": found.output_tokens,
            "ttft_s": None if found.ttft_s is None else round(found.ttft_s, 6),
            "worker": found.worker,
        }
        data = msgspec.json.encode(line) if self._mode == "json" else _text(line).encode()
        try:
            self._follow()
            os.write(self._fd, data + b"\n")
        except OSError as exc:
            # A full disk must not end the service.
            _log.error("cannot write the access log (%s); a line is lost", exc)

    def close(self) -> None:
        """Idempotent. Nothing is written afterwards."""
        self._mode = "off"
        if self._fd != STDOUT:
            os.close(self._fd)
            self._fd = STDOUT

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        if self._fd != STDOUT:
            os.close(self._fd)
        self._fd, self._file = fd, os.fstat(fd)

    def _follow(self) -> None:
        """Open the file again if another one is at its path now, or none."""
        if self._fd == STDOUT:
            return
        try:
            is_there = os.path.samestat(os.stat(self._path), self._file)
        except FileNotFoundError:
            is_there = False
        if not is_there:
            self._open()


def _text(line: dict[str, object]) -> str:
    """``name=value`` for what is known; values have no spaces of their own."""
    return " ".join(f"{name}={_word(value)}" for name, value in line.items() if value not in (None, ""))


def _word(value: object) -> str:
    text = value.isoformat() if isinstance(value, datetime) else str(value)
    return text.encode("unicode_escape").decode().replace(" ", "\\x20")
