"""What stands in the way of the first and second token: the arithmetic of the benchmark, without vLLM."""

from __future__ import annotations

import argparse
import shlex

from benchmarks.vllm_hand_off import pair, parts

from kvrelay.bench.cases import parse_case
from kvrelay.marks.waterfall import Span, Waterfall


def test_what_comes_after_the_prefill_is_told_apart() -> None:
    spans = [
        Span("prefill-1", "prefill", 5.0, 60.0),
        Span("decode-1", "transfer", 40.0, 62.5),
        Span("decode-1", "load", 66.0, 70.5),
        Span("decode-1", "resume", 71.0, 75.0),
    ]
    shown = Waterfall(
        **{"id": "a", "model": "m", "received_unix": 0.0, "latency_ms": 80.0, "ttft_ms": 64.0, "status": "finished"},
        **{"place": "remote", "prompt_tokens": 9, "output_tokens": 2, "frontend": "f", "error": None},
        processes=[],
        spans=spans,
        unattributed_ms=0.0,
        estimates=None,
        transfer=None,
    )
    assert parts(shown) == {"after prefill": 4.0, "load": 4.5}


def test_a_pair_of_other_sources_runs_the_same_command() -> None:
    given = argparse.Namespace(
        **{"model": "m", "transport": "shm", "order": "decode-first", "dtype": "bfloat16", "max_model_len": 8192},
        kv_cache_memory="1GiB",
    )
    own, other = pair(given, 2048), pair(given, 2048, "/other/src")
    assert shlex.split(other)[:2] == ["env", "PYTHONPATH=/other/src"]
    assert shlex.split(other)[2:] == shlex.split(own)
    assert parse_case(f"own={own}").command == own
