"""``benchmarks burst``: its cases and figures, which need no server."""

from __future__ import annotations

import msgspec
import pytest
from benchmarks.burst import BurstLoad, arrangements, burst_figures

from kvrelay.bench.report.metrics import ClientLoad, Outcome, RequestRecord, RunResult
from kvrelay.errors import InvalidInputError

LOAD = BurstLoad(num_prompts=20, prompt=800, output=8, chat_prompt=30, chat_output=16, chat_rate=4.0, chat_s=2.4)


def record(name: str, sent_s: float, ttft_s: float | None, outcome: Outcome = Outcome.OK) -> RequestRecord:
    sent_ns = round(sent_s * 1e9)
    stamps = () if ttft_s is None else (sent_ns + round(ttft_s * 1e9), sent_ns + round((ttft_s + 0.01) * 1e9))
    return RequestRecord(name, outcome, sent_ns, sent_ns + 10**9, stamps, (1,) * len(stamps))


def result(*records: RequestRecord) -> RunResult:
    return RunResult(records, 0, 10 * 10**9, ClientLoad(0.1, 0.0))


def test_chats_after_the_burst_do_not_count() -> None:
    idle = result(record("idle", 0, 0.005), record("idle", 1, 0.007))
    burst = result(
        record("long", 0, 1.0), record("long", 0, 3.0), record("chat", 1, 0.5), record("chat", 2, 2.0),
        record("chat", 3.5, 0.005),
    )  # fmt: skip
    turn = burst_figures(idle, burst)
    assert (turn["num_chats"], turn["num_failed"]) == (2, 0)
    assert (turn["idle_p50_s"], turn["chat_p50_s"], turn["chat_max_s"]) == pytest.approx((0.006, 1.25, 2.0))
    assert (turn["long_p50_s"], turn["long_max_s"]) == pytest.approx((2.0, 3.0))
    assert turn["chat_gap_p99_s"] == pytest.approx(0.01)


def test_failures_are_counted_and_a_turn_without_an_answer_is_an_error() -> None:
    refused = record("long", 0, None, Outcome.FAILED)
    assert burst_figures(result(), result(refused, record("chat", 0, 0.1)))["error"] == "no request succeeded"
    turn = burst_figures(result(), result(refused, record("long", 0, 1.0), record("chat", 0, 0.1)))
    assert (turn["num_failed"], "error" in turn) == (1, False)
    assert "before a chat" in burst_figures(result(), result(record("long", 0, 1.0)))["error"]


def test_what_the_client_sent_too_late_is_told_apart() -> None:
    """A chat that was due at 1 s, and written half a second later, had its first token 0.2 s after that."""
    late = msgspec.structs.replace(record("chat", 1, 0.7), due_ns=10**9, written_ns=15 * 10**8)
    turn = burst_figures(result(), result(record("long", 0, 3.0), late, record("chat", 2, 0.1)))
    assert turn["client_max_s"] == pytest.approx(0.5)
    assert turn["chat_max_s"] == pytest.approx(0.2)


def test_variants_are_one_prefill_and_one_decode_worker() -> None:
    assert arrangements(["big=--max-prefill-queue-size 9"]) == {
        "aggregated": "--prefill 0 --decode 1",
        "1P1D": "--prefill 1 --decode 1",
        "big": "--prefill 1 --decode 1 --max-prefill-queue-size 9",
    }
    for wrong in ("--what", "a/b=--what", "=--what"):
        with pytest.raises(InvalidInputError, match="NAME=ARGUMENTS"):
            arrangements([wrong])


def test_the_load_is_all_prompts_at_once_and_chats_at_a_rate() -> None:
    long, chat = LOAD.burst
    assert (long.num_requests, long.rate, long.max_concurrency) == (20, None, None)
    assert (chat.num_requests, chat.rate) == (10, 4.0)
