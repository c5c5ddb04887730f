"""What hand-offs cost the computation beside them: the benchmark runs; its figures are no test."""

from __future__ import annotations

import pytest
from benchmarks.hand_off import _beside, _decode_steps, beside_text, run_beside_compute

from kvrelay.config import TransferConfig
from kvrelay.data import bundled_checkpoint_path


def test_medians_and_ratios_of_turns() -> None:
    row = _beside("x", [(1.0, 1.0), (2.0, 3.0), (4.0, 4.4)], 1.1)
    assert (row["alone_s"], row["beside_s"], row["ratio"]) == (2.0, 3.0, 1.5)
    assert (row["ratio_min"], row["ratio_max"], row["num_turns"]) == (1.0, 1.5, 3)


def test_another_process_writes_while_decode_steps_are_timed() -> None:
    row, rate = _decode_steps(bundled_checkpoint_path(), TransferConfig(transport="shm"), 1, 64)
    assert 0 < row["ratio_min"] == row["ratio"] == row["ratio_max"]
    assert rate > 0


@pytest.mark.matrix
def test_both_parts() -> None:
    report = run_beside_compute(bundled_checkpoint_path(), TransferConfig(transport="shm"), 1, 64)
    assert report["first_token"]["alone_s"] > 0 < report["first_token"]["beside_s"]
    assert "first token of 2,000 tokens" in beside_text(report)
