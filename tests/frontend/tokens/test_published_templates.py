"""Chat templates in the style of published ones, on a table of conversations, against transformers.

``chat_templates`` has one file per style. The reference is ``apply_chat_template`` of a tokenizer with the same
template, on the same messages: arguments of calls as objects, and as JSON text for the one style that joins texts.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jinja2
import pytest
from tests.lazily import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.generate.prompts import chat_prompt, render_chat
from kvrelay.frontend.openai.requests import ChatCompletionRequest, parse_body
from kvrelay.frontend.side_threads import Pieces, complete
from kvrelay.frontend.tokens.chat_template import ChatTemplate
from kvrelay.frontend.tools.chat_form import OutputParsers
from kvrelay.frontend.tools.dialects import HERMES, LLAMA3_JSON, MISTRAL, Dialect

FOLDER = Path(__file__).parent / "chat_templates"
TOOL_USE = {"command_r": "command_r_tool_use", "chatml": "hermes"}
"""Templates that have another one for chats with functions."""
STYLES = sorted(path.stem for path in FOLDER.glob("*.jinja") if path.stem not in ("command_r_tool_use", "hermes"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"It's <{name}> & more: é",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": 'a "city"'}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "news")
]


def called(*arguments: dict[str, object], **others: object) -> dict[str, object]:
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(given)}}
        for number, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **others}


def said(role: str, content: object, **others: object) -> dict[str, object]:
    return {"role": role, "content": content, **others}


def result(number: int, content: str) -> dict[str, object]:
    return said("tool", content, tool_call_id=f"call{number:05}", name="weather")


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


HARD = {"city": "Köln <b> & 'x' \"y\" \\ 你好", "days": 2, "deep": {"a": [1, 2.5, None, True]}}
CHATS: dict[str, list[dict[str, object]]] = {
    "plain": [said("user", "Hello  ")],
    "turns": [said("user", "Hi"), said("assistant", " Yes.\n"), said("user", "<b> & 'c' \"é\"\r\nx")],
    "system": [said("system", "Be brief. "), said("user", "Hi")],
    "developer": [said("developer", "Be brief."), said("user", "Hi")],
    "parts": [said("user", PARTS)],
    "thoughts": [
        said("user", "Hi"),
        said("assistant", "<think>\nhm\n</think>\n\nYes.", reasoning_content="I wonder."),
        said("user", "Why?"),
    ],
    "call": [said("user", "Hi"), called(HARD), result(0, "7 <°> & 'so'"), said("assistant", "7"), said("user", "So?")],
    "open call": [said("system", "Be brief."), said("user", "Hi"), called({}), result(0, "7")],
    "result in parts": [said("user", "Hi"), called(HARD), said("tool", PARTS, tool_call_id="call00000")],
    "calls": [
        said("user", "Hi"),
        called({"city": "a"}, {"city": "b"}),
        result(0, "7"),
        result(1, "8"),
        said("assistant", "7"),
        said("user", "So?"),
    ],
    "call and text": [
        said("user", "Hi"),
        called({"city": "a"}, content="I look."),
        result(0, "7"),
        said("assistant", "7"),
        said("user", "So?"),
    ],
}
SHOWS_NO_FUNCTIONS = ("deepseek_r1", "gemma", "gemma3", "llama2", "parts", "phi4", "smollm")
WRITES_NO_CALLS = {*SHOWS_NO_FUNCTIONS, "chatml", "command_r", "lfm2"} - {"deepseek_r1"}
WRITES_RESULTS = {"lfm2"}
"""Though it writes no calls."""
JOINS_ARGUMENTS = {"deepseek_r1"}
TAKES_PARTS = {"gemma3", "parts", "qwen_vl"}
INTRODUCTION = (
    "You can call these functions. To call one, answer with nothing but "
    '{"name": "function", "parameters": {"argument": "value"}}; separate several calls by ";".\n'
)


def source(style: str) -> str:
    return (FOLDER / f"{style}.jinja").read_text(encoding="utf-8")


@functools.cache
def template(style: str) -> ChatTemplate:
    other = TOOL_USE.get(style)
    return ChatTemplate(source(style), SPECIAL, ChatTemplate(source(other), SPECIAL) if other else None)


def model(style: str, seen: list[str] | None = None) -> Model:
    """Its tokenizer notes texts in ``seen``, and makes one token of each."""

    def encode_texts(texts: list[str], *_: object, **__: object) -> Pieces[list[list[int]]]:
        assert seen is not None
        seen.extend(texts)
        yield
        return [[0] for _ in texts]

    tokenizer = SimpleNamespace(chat_template=template(style), encode_texts=encode_texts, max_chars_per_token=2**10)
    return cast(Model, SimpleNamespace(name="m", tokenizer=tokenizer, max_model_len=2**10, vocab_size=1))


def ours(
    style: str,
    messages: Sequence[Mapping[str, object]],
    arguments: dict[str, object] | None = None,
    tools: Sequence[dict[str, object]] = (),
) -> str:
    read = parse_body(json.dumps({"messages": messages}).encode(), ChatCompletionRequest)
    try:
        return render_chat(read.messages, model(style), arguments=arguments, max_chars=2**24, tools=tools)
    except InvalidInputError as exc:
        return f"refused: {exc.__cause__}"


@functools.cache
def reference(style: str) -> Any:
    templates = {"default": source(style)}
    if style in TOOL_USE:
        templates["tool_use"] = source(TOOL_USE[style])
    backend = RustTokenizer(models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=templates, **SPECIAL)


def theirs(style: str, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    arguments = {"add_generation_prompt": True, **arguments}
    given = as_given(style, messages)
    try:
        if style in JOINS_ARGUMENTS:
            # apply_chat_template leaves out None, which the template asks for.
            render = transformers.utils.chat_template_utils.render_jinja_template
            return str(render([given], chat_template=source(style), **SPECIAL, **arguments)[0][0])
        return str(reference(style).apply_chat_template(given, tokenize=False, **arguments))
    except (jinja2.TemplateError, TypeError) as exc:
        return f"refused: {exc}"


def as_given(style: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as a user of transformers gives them to this template."""
    given = [copy.deepcopy(dict(message)) for message in messages]
    for message in given:
        if message["role"] == "developer":
            message["role"] = "system"
        # As in vLLM, a result is always text.
        if isinstance(message["content"], list) and (style not in TAKES_PARTS or message["role"] == "tool"):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if isinstance(message["content"], str) and style == "parts":
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()) if style not in JOINS_ARGUMENTS else ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return given


