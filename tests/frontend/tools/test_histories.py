"""Messages on their way to a chat template."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.requests import ChatCompletionRequest, ChatMessage, parse_body
from kvrelay.frontend.tokens.chat_template import MessageForm
from kvrelay.frontend.tools.histories import template_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "x"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7"}
PLAIN, WRITES_CALLS = MessageForm(), MessageForm(writes_calls=True, writes_results=True)


def messages(*shapes: object) -> list[ChatMessage]:
    return list(parse_body(json.dumps({"messages": shapes}).encode(), ChatCompletionRequest).messages)


def test_calls_and_results_reach_the_template_as_objects() -> None:
    calling, result = template_messages(messages(USER, CALLING, RESULT), WRITES_CALLS)[1:]
    assert "content" not in calling
    assert calling["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]
    assert result == {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"}


@pytest.mark.parametrize("text", ["[1]", '{"a', "[" * 9999])
@pytest.mark.parametrize("form", [WRITES_CALLS, msgspec.structs.replace(WRITES_CALLS, text_arguments=True), PLAIN])
def test_a_call_that_was_cut_does_not_end_its_conversation(form: MessageForm, text: str) -> None:
    """It stays in the history, so each later turn would be refused as well. As in vLLM it has no arguments then."""
    cut, none = ([{**CALL, "function": {"name": "f", "arguments": given}}] for given in (text, ""))
    assert template_messages(messages(USER, {**CALLING, "tool_calls": cut}, RESULT), form) == template_messages(
        messages(USER, {**CALLING, "tool_calls": none}, RESULT), form
    )


@pytest.mark.parametrize("form", [PLAIN, MessageForm(takes_parts=True)])
def test_a_refusal_is_what_the_assistant_said(form: MessageForm) -> None:
    """Both ways in which OpenAI's clients send it back: dropped, the model would have said nothing."""
    part = {"type": "refusal", "refusal": "No."}
    given = messages(USER, {"role": "assistant", "content": None, "refusal": "No."})
    assert template_messages(given, form)[1]["content"] == "No."
    said = template_messages(messages(USER, {"role": "assistant", "content": [part]}), form)[1]["content"]
    assert said == ([{"type": "text", "text": "No."}] if form.takes_parts else "No.")


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "use tool_calls"),
        ({"role": "assistant", "audio": {"id": "audio_1"}}, "audio"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
         "tool calls of type custom are not supported"),
    ],
)  # fmt: skip
def test_what_an_assistant_did_otherwise_is_refused_by_name(message: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidInputError, match=word) as caught:
        template_messages(messages(USER, message), PLAIN)
    assert caught.value.param == "messages"


def test_developer_is_system_unless_the_template_knows_better() -> None:
    developer = messages({"role": "developer", "content": "Be brief."})
    assert template_messages(developer, PLAIN)[0]["role"] == "system"
    assert template_messages(developer, MessageForm(knows_developer=True))[0]["role"] == "developer"


def test_a_template_without_tools_is_told_in_words() -> None:
    given = messages({"role": "system", "content": "Be brief."}, USER, CALLING, RESULT)
    tools: list[dict[str, object]] = [{"type": "function", "function": {"name": "f"}}]
    system, user, calling, result = template_messages(given, PLAIN, tools)
    assert system["role"] == "system"
    assert str(system["content"]).startswith("Be brief.")
    assert '{"name": "f"}' in str(system["content"])
    assert user == USER
    assert calling == {"role": "assistant", "content": '{"name": "f", "parameters": {"a": 1}}'}
    assert result == {"role": "user", "content": "f returned:\n7"}
    assert template_messages(messages(USER), PLAIN) == [USER]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([RESULT], "matches no call"),
        ([USER, CALLING, {**RESULT, "tool_call_id": "c2"}], "matches no call"),
        ([RESULT, CALLING], "matches no call"),
        ([CALLING, {"role": "tool", "content": "7"}], "needs a tool_call_id"),
        ([{**CALLING, "tool_calls": [CALL, CALL]}], "two tool calls have the id"),
        ([{**CALLING, "role": "user"}], "cannot have tool_calls"),
        ([{**CALLING, "tool_calls": [{**CALL, "type": "custom"}]}], "not supported"),
        ([{**USER, "content": [{"type": "image_url"}]}], "^content of type image_url is not supported"),
        ([{**USER, "content": [{"type": "text"}]}], "^content of type text needs a text"),
        ([{**USER, "content": [{"type": "refusal", "text": "x"}]}], "^content of type refusal needs a refusal"),
    ],
)
def test_histories_that_do_not_match_are_refused(shapes: list[object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        template_messages(messages(*shapes), WRITES_CALLS)
    assert caught.value.param == "messages"


def test_reasoning_has_several_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        (_, past) = template_messages(
            messages(USER, {"role": "assistant", "content": "Yes.", name: "I wonder."}), PLAIN
        )
        assert past["reasoning_content"] == past["thinking"] == "I wonder."
