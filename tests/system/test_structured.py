"""Tools and structured answers with the openai package, against real processes with a prefill worker: the state of a
grammar follows from the tokens alone, so a hand-off changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

import httpx
import pydantic
import pytest
from tests.lazily import openai
from tests.patience import PATIENCE_S
from tests.system.serving import Serve, by_threshold, ending_cleanly, openai_client

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SERVE = ("--prefill", "1", "--decode", "1", "--dtype", "float32", *by_threshold(32))
LONG = "Tell me of the weather by the sea, and of the people who live there. " * 8
USER: Any = {"role": "user", "content": LONG}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with ending_cleanly(SERVE) as running:
        yield running


@pytest.fixture
def client(server: Serve) -> Iterator[openai.OpenAI]:
    with openai_client(server) as api:
        yield api


def check_weather(arguments: str) -> None:
    value = json.loads(arguments)
    assert set(value) == {"city", "unit", "days"}
    assert value["unit"] in ("C", "F")
    assert 1 <= value["days"] <= 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_named_call_is_valid_streamed_and_whole(client: openai.OpenAI, server: Serve, temperature: float) -> None:
    settings: Any = {
        "model": server.model, "messages": [USER], "tools": TOOLS, "tool_choice": NAMED,
        "temperature": temperature, "seed": 3, "max_tokens": 200,
    }  # fmt: skip
    choice = client.chat.completions.create(**settings).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    check_weather(call.function.arguments)
    with client.chat.completions.stream(**settings) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    history: Any = [USER, choice.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "21"})
    again = client.chat.completions.create(
        model=server.model, messages=history, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    assert again.choices[0].message.tool_calls is None


class Unit(Enum):
    C = "C"
    F = "F"


class Weather(pydantic.BaseModel):
    unit: Unit
    windy: bool
    days: list[Unit] = pydantic.Field(max_length=3)


def test_parse_gives_an_object(client: openai.OpenAI, server: Serve) -> None:
    answer = client.chat.completions.parse(
        model=server.model, messages=[USER], response_format=Weather, n=3, temperature=1.0, seed=1, logprobs=True,
        frequency_penalty=0.5, max_tokens=200,
    )  # fmt: skip
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Weather)
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None


def test_the_neighbours_fields(client: openai.OpenAI, server: Serve) -> None:
    extra: Any
    for extra, valid in (
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}),
        ({"guided_regex": "(ab|cd){2}"}, {"abab", "abcd", "cdab", "cdcd"}),
        ({"ebnf": 'root ::= "x" | "y" "z"'}, {"x", "yz"}),
    ):
        answer = client.completions.create(model=server.model, prompt=LONG, max_tokens=20, extra_body=extra)
        assert answer.choices[0].text in valid


DEEP = '{"type":"object","required":["a"],"properties":{"a":' * 500 + '{"type":"integer"}' + "}}" * 500


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "integer", "minimum": 5, "maximum": 3}',
        '{"allOf": [{"type": "string"}, {"type": "integer"}]}',
        '{"$ref": "#"}',
        '{"$ref": "http://127.0.0.1:9/schema"}',
        DEEP,
        json.dumps({"enum": ["x" * 1_000_000]}),
        json.dumps({"type": "object", "properties": {f"p{number}": {} for number in range(20_000)}}),
        '{"type": "strin"}',
    ],
    ids=["contradictory", "no type", "circle", "elsewhere", "deep", "1 MB", "wide", "misspelt"],
)
def test_schemas_that_cannot_be_are_400_and_hold_nobody_up(server: Serve, schema: str) -> None:
    form = f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
    body = f'{{"messages":{json.dumps([USER])},"max_tokens":4,"response_format":{form}}}'
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == (None if schema is DEEP else "response_format")
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200


def endless(number: int) -> dict[str, Any]:
    """A request with 1.2 kB of schema that no machine could compile."""
    patterns = [{"type": "string", "pattern": f".*a.{{{k}}}"} for k in range(5, 35)]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": patterns, "title": str(number)}}}
    return {"messages": [USER], "max_tokens": 4, "response_format": form}


def leave_at_once(server: Serve, number: int) -> None:
    with suppress(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=endless(number), timeout=httpx.Timeout(60.0, read=0.5))


def test_schemas_that_never_compile_hold_up_neither_others_nor_the_exit(server: Serve) -> None:
    """The exit: the server ends after this test, while some of them are under way."""
    for number in range(3):
        leave_at_once(server, number)
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": LONG, "max_tokens": 20, "guided_choice": ["north", "south"]},
        timeout=PATIENCE_S,
    )
    assert answer.json()["choices"][0]["text"] in ("north", "south")
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=endless(0), timeout=PATIENCE_S)
    assert refused.status_code == 400
    assert "CPU time" in refused.json()["error"]["message"]
    for number in range(10, 12):
        leave_at_once(server, number)
