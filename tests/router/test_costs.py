"""Measured transfer times of a pair: from either side, forgotten with their worker, old ones do not count."""

from __future__ import annotations

import math

import numpy as np

from kvrelay.core.clock import ManualClock
from kvrelay.core.events import TransferCost
from kvrelay.router.costs import KEEP_S, TransferTimes, pair_token_seconds


def test_the_prefill_workers_time_counts_before_the_decode_workers() -> None:
    clock = ManualClock()
    prefills, decodes = TransferTimes(clock), TransferTimes(clock)
    prefills.heard("p0", (TransferCost("d0", 1e-6),))
    decodes.heard("d0", (TransferCost("p0", 9e-6), TransferCost("p1", 2e-6)))
    found = pair_token_seconds(["p0", "p1"], ["d0", "d1"], prefills, decodes)
    assert np.array_equal(found, [[1e-6, math.nan], [2e-6, math.nan]], equal_nan=True)
    prefills.forget("p0")
    assert pair_token_seconds(["p0"], ["d0"], prefills, decodes).tolist() == [[9e-6]]


def test_a_time_counts_for_a_while_after_its_last_change() -> None:
    clock = ManualClock()
    times = TransferTimes(clock)
    cost = (TransferCost("d", 1e-6),)
    times.heard("p", cost)
    clock.advance(KEEP_S)
    times.heard("p", cost)
    times.heard("p", ())
    assert times.of("p") == {"d": 1e-6}
    clock.advance(1.0)
    assert times.of("p") == {}
    times.heard("p", (TransferCost("d", 2e-6),))
    assert times.of("p") == {"d": 2e-6}
