"""Turns ``tools`` and ``tool_choice`` into the functions to render, a parser for the answer, and its grammar. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.answer import OutputParser
from kvrelay.frontend.openai.bounds import MAX_JSON_SIZE
from kvrelay.frontend.openai.requests import ChatCompletionRequest, Tool
from kvrelay.frontend.openai.structured import Constraint, checked, constraint_of, lark_string, schema_source
from kvrelay.frontend.tokens.chat_template import ChatTemplate
from kvrelay.frontend.tools.dialects import DIALECTS, LLAMA3_JSON, NAME, Dialect, guessed_dialect, written_dialect
from kvrelay.frontend.tools.parsing import ToolParser
from kvrelay.frontend.tools.reasoning import BEGIN, END, ReasoningParser, reasons_at_once

NO_MARKERS: Mapping[str, int] = {}
MAX_CALLS = 16
"""The limit of calls of an answer that must have calls: a model must not call until its tokens are spent."""
CONTENT_FORM = "response_format"
"""The field that says what content must look like; an answer that calls functions has none."""
ONE = "function"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_ARGUMENTS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "additionalProperties"})


class _Chosen(NamedTuple):
    """What ``tool_choice`` says: auto, none, required or ONE, and of which functions; None: of all."""

    mode: str
    names: frozenset[str] | None = None


class ToolCalling(msgspec.Struct, frozen=True):
    """How the calls of one answer are enforced and parsed."""

    tools: tuple[dict[str, object], ...]
    """The definitions as chat templates take them."""
    names: frozenset[str]
    dialect: Dialect
    single: bool

    def parser(self) -> ToolParser:
        """A new parser, for one choice."""
        return ToolParser(self.dialect, self.names, self.single)


class ChatForm(msgspec.Struct, frozen=True):
    """The form of an answer: with or without calls, free or bound by a grammar."""

    tools: ToolCalling | None = None
    constraint: Constraint | None = None

    @property
    def functions(self) -> Sequence[dict[str, object]]:
        """That the model hears of."""
        return self.tools.tools if self.tools else ()


def chat_form(
    request: ChatCompletionRequest, dialect: Dialect | None, markers: Mapping[str, int] = NO_MARKERS
) -> ChatForm:
    """``dialect`` is the model's dialect of function calls, None if unknown; ``markers`` are the ids of texts that are
    one token of its vocabulary.

    Raises InvalidInputError.
    """
    wanted = constraint_of(request)
    chosen = _choice(request)
    tools = request.tools or []
    _check_tools(tools)
    if not tools:
        if chosen not in (_Chosen("auto"), _Chosen("none")):
            raise InvalidInputError("tool_choice needs tools", param="tool_choice")
        return ChatForm(None, wanted)
    if chosen.mode == "none":
        return ChatForm(None, wanted)
    called = [tool for tool in tools if chosen.names is None or tool.function.name in chosen.names]
    if not called or len(called) < len(chosen.names or ()):
        raise InvalidInputError("tool_choice names a function that is not in tools", param="tool_choice")
    calling = ToolCalling(
        tools=tuple(msgspec.to_builtins(tool) for tool in tools),
        names=frozenset(tool.function.name for tool in called),
        dialect=dialect or LLAMA3_JSON,
        single=request.parallel_tool_calls is False or chosen.mode == ONE,
    )
    if wanted is not None and wanted.param != CONTENT_FORM:
        message = f"{wanted.param} and tools exclude each other, unless tool_choice is none: an answer has one form"
        raise InvalidInputError(message, param=wanted.param)
    if chosen.mode == "auto":
        if dialect is None:
            message = (
                "how this model writes calls is not known: start the frontend with --tool-call-parser, or ask for a "
                "call with tool_choice required or a function's name"
            )
            raise InvalidInputError(message, param="tool_choice")
        if wanted is None:
            return ChatForm(calling, None)
        grammar = calls_grammar(called, calling.dialect, calling.single, wanted.grammar, markers)
        return ChatForm(calling, checked(Constraint(wanted.param, grammar)))
    grammar = calls_grammar(called, calling.dialect, calling.single, markers=markers)
    return ChatForm(calling, checked(Constraint("tools", grammar)))


def calls_grammar(
    tools: Sequence[Tool],
    dialect: Dialect,
    single: bool,
    content: Grammar | None = None,
    markers: Mapping[str, int] = NO_MARKERS,
) -> Grammar:
    """One call of one of the functions, or several, as ``dialect`` writes them; or ``content``, a JSON schema, if there
    is one. What is one token in ``markers`` is written as that token. Raises InvalidInputError."""
    dialect = written_dialect(dialect, markers)
    several = "" if single else f" ({_literal(dialect.between, markers)} call){{0,{MAX_CALLS - 1}}}"
    lines = [
        "start: calls" + (" | content" if content is not None else ""),
        f"calls: {_literal(dialect.before, markers)} call{several} {_literal(dialect.behind, markers)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    if content is not None:
        schema = msgspec.json.decode(content.source, type=dict[str, object])
        lines.append(f"content: {_json_rule(schema, content.kind)}")
    for number, tool in enumerate(tools):
        head = " ".join([_literal(part.replace(NAME, tool.function.name), markers) for part in dialect.head])
        lines.append(f"call_{number}: {head} args_{number} {_literal(dialect.tail, markers)}")
        lines.append(f"args_{number}: {_json_rule(arguments_schema(tool), f'the parameters of {tool.function.name}')}")
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def _json_rule(schema: dict[str, object], title: str) -> str:
    """``title``: what a worker's error names."""
    return f"%json {msgspec.json.encode({**schema, 'title': title, 'x-guidance': _COMPACT}).decode()}"


