"""Renders a checkpoint's chat template in jinja2's sandbox, with the names that Hugging Face templates expect."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.errors import CheckpointError, InvalidInputError, PromptTooLongError


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, this one does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _joined(pieces: Iterable[str], max_chars: int) -> str:
    """Raises PromptTooLongError once the text is too long: a template may repeat a few messages without end."""
    found: list[str] = []
    num_chars = 0
    for piece in pieces:
        found.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise PromptTooLongError(
                f"The chat template turns these messages into more than {max_chars} characters; they cannot fit.",
                param="messages",
                code="context_length_exceeded",
            )
    return "".join(found)


class ChatTemplate:
    """A compiled template. ``special_tokens`` are names such as ``bos_token`` with their text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError) as exc:
            # SyntaxError and RecursionError come from Python's own compiler, for templates that are nested too deeply.
            raise CheckpointError(f"the chat template is malformed: {exc}") from exc
        self._special_tokens = dict(special_tokens)
        self.source = source

    @property
    def knows_tools(self) -> bool:
        """Whether it says anything of functions that can be called."""
        return "tools" in self.source

    @property
    def knows_developer(self) -> bool:
        """Whether it knows the role ``developer``."""
        return "developer" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, object] | None = None,
        max_chars: int = sys.maxsize,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The prompt.

        Raises InvalidInputError if the template refuses the messages, PromptTooLongError if it writes more than
        ``max_chars``.
        """
        names: dict[str, object] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(arguments or {}),
            **({"tools": tools} if tools else {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _joined(self._template.generate(names), max_chars)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as exc:
            raise InvalidInputError(f"the chat template refuses these messages: {exc}", param="messages") from exc
