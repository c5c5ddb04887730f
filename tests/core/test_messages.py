"""The request plane's codec: everything survives a round trip, nothing malformed gets through."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.handoff import HandoffId
from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.core.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AdminReply,
    AdminRequest,
    GenerateRequest,
    OutputBatch,
    Ping,
    Pong,
    RequestRefused,
    SessionPaused,
    TokenOutput,
)
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.core.token_ids import to_bytes
from kvrelay.errors import ProtocolError
from kvrelay.handoff.messages import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffGrant,
    HandoffRefused,
    HandoffReleased,
    Prefix,
)
from kvrelay.rpc.wire import decode_message, encode_message

HANDOFF = HandoffId("d", 1)
LOGPROBS = PositionLogprobs(TokenLogprob(5, -0.25, 1), (TokenLogprob(5, -0.25, 1), TokenLogprob(7, -2.0, 2)))
MESSAGES = [
    GenerateRequest("r1", "w1", to_bytes((1, 2, 3)), SamplingParams(logit_bias={3: 1.5}, stop_token_ids=(2,)), (9,), 1),
    AbortRequest("r1"),
    SessionPaused("r1", "bash", within_s=2.5),
    SessionPaused("r1", is_over=True),
    OutputBatch(
        (
            TokenOutput("r1", (4, 5), logprobs=(LOGPROBS, LOGPROBS), num_cached_tokens=16, position=3),
            TokenOutput("r2", (), FinishReason.STOP, stop_token=2, prompt_logprobs=(None, LOGPROBS)),
        )
    ),
    RequestRefused("r1", "full", 429, True),
    HandoffClaim(HANDOFF, "p", "abc"),
    HandoffClaim(HANDOFF, "p", "abc", wants_checksums=True),
    HandoffGrant(HANDOFF, 1, (4, 5), 16),
    HandoffGrant(HANDOFF, 1, (4, 5), 16, checksums=(2**64 - 1,)),
    HandoffRefused(HANDOFF, "gone"),
    HandoffAbandon(HANDOFF, 2),
    HandoffReleased(HANDOFF, "p", "failed"),
    HandoffDone(HANDOFF, 1, 7, LOGPROBS, 1024, 0.5),
    Ping(1),
    Pong(1, "w"),
    AdminRequest(1, "status"),
    AdminReply(1, "{}"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_truncated_frames_are_refused(message):
    frame = encode_message(message)
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode_message(frame[:length])


def test_a_prompt_travels_as_little_endian_words_and_half_an_id_is_refused():
    request = GenerateRequest("r1", "w1", to_bytes((1, 2**32 - 1)), SamplingParams(), (9,))
    assert request.prompt == bytes([1, 0, 0, 0, 255, 255, 255, 255])
    assert (request.prompt_token_ids, request.num_tokens) == ([1, 2**32 - 1], 3)
    whole = encode_message(request)
    half = whole.replace(b"\xc4\x08" + request.prompt, b"\xc4\x07" + request.prompt[:-1])
    assert len(half) == len(whole) - 1
    with pytest.raises(ProtocolError, match="7 bytes are no token ids"):
        decode_message(half)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_prefix_of_ids_that_no_token_can_have_is_refused(token):
    """Hashing them would fail on the engine's thread, and the claim would wait for ever."""
    with pytest.raises(ProtocolError, match=r"prefix\[0\]"):
        decode_message(encode_message(HandoffClaim(HANDOFF, "p", "abc", prefix=Prefix((1, token)))))


@pytest.mark.parametrize("within_s", [-1.0, float("nan"), float("inf")])
def test_a_promise_that_is_no_time_is_refused(within_s):
    with pytest.raises(ProtocolError, match="within_s"):
        decode_message(encode_message(SessionPaused("r1", "bash", within_s=within_s)))


def test_other_versions_and_pickles_are_refused():
    frame = encode_message(Ping(1))
    with pytest.raises(ProtocolError, match="version"):
        decode_message(bytes([99]) + frame[1:])
    with pytest.raises(ProtocolError):
        decode_message(pickle.dumps(Ping))
    with pytest.raises(ProtocolError):
        decode_message(frame[:1] + pickle.dumps({"type": "Ping"}))


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_errors(data):
    try:
        decode_message(data)
    except ProtocolError:
        pass
    try:
        decode_message(bytes([PROTOCOL_VERSION]) + data)
    except ProtocolError:
        pass
