"""Tokens that are reported several at once: none is missing, doubled or out of place, whatever happens in between."""

from __future__ import annotations

import pytest
from tests.engine.conftest import build_engine

from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request


def run(engine: EngineCore, *requests: Request) -> dict[str, list[TokenOutput]]:
    """All outputs of each request, checked to follow each other without a gap."""
    outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    known = {request.request_id: request.num_output_tokens for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.position == known[output.request_id]
            known[output.request_id] += len(output.token_ids)
            outputs[output.request_id].append(output)
    engine.check_integrity()
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def request(name: str, max_tokens: int, interval: int = 1, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Request(name, list(range(10, 20)), params, report_interval=interval)


@pytest.mark.parametrize("interval", [1, 2, 5, 16, 1000])
def test_the_first_token_comes_at_once_and_the_end_brings_the_rest(interval: int) -> None:
    alone = tokens(run(build_engine(), request("r", 23))["r"])
    outputs = run(build_engine(), request("r", 23, interval))["r"]
    assert tokens(outputs) == alone
    assert len(outputs[0].token_ids) == 1
    assert outputs[0].num_cached_tokens == 0
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    assert all(len(output.token_ids) == interval for output in outputs[1:-1])
    assert len(outputs) == 1 + -(-22 // interval)


def test_a_stop_token_ends_the_answer_with_what_was_held_back() -> None:
    free = tokens(run(build_engine(), request("r", 23))["r"])
    stop = free[7]
    end = free.index(stop)
    outputs = run(build_engine(), request("r", 23, 16, stop_token_ids=(stop,)))["r"]
    assert tokens(outputs) == free[: end + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_token == stop


def test_logprobs_are_reported_token_by_token() -> None:
    outputs = run(build_engine(), request("r", 9, 16, logprobs=1))["r"]
    assert [len(output.token_ids) for output in outputs] == [1] * 9
    assert all(output.logprobs is not None and len(output.logprobs) == 1 for output in outputs)


def test_a_preempted_request_reports_every_token_once() -> None:
    """Two answers of 40 tokens do not fit into 16 blocks of 4 at once."""
    crowded = build_engine(num_blocks=16)
    outputs = run(crowded, request("a", 40, 7), request("b", 40, 7))
    assert crowded.scheduler.num_preemptions
    alone = tokens(run(build_engine(), request("a", 40))["a"])
    assert tokens(outputs["a"]) == alone
    assert tokens(outputs["b"]) == alone


def test_a_resumed_request_goes_on_at_its_position() -> None:
    whole = tokens(run(build_engine(), request("r", 23))["r"])
    params = SamplingParams(max_tokens=23, ignore_eos=True)
    resumed = Request("r", list(range(10, 20)), params, output_token_ids=whole[:9], report_interval=5)
    assert whole[:9] + tokens(run(build_engine(), resumed)["r"]) == whole
