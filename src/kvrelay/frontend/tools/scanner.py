"""One call as JSON, character by character: ``{"name": "f", "arguments": {...}}``.

Once the name is known, the arguments are passed on as they are written; nothing is re-encoded. Time is linear in the
text.
"""

from __future__ import annotations

import enum
import json

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
