"""What ``kvrelay status --explain`` prints."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.launch.frontend_calls import counts_line, decision_table


def test_every_decision_and_refusal_is_named_and_zeros_are_left_out() -> None:
    counts = {
        "fallbacks": 2,
        "places": {"remote": 7, "local_short": 1},
        "refusals": {"queue_full": 3, "draining": 0},
        "rejections": {"in_flight": 0},
    }
    assert counts_line(counts) == (
        "since this frontend's start: placed without costs: 2; prefills: local_short 1, remote 7; "
        "refused by workers: queue_full 3; refused here: none"
    )


def candidate(worker_id: str, score: float, **terms: float | None) -> dict[str, Any]:
    return {"worker_id": worker_id, "score": score, "overlap_blocks": 3, "cache_usage": 0.5, "num_waiting": 2} | {
        "prefill_tokens": 100,
        "decode_tokens": 2000,
        "first_token_s": 0.1234,
        "lost_prefix_s": 0.0123,
        "decode_s": 0.0045,
        "load_s": None,
        **terms,
    }


def test_a_decision_is_whole_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Every head and number, and every term of the score: also what it takes to load the prefix."""
    monkeypatch.setenv("COLUMNS", "80")
    ends = {"role": "decode", "hit_rate": 0.25}
    decision_table(
        {
            "model": "m",
            "pid": 7,
            "num_prompt_tokens": 500,
            "block_size": 16,
            "decision": {"worker_id": "worker-0123456789", "policy": "kv", "hit_rate": 0.25}
            | {"candidates": [candidate("worker-0123456789", -0.1625, load_s=0.0223), candidate("worker-9", -0.5)]},
            "pair": {
                "place": "remote",
                "unit": "s",
                "prefill": {"worker_id": "worker-aaaaaaaaaa", **ends},
                "decode": {"worker_id": "worker-0123456789", **ends},
                "candidates": [
                    {"prefill_worker_id": "worker-aaaaaaaaaa", "decode_worker_id": "worker-0123456789", "cost": 0.3456}
                    | {"prefill_cost": 0.1, "decode_cost": 0.2, "transfer_cost": 0.0456, "is_transfer_measured": False}
                ],
            },
            "counts": {"fallbacks": 0, "places": {}, "refusals": {}, "rejections": {}},
        }
    )
    shown = capsys.readouterr().out
    for text in (
        "first token",
        "lost prefix",
        "load",
        "overlap",
        "KV used",
        "0.1234 s",
        "0.0223 s",
        "2,000",
        "~0.0456",
    ):
        assert text in shown
    assert "…" not in shown
