"""Requests as bodies, events as tokens: exact, and nothing that is not understood passes for a token."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.request import Request
from kvrelay.engines.hosted.backend import AnswerError
from kvrelay.engines.openai.wire import completion_body, parse_event, require_possible
from kvrelay.errors import InvalidInputError


def _body(sampling: SamplingParams, output: tuple[int, ...] = (), priority: int = 0) -> dict[str, object]:
    request = Request("r", (5, 6), sampling, output_token_ids=output, priority=priority)
    return completion_body(request, "m", 7, with_token_ids=True)


def test_settings_travel_under_the_names_of_the_api() -> None:
    sampling = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={3: -1.0},
        seed=11,
        stop_token_ids=(8,),
        ignore_eos=True,
        logprobs=2,
        cache_salt="s",
    )
    body = _body(sampling, output=(7,), priority=-2)
    assert body == {
        "model": "m",
        "prompt": [5, 6, 7],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"3": -1.0},
        "seed": 11,
        "stop_token_ids": [8],
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "cache_salt": "s",
        "priority": -2,
        "skip_special_tokens": False,
    }


def test_a_server_cannot_apply_its_own_defaults_for_sampling() -> None:
    body = _body(SamplingParams(max_tokens=4))
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, 1.0, -1, 1.0)


@pytest.mark.parametrize(
    ("kind", "source", "sent"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type":"object"}', {"json": {"type": "object"}}),
        (GrammarKind.REGEX, "a+", {"regex": "a+"}),
        (GrammarKind.LARK, 'start: "a"', {"grammar": 'start: "a"'}),
    ],
)
def test_grammars_travel(kind: GrammarKind, source: str, sent: dict[str, object]) -> None:
    assert _body(SamplingParams(max_tokens=4, grammar=Grammar(kind, source)))["structured_outputs"] == sent


def test_what_the_api_cannot_give_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError) as caught:
        require_possible(SamplingParams(prompt_logprobs=1))
    assert caught.value.param == "prompt_logprobs"


def test_an_event_as_vllm_sends_it() -> None:
    event = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": {
                    "text_offset": [0, 1],
                    "tokens": ["token_id:7", "token_id:9"],
                    "token_logprobs": [-0.5, -0.25],
                    "top_logprobs": [{"token_id:7": -0.5, "token_id:3": -0.25}, {"token_id:9": -0.25}],
                },
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [7, 9],
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}},
    }
    piece = parse_event(json.dumps(event))
    assert (piece.text, piece.token_ids, piece.finish) == ("ab", (7, 9), FinishReason.STOP)
    assert (piece.num_prompt_tokens, piece.num_cached_tokens) == (3, 2)
    assert piece.logprobs is not None
    first = piece.logprobs[0]
    assert (first.chosen.token_id, first.chosen.rank) == (7, 2)
    assert [(entry.token_id, entry.rank) for entry in first.top] == [(3, 1), (7, 2)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        b"\xff",
        b"[" * 100_000,
        b'{"error":{"message":"broken"}}',
        b'{"error":"broken"}',
        b'{"choices":[{},{}]}',
        b'{"choices":[{"finish_reason":"tool_calls"}]}',
        b'{"choices":[{"token_ids":["7"]}]}',
        b'{"choices":[{"token_ids":[7],"logprobs":{"tokens":["a"],"token_logprobs":[-1]}}]}',
        b'{"choices":[{"token_ids":[7],"logprobs":{"tokens":["token_id:7"],"token_logprobs":[]}}]}',
        b'{"choices":[{"token_ids":[7],"logprobs":{"tokens":["token_id:7"],"token_logprobs":[null]}}]}',
        b'{"choices":[{"token_ids":[7],"logprobs":{"tokens":["token_id:-1"],"token_logprobs":[-1]}}]}',
    ],
)
def test_what_is_no_completion_is_an_error(data: bytes) -> None:
    with pytest.raises(AnswerError):
        parse_event(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_an_error(data: bytes) -> None:
    try:
        parse_event(data)
    except AnswerError:
        pass
