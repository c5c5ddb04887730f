"""Every string, list and map of a request has a bound, which the OpenAPI document shows and the parser keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvrelay.core.sampling import MAX_STOP_TOKEN_IDS, SamplingParams
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.api.openapi import BODIES, openapi_document
from kvrelay.frontend.openai import bounds
from kvrelay.frontend.openai.requests import ChatCompletionRequest, CompletionRequest, parse_body

DOCUMENT = openapi_document()
SCHEMAS = DOCUMENT["components"]["schemas"]
SIZES = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


@dataclass(frozen=True)
class Place:
    """A string, list or map somewhere in a body. ``steps`` lead there: a field's name, or an item's schema."""

    body: type[msgspec.Struct]
    steps: tuple[str | int, ...]
    schema: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.body.__name__}.{'.'.join(map(str, self.steps))}:{self.schema['type']}"


def places(body: type[msgspec.Struct], schema: dict[str, Any], steps: tuple[str | int, ...] = ()) -> Iterator[Place]:
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    for option in schema.get("anyOf", ()):
        yield from places(body, option, steps)
    if schema.get("type") in SIZES and "properties" not in schema:
        yield Place(body, steps, schema)
    for name, inner in schema.get("properties", {}).items():
        yield from places(body, inner, (*steps, name))
    if isinstance(schema.get("items"), dict):
        yield from places(body, schema["items"], (*steps, 0))


PLACES = [place for body in BODIES for place in places(body, SCHEMAS[body.__name__])]


def too_large(schema: dict[str, Any], size: int) -> object:
    match schema["type"]:
        case "string":
            return "x" * size
        case "object":
            values = schema.get("additionalProperties")
            value = example(values) if isinstance(values, dict) else 1
            return {str(number): value for number in range(size)}
    items = schema["items"].get("anyOf", [schema["items"]])
    return [example(items[-1] if "type" not in items[-1] or items[-1]["type"] != "array" else items[1])] * size


def example(schema: dict[str, Any]) -> object:
    """The smallest value of a schema."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return example(schema["anyOf"][0])
    match schema.get("type"):
        case "string":
            return "x"
        case "array":
            return []
        case "object":
            return {name: example(schema["properties"][name]) for name in schema.get("required", ())}
        case _:
            return 1


def with_value(schema: dict[str, Any], steps: tuple[str | int, ...], value: object) -> object:
    """The smallest value of a schema but for ``value`` at ``steps``."""
    if not steps:
        return value
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    step, *rest = steps
    if isinstance(step, int):
        options = [option for option in schema.get("anyOf", [schema]) if option.get("type") == "array"]
        return [with_value(options[0]["items"], tuple(rest), value)]
    for option in schema.get("anyOf", [schema]):
        named = SCHEMAS[option["$ref"].rpartition("/")[2]] if "$ref" in option else option
        if step in named.get("properties", {}):
            whole = example(named)
            assert isinstance(whole, dict)
            return {**whole, step: with_value(named["properties"][step], tuple(rest), value)}
    raise AssertionError((schema, steps))


def refusal(kind: type[msgspec.Struct], body: object) -> InvalidInputError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidInputError) as caught:
        parse_body(data, kind)
    assert caught.value.status == 400
    return caught.value


def test_the_walk_finds_the_fields() -> None:
    found = {str(place) for place in PLACES}
    assert {
        "CompletionRequest.prompt:string",
        "CompletionRequest.prompt.0:array",
        "CompletionRequest.stop.0:string",
        "CompletionRequest.logit_bias:object",
        "ChatCompletionRequest.messages.0.content.0.text:string",
        "ChatCompletionRequest.tools:array",
        "DetokenizeRequest.tokens:array",
    } <= found
    assert len(found) > 50


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_field_has_a_bound(place: Place) -> None:
    bound = place.schema[SIZES[place.schema["type"]]]
    assert 0 < bound <= 2**22
    body = with_value(SCHEMAS[place.body.__name__], place.steps, too_large(place.schema, bound + 1))
    error = refusal(place.body, body)
    assert error.param == place.steps[0]
    assert str(bound) in error.message


