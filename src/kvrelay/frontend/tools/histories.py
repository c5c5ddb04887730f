"""Messages in the form that chat templates take: text, earlier calls and their results, and reasoning. Pure.

What a template does not write itself is told in words: definitions in a system message, calls and results as text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.requests import ChatMessage, part_text
from kvrelay.frontend.tokens.chat_template import MessageForm

_SERVED = ("text", "input_text", "refusal")
_INTRODUCTION = (
    "You can call these functions. To call one, answer with nothing but "
    '{"name": "function", "parameters": {"argument": "value"}}; separate several calls by ";".\n'
)


def template_messages(
    messages: Sequence[ChatMessage], form: MessageForm, described: Sequence[dict[str, object]] = ()
) -> list[dict[str, object]]:
    """Messages for a chat template of this form. Text parts are joined by line ends, unless the template takes parts.
    ``described`` are functions that the messages tell of, because the template does not.

    Raises InvalidInputError for other parts, and for calls and results that do not match.
    """
    if not messages:
        raise InvalidInputError("messages must not be empty", param="messages")
    if described:
        form = msgspec.structs.replace(form, takes_parts=False)
    open_calls: dict[str, str] = {}
    found: list[dict[str, object]] = []
    told_result = False
    for message in messages:
        _check_calls(message, open_calls)
        shape = _template_message(message, open_calls, form)
        was_told, told_result = told_result, message.role == "tool" and not form.writes_results
        if was_told and told_result:
            # Templates that know no results may want users and assistants to take turns.
            found[-1]["content"] = f"{found[-1]['content']}\n{shape['content']}"
        else:
            found.append(shape)
    if described:
        found = _introduced(found, described, form)
    if not form.takes_text:
        for shape in found:
            if isinstance(shape.get("content"), str):
                shape["content"] = [{"type": "text", "text": shape["content"]}]
    return found


def joined_text(message: ChatMessage) -> str:
    """The content as one text. Raises InvalidInputError."""
    content = message.refusal if message.content is None else message.content
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part_text(part.type, part.shown, _SERVED, "messages") for part in content)


def _introduced(
    messages: list[dict[str, object]], tools: Sequence[dict[str, object]], form: MessageForm
) -> list[dict[str, object]]:
    """A system message describes the functions, or the first message if the template takes no system message."""
    text = _INTRODUCTION + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if form.takes_system or first["role"] != "user":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]


def _check_calls(message: ChatMessage, calls: dict[str, str]) -> None:
    """``calls`` maps the ids of calls so far to their functions. Raises InvalidInputError."""
    if message.tool_calls and message.role != "assistant":
        raise InvalidInputError(f"a message of role {message.role} cannot have tool_calls", param="messages")
    if message.function_call is not None:
        raise InvalidInputError("messages with a function_call are not supported; use tool_calls", param="messages")
    if message.audio is not None:
        raise InvalidInputError("messages with audio are not supported: only text is served", param="messages")
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


def _template_message(message: ChatMessage, calls: dict[str, str], form: MessageForm) -> dict[str, object]:
    content: object = joined_text(message)
    if isinstance(message.content, list) and form.takes_parts and message.role != "tool":
        # Fewer templates take parts of a tool's message.
        content = [{"type": "text", "text": part.shown} for part in message.content]
    role = "system" if message.role == "developer" and not form.knows_developer else message.role
    shape: dict[str, object] = {"role": role, "content": content}
    if message.name is not None:
        shape["name"] = message.name
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        # Templates read one of these names.
        shape["reasoning_content"] = shape["reasoning"] = shape["thinking"] = reasoning
    if message.tool_calls:
        _add_calls(shape, message, form)
    if message.role == "tool":
        assert message.tool_call_id is not None
        shape.setdefault("name", calls[message.tool_call_id])
        if not form.writes_results:
            return {"role": "user", "content": f"{shape['name']} returned:\n{joined_text(message)}"}
        shape["tool_call_id"] = message.tool_call_id
    return shape


def _add_calls(shape: dict[str, object], message: ChatMessage, form: MessageForm) -> None:
    calls = message.tool_calls or ()
    arguments = [_arguments(call.function.arguments) for call in calls]
    text = joined_text(message)
    if not form.writes_calls:
        functions = [
            {"name": call.function.name, "parameters": given} for call, given in zip(calls, arguments, strict=True)
        ]
        told = "; ".join(json.dumps(function, ensure_ascii=False) for function in functions)
        shape["content"] = f"{text}\n{told}" if text else told
        return
    if not text:
        del shape["content"]
        shape.update(form.no_content)
    shape["tool_calls"] = [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": (call.function.arguments if given else "{}") if form.text_arguments else given,
            },
        }
        for call, given in zip(calls, arguments, strict=True)
    ]


def _arguments(text: str) -> dict[str, object]:
    """Empty for what is no JSON object, as in vLLM: a call that its limit cut stays in the history, and templates fail
    for anything else."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except UNREADABLE:
        return {}