def in_words(style: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and results that the template does not write as plain messages."""
    if style not in WRITES_NO_CALLS:
        return list(messages)
    told: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and style not in WRITES_RESULTS:
            content = message["content"]
            text = "weather returned:\n" + (content if isinstance(content, str) else "one\ntwo")
            if told[-1]["content"].startswith("weather returned:"):
                told[-1]["content"] += "\n" + text
            else:
                told.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            texts = [
                '{"name": "weather", "parameters": '
                + json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
                + "}"
                for call in message["tool_calls"]
            ]
            content = (message["content"] + "\n" if message["content"] else "") + "; ".join(texts)
            told.append({"role": "assistant", "content": content})
        else:
            told.append(dict(message))
    return told


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", STYLES)
def test_a_chat_is_written_as_transformers_writes_it(style: str, chat: str) -> None:
    messages = CHATS[chat]
    assert ours(style, messages) == theirs(style, in_words(style, messages))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", [style for style in STYLES if style not in SHOWS_NO_FUNCTIONS])
def test_a_chat_with_functions_is_too(style: str, chat: str) -> None:
    messages = CHATS[chat] if style in TOOL_USE else in_words(style, CHATS[chat])
    assert ours(style, CHATS[chat], tools=TOOLS) == theirs(style, messages, tools=TOOLS)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", SHOWS_NO_FUNCTIONS)
def test_functions_that_a_template_does_not_show_are_described(style: str, chat: str) -> None:
    messages = in_words(style, CHATS[chat])
    text = INTRODUCTION + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in TOOLS)
    first = messages[0]
    if isinstance(first["content"], list):
        first = {**first, "content": "one\ntwo"}
    if first["role"] in ("system", "developer"):
        messages[0] = {**first, "content": f"{first['content']}\n\n{text}"}
    elif style == "gemma":
        messages[0] = {**first, "content": f"{text}\n\n{first['content']}"}
    else:
        messages[:1] = [said("system", text), first]
    assert ours(style, CHATS[chat], tools=TOOLS) == theirs(style, messages)


@pytest.mark.parametrize("style", STYLES)
def test_a_message_is_continued_where_transformers_continues_it(style: str) -> None:
    for end in ("", " ", " \n"):
        messages = [said("user", "Hi"), said("assistant", "Once upon" + end)]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        request = parse_body(json.dumps(body).encode(), ChatCompletionRequest)
        seen: list[str] = []
        complete(chat_prompt(request, model(style, seen)))
        expected = theirs(style, messages, add_generation_prompt=False, continue_final_message=True)
        assert seen == [expected]


def test_arguments_reach_the_template() -> None:
    for thinking in (False, True):
        arguments = {"enable_thinking": thinking}
        assert ours("qwen3", CHATS["turns"], arguments) == theirs("qwen3", CHATS["turns"], **arguments)


@pytest.mark.parametrize(
    ("style", "dialect"),
    [
        ("mistral", MISTRAL),
        ("qwen25", HERMES),
        ("qwen3", HERMES),
        ("chatml", HERMES),
        ("llama31", LLAMA3_JSON),
        ("command_r", None),
    ]
    + [(style, LLAMA3_JSON) for style in SHOWS_NO_FUNCTIONS]
    + [("granite", None)],
)
def test_the_dialect_is_that_of_the_template_for_functions(style: str, dialect: Dialect | None) -> None:
    assert OutputParsers("auto", "none").dialect(model(style).tokenizer.chat_template) is dialect


@pytest.mark.parametrize("style", STYLES)
def test_long_chats_stay_within_the_bound_of_work(style: str) -> None:
    turn = [said("user", "word " * 200), called(HARD), result(0, "word " * 200), said("assistant", "word " * 200)]
    messages = [*turn * 125, said("user", "So?")]
    assert not ours(style, messages, tools=TOOLS).startswith("refused")
