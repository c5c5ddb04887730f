"""One log line per request: who asked for what, what came of it, and where it ran.

Neither prompts nor keys are ever logged; a key is named as in the keys file.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

_log = logging.getLogger("kvrelay.access")


@dataclass(frozen=True, slots=True)
class Generated:
    """What is known of a request that generated an answer. ``ttft_s``: from arrival to the first token of its first
    sequence, None if there was none."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    worker: str


class AccessLine(msgspec.Struct, frozen=True):
    """``status`` is an HTTP status, ``disconnected`` or ``broken``."""

    id: str
    key: str
    method: str
    path: str
    status: str
    duration_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    worker: str | None = None


class AccessLog:
    """``mode``: ``off``, ``text`` or ``json``. Lines go to the logger ``kvrelay.access`` at level INFO."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._generated: dict[str, Generated] = {}

    @property
    def is_on(self) -> bool:
        return self._mode != "off"

    def note(self, request_id: str, generated: Generated) -> None:
        """Keep it for the request's line."""
        if self.is_on:
            self._generated[request_id] = generated

    def write(self, request_id: str, key: str, method: str, path: str, status: str, duration_s: float) -> None:
        """The request has ended."""
        if self._mode == "off":
            return
        found = self._generated.pop(request_id, None)
        line = AccessLine(request_id, key, method, path[:200], status, round(duration_s, 6))
        if found is not None:
            ttft_s = None if found.ttft_s is None else round(found.ttft_s, 6)
            line = msgspec.structs.replace(
                line,
                prompt_tokens=found.prompt_tokens,
                output_tokens=found.output_tokens,
                ttft_s=ttft_s,
                worker=found.worker,
            )
        _log.info("%s", msgspec.json.encode(line).decode() if self._mode == "json" else _text(line))


def _text(line: AccessLine) -> str:
    """``name=value`` for what is known; values have no spaces of their own."""
    shown = msgspec.structs.asdict(line)
    return " ".join(f"{name}={_word(value)}" for name, value in shown.items() if value not in (None, ""))


def _word(value: object) -> str:
    return str(value).encode("unicode_escape").decode().replace(" ", "\\x20")
