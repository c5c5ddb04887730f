"""Chooses the parsers of an answer by the frontend's settings, the model's chat template and the request."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.frontend.openai.answer import OutputParser
from kvrelay.frontend.tokens.chat_template import ChatTemplate
from kvrelay.frontend.tools.chat_form import ChatForm
from kvrelay.frontend.tools.dialects import DIALECTS, Dialect, guessed_dialect
from kvrelay.frontend.tools.reasoning import ReasoningParser, reasons_at_once


class OutputParsers:
    """``tool_call_parser`` is a dialect's name or ``auto``; ``reasoning_parser`` a parser's name or ``none``."""

    def __init__(self, tool_call_parser: str, reasoning_parser: str) -> None:
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser

    def dialect(self, template: ChatTemplate | None) -> Dialect | None:
        """The dialect of a model with this template; None if unknown."""
        if self._tool_call_parser != "auto":
            return DIALECTS[self._tool_call_parser]
        return guessed_dialect(template.source if template is not None else "")

    def parser(self, form: ChatForm, prompt: str) -> Callable[[], OutputParser] | None:
        """A factory of parsers, one per choice; None if the text is the content.

        An answer that is bound by a grammar has no reasoning: the grammar begins with its first token.
        """
        tools = form.tools
        if self._reasoning_parser == "none" or form.constraint is not None:
            return tools.parser if tools is not None else None
        is_inside = reasons_at_once(self._reasoning_parser, prompt)
        return lambda: ReasoningParser(is_inside, tools.parser() if tools is not None else None)
