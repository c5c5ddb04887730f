"""What ``kvrelay status --explain`` prints besides the table of candidates."""

from __future__ import annotations

from kvrelay.launch.frontend_calls import counts_line


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
