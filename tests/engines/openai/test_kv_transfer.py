"""The bodies that pairs of servers get, and what a server must never get."""

from __future__ import annotations

import pytest

from kvrelay.config import UpstreamConfig
from kvrelay.engines.hosted.backend import AnswerError
from kvrelay.engines.hosted.vllm_transfer import VllmTransfer
from kvrelay.engines.openai.kv_transfer import SglangTransfer, kv_transfer_for
from kvrelay.errors import ConfigError

BODY = {
    "model": "m",
    "prompt": [1, 2, 3],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 9,
    "stop_token_ids": [7],
    "seed": 5,
}
ANSWER = b'{"choices": [], "kv_transfer_params": {"do_remote_prefill": true, "remote_block_ids": [[1]], "x": 2}}'


def test_a_prefill_of_vllm_is_one_token_that_nothing_ends() -> None:
    body, params = VllmTransfer().prefill_body(BODY)
    assert params is None, "they come with the answer"
    transfer = body.pop("kv_transfer_params")
    assert (transfer.pop("do_remote_decode"), transfer.pop("do_remote_prefill")) == (True, False)
    assert set(transfer.values()) == {None}
    assert body == {"model": "m", "prompt": [1, 2, 3], "stream": False, "max_tokens": 1, "seed": 5, "ignore_eos": True}


def test_stop_tokens_that_must_not_be_sampled_stay() -> None:
    body, _ = VllmTransfer().prefill_body({**BODY, "min_tokens": 4})
    assert (body["min_tokens"], body["stop_token_ids"]) == (1, [7])


def test_what_the_prefill_server_answers_goes_to_the_decode_server_unread() -> None:
    body = VllmTransfer().decode_body(BODY, VllmTransfer().params_of(ANSWER))
    expected = {"do_remote_prefill": True, "remote_block_ids": [[1]], "x": 2}
    assert body == {**BODY, "kv_transfer_params": expected}


@pytest.mark.parametrize(
    "answer", [b"{}", b'{"kv_transfer_params": null}', b"[", b'{"kv_transfer_params": 5}', b"\xff"]
)
def test_an_answer_without_params_is_no_prefill(answer: bytes) -> None:
    with pytest.raises(AnswerError):
        VllmTransfer().params_of(answer)


@pytest.mark.parametrize(
    "params",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"do_remote_prefill": true, "remote_block_ids": []}',
        b'{"do_remote_prefill": true}',
        b'{"do_remote_prefill": 1, "remote_block_ids": [[1]]}',
    ],
)
def test_params_on_which_vllm_would_end_do_not_reach_it(params: bytes) -> None:
    with pytest.raises(AnswerError):
        VllmTransfer().decode_body(BODY, params)


def test_kv_that_is_not_needed_is_fetched_by_a_request_of_one_token() -> None:
    body = VllmTransfer().discard_body("m", VllmTransfer().params_of(ANSWER))
    assert body is not None
    assert (body["model"], len(body["prompt"]), body["max_tokens"], body["stream"]) == ("m", 1, 1, False)
    assert body["kv_transfer_params"]["x"] == 2
    assert SglangTransfer("h", 1).discard_body("m", b"{}") is None


def test_both_servers_of_sglang_get_one_room() -> None:
    transfer = SglangTransfer("p.example", 9001)
    body, params = transfer.prefill_body(BODY)
    assert params is not None
    other = SglangTransfer("d.example", 9002).decode_body(BODY, params)
    assert (other["bootstrap_host"], other["bootstrap_port"]) == ("p.example", 9001)
    assert 0 <= other["bootstrap_room"] < 2**63
    del other["stream_options"]
    assert body == {**other, "stream": False}
    again, _ = transfer.prefill_body(BODY)
    assert again["bootstrap_room"] != body["bootstrap_room"]


@pytest.mark.parametrize("params", [b"", b"{}", b'{"bootstrap_host": "h", "bootstrap_port": "1", "bootstrap_room": 1}'])
def test_other_params_are_no_room(params: bytes) -> None:
    with pytest.raises(AnswerError):
        SglangTransfer("h", 1).decode_body(BODY, params)


def test_a_bootstrap_server_is_at_its_prefill_server_unless_told() -> None:
    def asked(**fields: str) -> dict[str, object]:
        config = UpstreamConfig(upstream="http://gpu1:8000", upstream_kv_transfer="sglang", **fields)
        transfer = kv_transfer_for(config)
        assert transfer is not None
        return transfer.prefill_body(BODY)[0]

    assert (asked()["bootstrap_host"], asked()["bootstrap_port"]) == ("gpu1", 8998)
    there = asked(upstream_bootstrap="10.0.0.5:9000")
    assert (there["bootstrap_host"], there["bootstrap_port"]) == ("10.0.0.5", 9000)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        asked(upstream_bootstrap="host:port")
    with pytest.raises(ConfigError, match="sglang"):
        kv_transfer_for(UpstreamConfig(upstream_bootstrap="h:1"))
