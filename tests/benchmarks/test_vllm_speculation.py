"""``benchmarks.vllm_speculation``: its figures, which need no server."""

from __future__ import annotations

import math

import pytest
from benchmarks.vllm_speculation import DRAFTING, PLAIN, SPLIT, Drafts, counted, drafts_in, shown

METRICS = """\
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 120.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0
"""


def test_tokens_that_were_accepted_took_no_step() -> None:
    """200 tokens of which 120 were drafted: 80 steps."""
    drafts = drafts_in(METRICS).since(Drafts())
    assert counted(drafts, 200.0) == {"tokens_per_step": 2.5, "accepted": 0.4}
    nothing = counted(drafts_in(""), 200.0)
    assert nothing["tokens_per_step"] == 1.0
    assert math.isnan(nothing["accepted"])


def test_what_is_kept_is_the_ratio_of_the_gains() -> None:
    """10 to 5 ms is a gain of 2, and 12 to 8 one of 1.5: three quarters of it."""
    known = {"tokens_per_step": 2.5, "accepted": 0.4, "failed": 0.0}
    rows = {
        case: {"tpot_mean_s": ms / 1e3, "output_tokens_per_s": rate, **known}
        for case, ms, rate in (
            (PLAIN, 10.0, 100.0),
            (PLAIN + DRAFTING, 5.0, 180.0),
            (SPLIT, 12.0, 80.0),
            (SPLIT + DRAFTING, 8.0, 108.0),
        )
    }
    lines = {line["case"]: line for line in shown("1", rows)}
    assert [lines[case]["kept"] for case in rows] == ["", 1.0, "", pytest.approx(0.75)]
    assert (lines[SPLIT + DRAFTING]["gain"], lines[SPLIT + DRAFTING]["rate_gain"]) == pytest.approx((1.5, 1.35))
    assert lines[SPLIT + DRAFTING]["rate_kept"] == pytest.approx(0.75)
    assert (lines[SPLIT]["at_once"], lines[SPLIT]["tokens_per_step"]) == ("1", "")
