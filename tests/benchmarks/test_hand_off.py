"""What hand-offs cost the computation beside them: the benchmark runs; its figures are no test."""

from __future__ import annotations

import pytest
from benchmarks.hand_off import _beside, _decode_steps, beside_text, run_beside_compute

from kvrelay.config import TransferConfig
from kvrelay.data import bundled_checkpoint_path


def test_medians_and_ratios_of_turns() -> None:
    row = _beside("x", [(1.0, 1.0), (2.0, 3.0), (4.0, 4.4)], 1.1)
    assert (row["without_s"], row["with_s"], row["num_turns"]) == (2.0, 3.0, 3)
    assert row["ratio"] == pytest.approx(1.1)  # of the turns' ratios: a drift between turns does not count
    assert (row["ratio_min"], row["ratio_max"]) == (1.0, 1.5)
    assert row["ratio_min"] < row["ratio_low"] < row["ratio"] < row["ratio_high"] < row["ratio_max"]


@pytest.mark.matrix
def test_another_process_writes_and_copies_while_decode_steps_are_timed() -> None:
    rows, rates = _decode_steps(bundled_checkpoint_path(), TransferConfig(transport="shm"), 1, 64)
    assert [row["target"] for row in rows] == [1.05, "-", "-"]
    assert all(0 < row["ratio_min"] == row["ratio"] == row["ratio_max"] for row in rows)
    assert rates["copy"] > 0 < rates["stream"]


@pytest.mark.matrix
def test_both_parts() -> None:
    report = run_beside_compute(bundled_checkpoint_path(), TransferConfig(transport="shm"), 1, 64)
    assert all(row["without_s"] > 0 < row["with_s"] for row in report["first_tokens"])
    text = beside_text(report)
    assert all(f"first token of {of}-first" in text for of in ("300 tokens, decode", "2,000 tokens, prefill"))
