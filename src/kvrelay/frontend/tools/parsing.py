"""Calls in an answer's text, by dialect.

    CONTENT ──marker──> BETWEEN ──"{" or a name──> CALL ──> BETWEEN ──end──> CONTENT
       ^                                            │
       └────────────── it is no call ───────────────┘   the text was not a call

Text that cannot be a call of an existing function is content, character for character. A call whose text ends early has
the arguments written so far.
"""

from __future__ import annotations

import enum
import re

from kvrelay.frontend.tools.base import CallDelta, Delta, held_back
from kvrelay.frontend.tools.dialects import Dialect
from kvrelay.frontend.tools.scanner import CallScanner, ScanState

_SPACE = " \t\r\n"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"
MAX_HEAD_CHARS = 256
"""Between a function's name and its arguments."""


class ParseState(enum.Enum):
    OPENING = enum.auto()
    """Only white space so far, and calls need no marker."""
    CONTENT = enum.auto()
    BETWEEN = enum.auto()
    CALL = enum.auto()
    PLAIN = enum.auto()
    """No call can follow."""


class ToolParser:
    """Implements ``OutputParser``. ``single``: only the first call is returned."""

    def __init__(self, dialect: Dialect, names: frozenset[str], single: bool = False) -> None:
        self.num_calls = 0
        self._dialect = dialect
        self._names = names
        self._single = single
        self._start = ParseState.CONTENT if dialect.marker else ParseState.OPENING
        self._state = self._start
        self._buffer = ""
        self._raw = ""
        """The text since the marker, in case it is not a call."""
        self._scanner: CallScanner | None = None
        self._is_named = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> Delta:
        self._buffer += text
        return self._read(is_last=False)

    def flush(self) -> Delta:
        delta = self._read(is_last=True)
        rest = self._raw + self._buffer if not self._is_named else ""
        self._raw = self._buffer = ""
        return delta + Delta(content=rest)

    def _read(self, is_last: bool) -> Delta:
        steps = {
            ParseState.OPENING: self._opening,
            ParseState.CONTENT: self._in_content,
            ParseState.BETWEEN: self._between,
            ParseState.CALL: self._in_call,
            ParseState.PLAIN: self._plain,
        }
        while self._buffer and steps[self._state](is_last):
            pass
        delta = Delta("".join(self._content), "", tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    # Each step reads some of the buffer and returns whether another step may read more.

    def _plain(self, is_last: bool) -> bool:
        self._content.append(self._buffer)
        self._buffer = ""
        return False

    def _opening(self, is_last: bool) -> bool:
        text = self._buffer.lstrip(_SPACE)
        optional = self._dialect.optional
        if not text or (not is_last and text != optional and optional.startswith(text)):
            return False
        is_call = text.startswith(("{", optional))
        self._state = ParseState.BETWEEN if is_call else ParseState.PLAIN
        return True

    def _in_content(self, is_last: bool) -> bool:
        marker = self._dialect.marker
        at = self._buffer.find(marker)
        if at < 0:
            # White space before a marker is not content, so it waits too.
            kept = 0 if is_last else held_back(self._buffer, marker)
            shown = self._buffer[: len(self._buffer) - kept]
            is_kept = is_last and not self.num_calls
            shown = shown if is_kept else shown.rstrip(_SPACE)
            self._content.append(shown)
            self._buffer = "" if is_last else self._buffer[len(shown) :]
            return False
        shown = self._buffer[:at].rstrip(_SPACE)
        self._content.append(shown)
        end = at + len(marker)
        self._raw, self._buffer = self._buffer[len(shown) : end], self._buffer[end:]
        self._state, self._is_named = ParseState.BETWEEN, False
        return True

    def _between(self, is_last: bool) -> bool:
        """Space, separators and markers, then a call, or something else."""
        dialect, text = self._dialect, self._buffer
        if text[0] in _SPACE:
            return self._skip(1)
        for word in (dialect.end, dialect.marker, dialect.optional):
            if word and text.startswith(word):
                self._skip(len(word))
                if word == dialect.end:
                    self._leave_calls()
                return True
            if word and not is_last and word.startswith(text):
                return False
        if text[0] in dialect.skipped:
            return self._skip(1)
        if text[0] == "{":
            self._begin(CallScanner(self._names))
            return True
        if dialect.has_names:
            return self._named(is_last)
        self._no_call()
        return True

    def _named(self, is_last: bool) -> bool:
        """``f[ARGS]{``, ``f[CALL_ID]x[ARGS]{`` or ``f{``."""
        found = _NAME.match(self._buffer)
        if found is None or found[0] not in self._names:
            if found is not None and found.end() == len(self._buffer) and not is_last:
                return False
            self._no_call()
            return True
        rest = self._buffer[found.end() :]
        brace = rest.find("{")
        if brace < 0:
            if is_last or len(rest) > MAX_HEAD_CHARS:
                self._no_call()
                return True
            return False
        head = rest[:brace].strip(_SPACE)
        if brace > MAX_HEAD_CHARS or not _is_head(head):
            self._no_call()
            return True
        self._skip(found.end() + brace)
        self._begin(CallScanner(self._names, found[0]))
        return True

    def _in_call(self, is_last: bool) -> bool:
        scanner = self._scanner
        assert scanner is not None
        end = scanner.feed(self._buffer)
        if not self._is_named:
            self._raw += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if scanner.has_begun:
            self._pass_on(scanner)
        if scanner.is_over:
            self._scanner = None
            if scanner.state is ScanState.FAILED and not self._is_named:
                self._no_call()
            else:
                self._state = ParseState.BETWEEN
        return True

    def _pass_on(self, scanner: CallScanner) -> None:
        is_first = not self._is_named
        if is_first:
            self._is_named, self._raw = True, ""
            self.num_calls += 1
        arguments = scanner.arguments()
        index = self.num_calls - 1
        if (is_first or arguments) and not (self._single and index):
            self._calls.append(CallDelta(index, scanner.name if is_first else None, arguments))

    def _begin(self, scanner: CallScanner) -> None:
        self._scanner, self._state, self._is_named = scanner, ParseState.CALL, False

    def _skip(self, count: int) -> bool:
        if not self._is_named:
            self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]
        return True

    def _leave_calls(self) -> None:
        if not self._is_named:
            self._content.append(self._raw)
        self._raw, self._state, self._is_named = "", self._start, False

    def _no_call(self) -> None:
        """The text since the marker or the last call is content."""
        if not self._is_named:
            self._content.append(self._raw)
        self._raw, self._is_named = "", False
        self._state = ParseState.CONTENT if self._dialect.marker else ParseState.PLAIN


def _is_head(text: str) -> bool:
    """The text that may separate a function's name and its arguments."""
    return text in ("", _ARGS) or (text.startswith(_CALL_ID) and text.endswith(_ARGS))
