"""Separates a model's reasoning, between ``<think>`` and ``</think>``, from its answer."""

from __future__ import annotations

import enum

from kvrelay.frontend.openai.answer import OutputParser, ParsedDelta
from kvrelay.frontend.tools.parsing import MAX_SPACE, held_back

BEGIN, END = "<think>", "</think>"
_SPACE = " \t\r\n"


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()
    ANSWER = enum.auto()


def reasons_at_once(parser: str, prompt: str) -> bool:
    """Whether the answer begins with reasoning, because the prompt's end has opened it.

    DeepSeek-R1 always reasons, unless the prompt has closed its reasoning.
    """
    end = prompt.rstrip()
    return end.endswith(BEGIN) or (parser == "deepseek_r1" and not end.endswith(END))


class ReasoningParser:
    """Implements ``OutputParser``. Text that is not reasoning goes to ``answer``, or is content if that is None."""

    def __init__(self, is_inside: bool, answer: OutputParser | None = None) -> None:
        self._answer = answer
        self._state = _State.BEFORE
        self._is_inside = is_inside
        self._buffer = ""

    def push(self, text: str) -> ParsedDelta:
        self._buffer += text
        delta = ParsedDelta()
        if self._state is _State.BEFORE and not self._begin():
            return delta
        if self._state is _State.INSIDE:
            delta = self._reason()
        if self._state is _State.BEHIND:
            self._buffer = self._buffer.lstrip(_SPACE)
            if self._buffer:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            delta += self._pass_on()
        return delta

    def flush(self) -> ParsedDelta:
        if self._state is _State.INSIDE or (self._state is _State.BEFORE and self._is_inside):
            delta = ParsedDelta(reasoning=self._buffer)
            self._buffer = ""
        else:
            delta = self._pass_on()
        return delta + (self._answer.flush() if self._answer is not None else ParsedDelta())

    def _begin(self) -> bool:
        """Whether the answer's beginning is decided."""
        text = self._buffer.lstrip(_SPACE)
        is_open = len(self._buffer) - len(text) <= MAX_SPACE
        if is_open and BEGIN.startswith(text) and text != BEGIN:
            return False
        if is_open and text.startswith(BEGIN):
            self._buffer, self._state = text[len(BEGIN) :], _State.INSIDE
        else:
            self._state = _State.INSIDE if self._is_inside else _State.ANSWER
        return True

    def _reason(self) -> ParsedDelta:
        at = self._buffer.find(END)
        if at >= 0:
            reasoning, self._buffer = self._buffer[:at], self._buffer[at + len(END) :]
            self._state = _State.BEHIND
        else:
            size = len(self._buffer) - held_back(self._buffer, END)
            reasoning, self._buffer = self._buffer[:size], self._buffer[size:]
        return ParsedDelta(reasoning=reasoning)

    def _pass_on(self) -> ParsedDelta:
        text, self._buffer = self._buffer, ""
        if not text:
            return ParsedDelta()
        return self._answer.push(text) if self._answer is not None else ParsedDelta(content=text)
