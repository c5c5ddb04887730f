"""The fields of a chat for functions: definitions, the choice among them, and earlier calls."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.frontend.openai.bounds import JsonMap, Name, Text, Word

MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(max_length=64)]


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """``strict`` has an effect only for forced calls (``required`` or by name), which always conform to
    ``parameters``."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonMap | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Word
    function: FunctionDefinition


class ChosenFunction(msgspec.Struct, frozen=True):
    name: FunctionName


class ToolChoice(msgspec.Struct, frozen=True):
    """One function by name."""

    type: Word
    function: ChosenFunction | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """``arguments`` are JSON text."""

    name: FunctionName
    arguments: Text = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call, in an earlier message or in an answer."""

    id: Name
    function: CalledFunction
    type: Word = "function"


def function_tool(
    name: str, description: str | None, parameters: dict[str, object] | None, strict: bool | None = None
) -> Tool:
    return Tool("function", FunctionDefinition(name, description, parameters, strict))


def function_choice(name: str) -> ToolChoice:
    return ToolChoice("function", ChosenFunction(name))


def function_call(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(call_id, CalledFunction(name, arguments))


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolCalls = Annotated[list[ToolCall], Meta(max_length=1024)]
