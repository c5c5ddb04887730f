"""Sampling settings: what is out of range is refused, naming the parameter."""

import math

import pytest

from kvrelay.core.sampling import SamplingParams
from kvrelay.errors import InvalidInputError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("seed", 2**64),
        ("seed", 10**400),
        ("temperature", -(10**400)),
        ("stop_token_ids", (100,)),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("min_tokens", 17),
    ],
)
def test_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**{name: value}).validate(vocab_size=100)
    assert caught.value.param == name
    assert name in caught.value.message


def test_defaults_and_extremes_are_accepted():
    SamplingParams().validate(vocab_size=10)
    SamplingParams(
        max_tokens=0, temperature=0.0, top_k=-1, top_p=1e-9, seed=-(2**63), logit_bias={9: -100.0}, logprobs=20
    ).validate(vocab_size=10)


def test_greedy_and_penalties():
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=0.7).is_greedy
    assert not SamplingParams().needs_penalties
    assert SamplingParams(presence_penalty=0.1).needs_penalties
