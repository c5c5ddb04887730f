"""Calls in an answer's text, by dialect.

    CONTENT ──marker──> BETWEEN ──"{" or a name──> CALL ──> BETWEEN ──end──> CONTENT
       ^                                            │
       └────────────── it is no call ───────────────┘   the text was not a call

Text that cannot be a call of an existing function is content, character for character. A call whose text ends early has
the arguments written so far.

``CallScanner`` reads one call as JSON, character by character: ``{"name": "f", "arguments": {...}}``. Once the name is
known, the arguments are passed on as they are written; nothing is re-encoded. Time is linear in the text.
"""

from __future__ import annotations

import enum
import json
import re

from kvrelay.frontend.openai.answer import CallDelta, ParsedDelta
from kvrelay.frontend.tools.dialects import Dialect

_SPACE = " \t\r\n"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"
MAX_HEAD_CHARS = 256
"""Between a function's name and its arguments."""
MAX_SPACE = 256
"""White space that waits until it is clear whether a marker follows. More of it is content like any text."""


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
        self._at = 0
        """What precedes it in the buffer has been read."""
        self._raw: list[str] = []
        """The text since the marker, in case it is not a call."""
        self._scanner: CallScanner | None = None
        self._is_named = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> ParsedDelta:
        self._buffer += text
        return self._read(is_last=False)

    def flush(self) -> ParsedDelta:
        delta = self._read(is_last=True)
        rest = "".join(self._raw) + self._buffer if not self._is_named else ""
        self._raw, self._buffer = [], ""
        return delta + ParsedDelta(content=rest)

    def _read(self, is_last: bool) -> ParsedDelta:
        steps = {
            ParseState.OPENING: self._opening,
            ParseState.CONTENT: self._in_content,
            ParseState.BETWEEN: self._between,
            ParseState.CALL: self._in_call,
            ParseState.PLAIN: self._plain,
        }
        while self._at < len(self._buffer) and steps[self._state](is_last):
            pass
        self._buffer, self._at = self._buffer[self._at :], 0
        delta = ParsedDelta("".join(self._content), "", tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    # Each step reads some of the buffer and returns whether another step may read more.

    def _plain(self, is_last: bool) -> bool:
        self._content.append(self._buffer[self._at :])
        self._at = len(self._buffer)
        return False

    def _opening(self, is_last: bool) -> bool:
        text = self._buffer.lstrip(_SPACE)
        optional = self._dialect.optional
        is_open = len(self._buffer) - len(text) <= MAX_SPACE
        if is_open and (not text or (not is_last and text != optional and optional.startswith(text))):
            return False
        is_call = is_open and text.startswith(("{", optional))
        self._state = ParseState.BETWEEN if is_call else ParseState.PLAIN
        return True

    def _in_content(self, is_last: bool) -> bool:
        marker = self._dialect.marker
        marker_at = self._buffer.find(marker, self._at)
        if marker_at < 0:
            # White space before a marker is not content, so it waits too.
            kept = 0 if is_last else held_back(self._buffer[-len(marker) :], marker)
            shown = self._buffer[self._at : len(self._buffer) - kept]
            is_kept = is_last and not self.num_calls
            shown = shown if is_kept else _without_space(shown)
            self._content.append(shown)
            self._at = len(self._buffer) if is_last else self._at + len(shown)
            return False
        shown = _without_space(self._buffer[self._at : marker_at])
        self._content.append(shown)
        start, self._at = self._at + len(shown), marker_at + len(marker)
        self._raw = [self._buffer[start : self._at]]
        self._state, self._is_named = ParseState.BETWEEN, False
        return True

    def _between(self, is_last: bool) -> bool:
        """Space, separators and markers, then a call, or something else."""
        dialect, text, at = self._dialect, self._buffer, self._at
        if text[at] in _SPACE:
            return self._skip(1)
        for word in (dialect.end, dialect.marker, dialect.optional):
            if word and text.startswith(word, at):
                self._skip(len(word))
                if word == dialect.end:
                    self._leave_calls()
                return True
            if word and not is_last and word.startswith(text[at : at + len(word)]):
                return False
        if text[at] in dialect.skipped:
            return self._skip(1)
        if text[at] == "{":
            self._begin(CallScanner(self._names))
            return True
        if dialect.has_names:
            return self._named(is_last)
        self._no_call()
        return True

    def _named(self, is_last: bool) -> bool:
        """``f[ARGS]{``, ``f[CALL_ID]x[ARGS]{`` or ``f{``."""
        found = _NAME.match(self._buffer, self._at)
        if found is None or found[0] not in self._names:
            if found is not None and found.end() == len(self._buffer) and not is_last:
                return False
            self._no_call()
            return True
        head, brace, _ = self._buffer[found.end() : found.end() + MAX_HEAD_CHARS + 1].partition("{")
        if not brace and not is_last and len(head) <= MAX_HEAD_CHARS:
            return False
        if not brace or not _is_head(head.strip(_SPACE)):
            self._no_call()
            return True
        self._skip(len(found[0]) + len(head))
        self._begin(CallScanner(self._names, found[0]))
        return True

    def _in_call(self, is_last: bool) -> bool:
        scanner = self._scanner
        assert scanner is not None
        self._skip(scanner.feed(self._buffer, self._at) - self._at)
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
            self._is_named, self._raw = True, []
            self.num_calls += 1
        arguments = scanner.arguments()
        index = self.num_calls - 1
        if (is_first or arguments) and not (self._single and index):
            self._calls.append(CallDelta(index, scanner.name if is_first else None, arguments))

    def _begin(self, scanner: CallScanner) -> None:
        self._scanner, self._state, self._is_named = scanner, ParseState.CALL, False

    def _skip(self, count: int) -> bool:
        start, self._at = self._at, self._at + count
        if not self._is_named:
            self._raw.append(self._buffer[start : self._at])
        return True

    def _leave_calls(self) -> None:
        self._drop_raw()
        self._state = self._start

    def _no_call(self) -> None:
        """The text since the marker or the last call is content."""
        self._drop_raw()
        self._state = ParseState.CONTENT if self._dialect.marker else ParseState.PLAIN

    def _drop_raw(self) -> None:
        if not self._is_named:
            self._content += self._raw
        self._raw, self._is_named = [], False


def _without_space(text: str) -> str:
    """The text before white space that precedes a marker."""
    return text[: max(len(text.rstrip(_SPACE)), len(text) - MAX_SPACE)]


def _is_head(text: str) -> bool:
    """The text that may separate a function's name and its arguments."""
    return text in ("", _ARGS) or (text.startswith(_CALL_ID) and text.endswith(_ARGS))


def held_back(text: str, marker: str) -> int:
    """The number of characters at the end of ``text`` that may be the beginning of ``marker``."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


ARGUMENT_KEYS = ("arguments", "parameters")


class ScanState(enum.Enum):
    START = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE_START = enum.auto()
    VALUE = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class CallScanner:
    """``names``: functions that exist; a call of another one fails. With ``name`` given, the text consists of the
    arguments only.

    ``arguments()`` returns the new certain part; ``name`` is None until it is known. A call that fails after its name
    was returned ends, and keeps its arguments so far.
    """

    def __init__(self, names: frozenset[str], name: str | None = None) -> None:
        self.state = ScanState.START if name is None else ScanState.VALUE_START
        self.name = name
        self._names = names
        self._is_bare = name is not None
        self._key = ARGUMENT_KEYS[0] if self._is_bare else ""
        self._piece: list[str] = []
        """A key, or a value that is needed as a whole."""
        self._arguments: list[str] = []
        self._has_arguments = False
        self._depth = 0
        self._is_string = self._is_escaped = self._is_streamed = False

    @property
    def is_over(self) -> bool:
        return self.state in (ScanState.DONE, ScanState.FAILED)

    @property
    def has_begun(self) -> bool:
        """Whether this is a call: the name is known, and the arguments have begun or there are none."""
        return self.name is not None and (self._has_arguments or self.state is ScanState.DONE)

    def arguments(self) -> str:
        if not self.has_begun:
            return ""
        if self.state is ScanState.DONE and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str, start: int = 0) -> int:
        """Read ``text`` from ``start`` to the end of the call; returns the index at which reading ended."""
        for position in range(start, len(text)):
            self._next(text[position])
            if self.is_over:
                return position + 1
        return len(text)

    def _next(self, char: str) -> None:
        match self.state:
            case ScanState.VALUE:
                self._in_value(char)
            case ScanState.KEY:
                self._in_key(char)
            case _ if char in " \t\r\n":
                pass
            case ScanState.START:
                self.state = ScanState.KEY_OR_END if char == "{" else ScanState.FAILED
            case ScanState.KEY_OR_END if char == '"':
                self._piece, self._is_escaped = [char], False
                self.state = ScanState.KEY
            case ScanState.KEY_OR_END if char == "}":
                self._end()
            case ScanState.KEY_OR_END if char == ",":
                pass
            case ScanState.COLON if char == ":":
                self.state = ScanState.VALUE_START
            case ScanState.VALUE_START if char not in ",:}]":
                self._begin_value(char)
            case _:
                self.state = ScanState.FAILED

    def _in_key(self, char: str) -> None:
        self._piece.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._key = str(_decoded("".join(self._piece)))
            self.state = ScanState.COLON

    def _begin_value(self, char: str) -> None:
        self.state, self._piece, self._depth = ScanState.VALUE, [], 0
        self._is_string = self._is_escaped = False
        self._is_streamed = self._key in ARGUMENT_KEYS and char == "{" and not self._has_arguments
        self._has_arguments = self._has_arguments or self._is_streamed
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if self._depth == 0 and not self._is_string and self._piece and char in ", \t\r\n}]":
            # A number or word has no end marker; the character that ended it is read again.
            self._end_value()
            if self.state is ScanState.KEY_OR_END:
                self._next(char)
            return
        (self._arguments if self._is_streamed else self._piece).append(char)
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
                if self._depth == 0:
                    self._end_value()
        elif char == '"':
            self._is_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _end_value(self) -> None:
        self.state = ScanState.KEY_OR_END
        if not self._is_streamed:
            value = _decoded("".join(self._piece))
            if self._key == "name" and self.name is None:
                if not isinstance(value, str) or value not in self._names:
                    self.state = ScanState.FAILED
                    return
                self.name = value
            elif self._key in ARGUMENT_KEYS and not self._has_arguments:
                # Some models write the arguments as a JSON string.
                if value is not None and not (isinstance(value, str) and isinstance(_decoded(value), dict)):
                    self.state = ScanState.FAILED
                    return
                self._has_arguments = True
                self._arguments.append("{}" if value is None else str(value))
        self._is_streamed = False
        self._piece = []
        if self._is_bare:
            self.state = ScanState.DONE

    def _end(self) -> None:
        self.state = ScanState.DONE if self.name is not None else ScanState.FAILED


def _decoded(text: str) -> object:
    """The JSON value; for invalid JSON a value that is neither a string nor an object."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return False
