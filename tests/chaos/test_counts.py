"""What a chaos run reports of its workers' own counts, and how its data plane is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from tests.chaos import __main__ as chaos_main
from tests.chaos.counts import WorkerCounts, counts_of, sum_counts
from tests.chaos.run import NUM_PROMPTS, NUM_PROMPTS_OF_RANKS, ChaosOptions

from kvrelay.errors import FatalError
from kvrelay.handoff.prefill_state import PrefillCounters
from kvrelay.transfer.stats import P2pCounters, TransferStats
from kvrelay.worker.reporting.stats import DecodeStats

P2P_FLAGS = ("--transport", "p2p", "--kv-buffer-size", "65536", "--p2p-pool-bytes", "262144", "--send-type", "GET")


def status(p2p: P2pCounters | None) -> dict[str, Any]:
    """The parts of a worker's status that are counted, as the operator gets them."""
    return {
        "decode": msgspec.structs.asdict(DecodeStats(num_recomputed=2)),
        "prefill": msgspec.structs.asdict(PrefillCounters(num_prefills=5)),
        "kv_tiers": None,
        "transfer": msgspec.to_builtins(TransferStats((), 0, 0, 0, p2p)),
    }


def test_the_counts_of_workers_of_any_transport_are_added_up() -> None:
    with_p2p = counts_of(status(P2pCounters(num_spilled=7, num_spilled_bytes=700, num_waited=3, num_lost=1)))
    assert with_p2p == WorkerCounts(5, 2, 7, 700, 3, 1)
    assert counts_of(status(None)) == WorkerCounts(5, 2)
    assert sum_counts([with_p2p, with_p2p, counts_of(status(None))]) == WorkerCounts(15, 6, 14, 1400, 6, 2)
    assert sum_counts([]) == WorkerCounts()


def test_the_options_of_the_data_plane_reach_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[ChaosOptions] = []

    async def refuse(options: ChaosOptions, progress: object) -> None:
        taken.append(options)
        raise FatalError("seen enough")

    monkeypatch.setattr(chaos_main, "run_chaos", refuse)
    outcome = CliRunner().invoke(chaos_main.chaos, ["--engine", "torch", *P2P_FLAGS])
    assert isinstance(outcome.exception, FatalError), outcome.output
    (options,) = taken
    assert options.transport == "p2p"
    words = options.worker_flags
    for flag, value in zip(P2P_FLAGS[::2], P2P_FLAGS[1::2], strict=True):
        assert words[words.index(flag) + 1] == value


def test_without_such_options_workers_have_the_defaults() -> None:
    options = ChaosOptions(Path("m"), "mock", 10, 0, 2, 2, 2, 8, 2.0, 3.0)
    assert options.transport == "nixl"
    assert "--transport" not in options.worker_flags


@pytest.mark.parametrize(
    ("tp", "pp", "asked"), [(1, 1, NUM_PROMPTS), (2, 1, NUM_PROMPTS_OF_RANKS), (1, 2, NUM_PROMPTS_OF_RANKS)]
)
def test_workers_of_several_ranks_get_fewer_questions_unless_told_otherwise(tp: int, pp: int, asked: int) -> None:
    options = ChaosOptions(Path("m"), "torch", 10, 0, 2, 2, 2, 8, 2.0, 3.0, tp=tp, pp=pp)
    assert options.num_questions == asked
    assert replace(options, num_prompts=75).num_questions == 75
