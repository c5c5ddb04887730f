"""From tools and tool_choice to a grammar whose every answer is calls that the parser reads."""

from __future__ import annotations

import json
from random import Random

import jsonschema_rs
import pytest
from tests.executors.constrained import random_answer

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.answer import ParsedDelta
from kvrelay.frontend.openai.completions import whole_calls
from kvrelay.frontend.openai.requests import ChatCompletionRequest, parse_body
from kvrelay.frontend.tools.chat_form import ChatForm, chat_form
from kvrelay.frontend.tools.dialects import DIALECTS, HERMES

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 2},
    },
    "required": ["city"],
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


def request(**fields: object) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    return parse_body(json.dumps(body).encode(), ChatCompletionRequest)


def read(form: ChatForm, text: str) -> tuple[ParsedDelta, list[tuple[str, str]]]:
    assert form.tools is not None
    parser = form.tools.parser()
    delta = parser.push(text) + parser.flush()
    return delta, whole_calls(delta)


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("seed", range(4))
def test_even_random_answers_are_valid_calls(name: str, seed: int) -> None:
    form = chat_form(request(tool_choice="required"), DIALECTS[name])
    assert form.constraint is not None
    delta, calls = read(form, random_answer(form.constraint.grammar, Random(seed), max_tokens=20_000))
    assert delta.content == ""
    assert 1 <= len(calls) <= 16
    for function, arguments in calls:
        schema = {"get_weather": {**WEATHER, "additionalProperties": False}, "now": {"maxProperties": 0}}[function]
        jsonschema_rs.validator_for(schema).validate(json.loads(arguments))


def test_a_function_by_name_is_called_once() -> None:
    form = chat_form(request(tool_choice={"type": "function", "function": {"name": "now"}}), HERMES)
    assert form.constraint is not None
    text = random_answer(form.constraint.grammar, Random(1))
    assert read(form, text)[1] == [("now", "{}")]


def allowed(mode: str, *names: str) -> dict[str, object]:
    """As the OpenAI client sends it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_of_all_functions_only_the_allowed_ones_are_called() -> None:
    """The model hears of all, so the prompt stays the same."""
    form = chat_form(request(tool_choice=allowed("required", "now")), HERMES)
    assert form.constraint is not None
    assert len(form.functions) == 2
    for seed in range(4):
        _, calls = read(form, random_answer(form.constraint.grammar, Random(seed)))
        assert {name for name, _ in calls} == {"now"}
    assert chat_form(request(tool_choice=allowed("required", "now", "get_weather")), HERMES) == chat_form(
        request(tool_choice="required"), HERMES
    )


def test_an_allowed_function_may_be_called() -> None:
    form = chat_form(request(tool_choice=allowed("auto", "now")), HERMES)
    assert form.constraint is None
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    assert read(form, call % "now")[1] == [("now", "{}")]
    delta, calls = read(form, call % "get_weather")
    assert (delta.content, calls) == (call % "get_weather", []), "what is not allowed is text"


@pytest.mark.parametrize("tool", [{"type": "custom", "custom": {"name": "sql"}}, {"type": "web_search"}])
def test_tools_of_other_types_are_refused_by_their_type(tool: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=f"^tools of type {tool['type']} are not supported") as caught:
        chat_form(request(tools=[*TOOLS, tool]), HERMES)
    assert caught.value.param == "tools"


def test_no_parallel_calls_means_one() -> None:
    form = chat_form(request(tool_choice="required", parallel_tool_calls=False), HERMES)
    assert form.constraint is not None
    for seed in range(4):
        assert len(read(form, random_answer(form.constraint.grammar, Random(seed)))[1]) == 1


FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                   "additionalProperties": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_with_a_format_an_answer_is_calls_or_of_that_form(name: str) -> None:
    form = chat_form(request(response_format=FORMAT), DIALECTS[name])
    assert form.constraint is not None
    kinds = set()
    for seed in range(12):
        delta, calls = read(form, random_answer(form.constraint.grammar, Random(seed), max_tokens=20_000))
        kinds.add(bool(calls))
        assert bool(delta.content) != bool(calls)
        if delta.content:
            assert isinstance(json.loads(delta.content)["ok"], bool)
        for function, _ in calls:
            assert function in ("get_weather", "now")
    assert kinds == {True, False}


def test_an_answer_that_must_call_has_no_content_of_any_form() -> None:
    assert chat_form(request(tool_choice="required", response_format=FORMAT), HERMES) == chat_form(
        request(tool_choice="required"), HERMES
    )


def test_auto_is_free_and_none_has_no_tools() -> None:
    auto = chat_form(request(), HERMES)
    assert auto.constraint is None
    assert auto.tools is not None
    assert [tool["function"] for tool in auto.tools.tools] == [tool["function"] for tool in TOOLS]
    assert chat_form(request(tool_choice="none"), HERMES) == ChatForm()
    assert chat_form(request(tools=None, tool_choice="auto"), None) == ChatForm()
    with pytest.raises(InvalidInputError, match="--tool-call-parser"):
        chat_form(request(), None)
    assert chat_form(request(tool_choice="required"), None).constraint is not None


def tool(name: str = "f", **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [tool(), tool()]}, "tools", "two tools have the name f"),
        ({"tools": [tool("a b")]}, "tools", "letters, digits"),
        ({"tools": [tool("")]}, "tools", "letters, digits"),
        ({"tools": [{**tool(), "type": "web_search"}]}, "tools", "only function"),
        ({"tools": [tool(**nested(200))]}, "tools", "nested deeper"),
        ({"tools": [tool(properties={f"p{i}": {} for i in range(1000)})]}, "tools", "keys"),
        ({"tools": [tool(x="y" * 300_000)]}, "tools", "characters"),
        ({"tools": [tool(f"f{i}", x="y" * 250_000) for i in range(5)]}, "tools", "characters"),
        ({"tools": [tool(type="string")], "tool_choice": "required"}, "tools", "type object"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "needs tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be auto"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be auto"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not in tools"),
        ({"tool_choice": allowed("auto", "now", "f")}, "tool_choice", "not in tools"),
        ({"tool_choice": allowed("required")}, "tool_choice", "not in tools"),
        ({"tool_choice": allowed("none", "now")}, "tool_choice", "must be auto"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}}},
            "tool_choice",
            "must be auto",
        ),
        ({"tools": None, "tool_choice": allowed("auto", "now")}, "tool_choice", "needs tools"),
        ({"regex": "a"}, "regex", "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        chat_form(request(**fields), HERMES)
    assert caught.value.param == param