def arguments_schema(tool: Tool) -> dict[str, object]:
    """The schema of a function's arguments. An object that lists its properties may have no others: schemas
    rarely state this but mean it."""
    source = schema_source(tool.function.parameters or _ANY_ARGUMENTS, "tools")
    schema = msgspec.json.decode(source, type=dict[str, object])
    schema.setdefault("type", "object")
    if schema["type"] != "object":
        raise InvalidInputError(f"the parameters of {tool.function.name} must be of type object", param="tools")
    closed = _closed(schema)
    assert isinstance(closed, dict)
    return closed


def _closed(schema: object) -> object:
    if not isinstance(schema, dict):
        return schema
    properties, items = schema.get("properties"), schema.get("items")
    changed = dict(schema)
    if isinstance(properties, dict):
        changed["properties"] = {name: _closed(value) for name, value in properties.items()}
        if _COMBINING.isdisjoint(schema):
            changed["additionalProperties"] = False
    if items is not None:
        changed["items"] = _closed(items)
    return changed


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """A text of a Lark grammar, with tokens by their ids."""
    for marker, number in tokens.items():
        before, found, behind = text.partition(marker)
        if found:
            return " ".join(filter(None, (_literal(before, tokens), f"<[{number}]>", _literal(behind, tokens))))
    return lark_string(text) if text else ""


def _choice(request: ChatCompletionRequest) -> _Chosen:
    choice = request.tool_choice
    if choice is None:
        return _Chosen("auto")
    if isinstance(choice, str):
        if choice in ("auto", "none", "required"):
            return _Chosen(choice)
    elif choice.type == "function" and choice.function is not None:
        return _Chosen(ONE, frozenset({choice.function.name}))
    elif choice.type == "allowed_tools" and choice.allowed_tools is not None:
        mode, tools = choice.allowed_tools.mode, choice.allowed_tools.tools
        names = [tool.function.name for tool in tools if tool.function is not None]
        if mode in ("auto", "required") and len(names) == len(tools):
            return _Chosen(mode, frozenset(names))
    message = "tool_choice must be auto, none, required, a function, or allowed_tools with auto or required functions"
    raise InvalidInputError(message, param="tool_choice")


def _check_tools(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for tool in tools:
        name = tool.function.name
        if tool.type != "function":
            raise InvalidInputError(f"tools of type {tool.type} are not supported, only function", param="tools")
        if not _NAME.fullmatch(name):
            raise InvalidInputError("a function's name has letters, digits, '_', '-' and '.'", param="tools")
        if name in names:
            raise InvalidInputError(f"two tools have the name {name}", param="tools")
        names.add(name)
        if tool.function.parameters:
            schema_source(tool.function.parameters, "tools")
    if tools and len(msgspec.json.encode(tools)) > MAX_JSON_SIZE:
        raise InvalidInputError(f"tools are above {MAX_JSON_SIZE} characters", param="tools")


class OutputParsers:
    """``tool_call_parser`` is a dialect's name or ``auto``; ``reasoning_parser`` a parser's name or ``none``."""

    def __init__(self, tool_call_parser: str, reasoning_parser: str) -> None:
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser

    def dialect(self, template: ChatTemplate | None) -> Dialect | None:
        """The dialect of a model with this template; None if unknown."""
        if self._tool_call_parser != "auto":
            return DIALECTS[self._tool_call_parser]
        template = template and template.chosen(has_tools=True)
        if template is None or not template.form.knows_tools:
            return LLAMA3_JSON  # as the messages describe functions
        return guessed_dialect(template.source, template.form.called)

    def markers(self, form: ChatForm) -> tuple[str, ...]:
        """The texts that ``parser`` looks for, which may be special tokens."""
        calls = form.tools.dialect.markers if form.tools is not None else ()
        return (*calls, BEGIN, END) if self._reasons(form) else calls

    def _reasons(self, form: ChatForm) -> bool:
        """An answer that is bound by a grammar has no reasoning: the grammar begins with its first token."""
        return self._reasoning_parser != "none" and form.constraint is None

    def parser(self, form: ChatForm, prompt: str) -> Callable[[], OutputParser] | None:
        """A factory of parsers, one per choice; None if the text is the content."""
        tools = form.tools
        if not self._reasons(form):
            return tools.parser if tools is not None else None
        is_inside = reasons_at_once(self._reasoning_parser, prompt)
        return lambda: ReasoningParser(is_inside, tools.parser() if tools is not None else None)
