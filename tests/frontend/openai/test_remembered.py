"""Specs of fields that come again are remembered: never those of other fields, and no refusal."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.answer_spec import AnswerSpec, chat_spec, completion_spec
from kvrelay.frontend.openai.requests import ChatCompletionRequest, CompletionRequest, has_short_fields, parse_body
from kvrelay.frontend.tokens.tokenizer import NO_DEFAULTS, DefaultSampling

MESSAGES = [{"role": "user", "content": "a"}]


def spec(defaults: DefaultSampling = NO_DEFAULTS, **fields: object) -> AnswerSpec:
    return completion_spec(parse_body(json.dumps(fields).encode(), CompletionRequest), defaults, 4)


def chat(**fields: object) -> AnswerSpec:
    body = json.dumps({"messages": MESSAGES, **fields}).encode()
    return chat_spec(parse_body(body, ChatCompletionRequest), NO_DEFAULTS, 4, None)


def test_a_spec_does_not_depend_on_the_prompt() -> None:
    assert spec(prompt="a", temperature=0.5, seed=3) is spec(prompt=[1, 2], temperature=0.5, seed=3)
    assert chat(temperature=0.5) is chat(temperature=0.5, messages=[{"role": "user", "content": "b"}])


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.6},
        {"seed": 4},
        {"stream": True},
        {"n": 2},
        {"ignore_eos": True},
        {"stop": "x"},
        {"stop": ["x"]},
        {"logit_bias": {"1": 1.0}},
        {"stop_token_ids": [1]},
        {"cache_salt": "s"},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_any_other_field_makes_another_spec(other: dict[str, object]) -> None:
    fields: dict[str, object] = {"temperature": 0.5, "seed": 3}
    for make in (lambda **given: spec(prompt="a", **given), chat):
        assert make(**fields) != make(**{**fields, **other})
        assert make(**{**fields, **other}) == make(**{**fields, **other})


def test_the_models_defaults_count() -> None:
    assert spec(prompt="a").sampling.temperature == 1.0
    assert spec(DefaultSampling(temperature=0.25), prompt="a").sampling.temperature == 0.25


def test_a_refusal_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(InvalidInputError) as caught:
            spec(prompt="a", temperature=-1.0)
        assert caught.value.param == "temperature"
        with pytest.raises(InvalidInputError):
            chat(top_logprobs=3)


def test_fields_that_may_be_long_are_known_by_their_type() -> None:
    for kind in (CompletionRequest, ChatCompletionRequest):
        empty = {"prompt": "a" * 9999} if kind is CompletionRequest else {"messages": MESSAGES}
        assert has_short_fields(parse_body(json.dumps(empty).encode(), kind))
        for field in msgspec.structs.fields(kind):
            is_long = any(word in str(field.type) for word in ("list", "dict", "max_length=4096", "Format", "Struct"))
            if is_long and field.name not in ("prompt", "messages", "stream_options"):
                assert not has_short_fields(msgspec.structs.replace(kind(**empty), **{field.name: "x"})), field.name
