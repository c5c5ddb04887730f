"""Messages in the form that chat templates take: text, earlier calls and their results, and reasoning. Pure.

A template without tools gets definitions in a system message, and calls and results as text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.requests import ChatMessage

_INTRODUCTION = (
    "You can call these functions. To call one, answer with nothing but "
    '{"name": "function", "parameters": {"argument": "value"}}; separate several calls by ";".\n'
)


def template_messages(messages: Sequence[ChatMessage], knows_developer: bool = False) -> list[dict[str, object]]:
    """Messages for a chat template; text parts are joined by line ends. The role ``developer`` becomes ``system``
    unless the template supports it.

    Raises InvalidInputError for other parts, and for calls and results that do not match.
    """
    if not messages:
        raise InvalidInputError("messages must not be empty", param="messages")
    open_calls: dict[str, str] = {}
    found = []
    for message in messages:
        _check_calls(message, open_calls)
        found.append(_template_message(message, open_calls, knows_developer))
    return found


def described(messages: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """For a template without tools: the first system message describes them, and calls and results become plain
    messages."""
    plain = [_plain_message(message) for message in messages]
    if not tools:
        return plain
    text = _INTRODUCTION + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    if plain[0]["role"] == "system":
        text = f"{plain[0]['content']}\n\n{text}"
        plain = plain[1:]
    return [{"role": "system", "content": text}, *plain]


def _check_calls(message: ChatMessage, calls: dict[str, str]) -> None:
    """``calls`` maps the ids of calls so far to their functions. Raises InvalidInputError."""
    if message.tool_calls and message.role != "assistant":
        raise InvalidInputError(f"a message of role {message.role} cannot have tool_calls", param="messages")
    ids: set[str] = set()
    for call in message.tool_calls or ():
        if call.type != "function":
            raise InvalidInputError(f"tool calls of type {call.type} are not supported", param="messages")
        if call.id in ids:
            raise InvalidInputError(f"two tool calls have the id {call.id[:100]}", param="messages")
        ids.add(call.id)
        calls[call.id] = call.function.name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise InvalidInputError("a message of role tool needs a tool_call_id", param="messages")
        if message.tool_call_id not in calls:
            text = f"tool_call_id {message.tool_call_id[:100]} matches no call of an earlier message"
            raise InvalidInputError(text, param="messages")


def _template_message(message: ChatMessage, calls: dict[str, str], knows_developer: bool) -> dict[str, object]:
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type not in ("text", "input_text") or part.text is None:
                raise InvalidInputError(f"content of type {part.type} is not supported", param="messages")
        content = "\n".join(part.text or "" for part in content)
    role = "system" if message.role == "developer" and not knows_developer else message.role
    shape: dict[str, object] = {"role": role, "content": content or ""}
    if message.name is not None:
        shape["name"] = message.name
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        shape["reasoning_content"] = reasoning
    if message.tool_calls:
        shape["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        assert message.tool_call_id is not None
        shape["tool_call_id"] = message.tool_call_id
        shape.setdefault("name", calls[message.tool_call_id])
    return shape


def _arguments(text: str) -> dict[str, object]:
    """Templates take the arguments as an object."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, object])
    except UNREADABLE as exc:
        raise InvalidInputError("the arguments of a tool call must be a JSON object as text", param="messages") from exc


def _plain_message(message: dict[str, object]) -> dict[str, object]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"{message['name']} returned:\n{message['content']}"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    functions = [call["function"] for call in calls]
    told = "; ".join(
        json.dumps({"name": each["name"], "parameters": each["arguments"]}, ensure_ascii=False) for each in functions
    )
    content = f"{message['content']}\n{told}" if message["content"] else told
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}