def test_what_is_as_large_as_allowed_is_taken() -> None:
    texts = ["x" * 2**21, [5] * bounds.MAX_TOKEN_IDS, ["x"] * 1024, [[5] * 1000] * 1000]
    for prompt in texts:
        request = parse_body(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
        assert request.prompt == prompt


@pytest.mark.parametrize(
    ("kind", "field"),
    [(body, field.name) for body in BODIES for field in msgspec.structs.fields(body) if "object" in str(field.type)],
)
@pytest.mark.parametrize(
    "value", ["x" * bounds.MAX_JSON_SIZE, [1] * bounds.MAX_JSON_SIZE, {"x" * bounds.MAX_JSON_SIZE: 1}]
)
def test_any_json_is_bounded_in_all(kind: type[msgspec.Struct], field: str, value: object) -> None:
    """Where the schema allows any value, depth and number of lists make no difference."""
    schema = SCHEMAS[kind.__name__]
    options = schema["properties"][field].get("anyOf", [schema["properties"][field]])
    is_map = any(option.get("type") == "object" for option in options)
    body = with_value(schema, (field,), {"a": value} if is_map else [value])
    assert refusal(kind, body).param == field


def test_tool_calls_of_messages_are_bounded_in_all() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * bounds.MAX_JSON_SIZE}}]}
    error = refusal(BODIES[1], {"messages": [message]})
    assert error.param == "messages"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"1," * bounds.MAX_JSON_VALUES + b"1]}",
        b'{"prompt": [' + b'",",' * bounds.MAX_JSON_VALUES + b"1]}",
        b'{"x": [' + b"[]," * bounds.MAX_JSON_CONTAINERS + b"1]}",
        b'{"x": [' + b"{}," * bounds.MAX_JSON_CONTAINERS + b"1]}",
        b"[" * (bounds.MAX_JSON_CONTAINERS + 1),
        b'{"x": "' + b"\\n" * bounds.MAX_JSON_ESCAPES + b'\\n"}',
    ],
)
def test_a_body_that_takes_long_to_parse_is_not_parsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown fields count as well: the parser reads them."""
    monkeypatch.setattr("kvrelay.frontend.openai.requests._reader", None)
    assert "the body has more than" in refusal(CompletionRequest, body).message


@pytest.mark.parametrize(
    "text",
    [
        "[{,}]" * 500_000,
        '\\",[' * 500_000,
        "\\\\" * 500_000 + ",[",
        "\\\\\\" * 200_001 + '\\",[{',
        "," * bounds.MAX_JSON_VALUES,
    ],
)
def test_what_stands_in_strings_is_no_value(text: str) -> None:
    body = b'{"prompt": ' + json.dumps(text).encode() + b', "max_tokens": 1}'
    request = parse_body(body, CompletionRequest)
    assert request.prompt == text


def test_a_string_without_an_end_is_looked_at_once() -> None:
    """Each of its quotes could be taken for the beginning of a string that has no end either."""
    body = b'{"prompt": "' + b'\\",[{' * 700_000
    assert "not valid JSON" in refusal(CompletionRequest, body).message


def test_a_worker_bounds_what_a_frontend_sends() -> None:
    SamplingParams(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS))).validate(4096)
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(stop_token_ids=(1,) * (MAX_STOP_TOKEN_IDS + 1)).validate(4096)
    assert caught.value.param == "stop_token_ids"


def test_a_body_with_other_fields_is_read_as_one_without() -> None:
    for kind, fields in (
        (CompletionRequest, {"prompt": [1, 2, 3], "stop": ["a"], "logit_bias": {"5": 1.0}}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a", "more": 1}], "tools": []}),
    ):
        alone = parse_body(json.dumps(fields).encode(), kind)
        beside = parse_body(json.dumps({**fields, "nobody_knows": [{}]}).encode(), kind)
        assert isinstance(alone, kind)
        assert msgspec.structs.asdict(alone) == msgspec.structs.asdict(beside)
