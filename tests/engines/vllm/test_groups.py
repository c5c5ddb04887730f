"""Data-parallel ranks with vLLM, without vLLM: where they meet, and that a host ends with its group, not before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.dp.groups import formed
from tests.engines.openai.test_host import PROMPT, Running
from tests.engines.vllm.scripted import BLOCK_SIZE, DeadVllmError, ScriptedVllm, scripted_start
from tests.patience import noticed

from kvrelay.config import EngineConfig, GroupConfig, WorkerConfig
from kvrelay.data import bundled_checkpoint_path
from kvrelay.dp.group import StepGroup
from kvrelay.engines import vllm
from kvrelay.engines.hosted import host as host_module
from kvrelay.engines.hosted.host import CacheEvents
from kvrelay.engines.registry import build_host
from kvrelay.engines.vllm.arguments import rank_events
from kvrelay.engines.vllm.library import Started

NUM_RANKS = 2


@dataclass
class Rank:
    running: Running
    group: StepGroup
    library: ScriptedVllm
    arguments: dict[str, Any]

    async def close(self) -> None:
        assert await asyncio.to_thread(self.running.host.close)


def _as_vllm(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM 0.32, ``ZmqEventPublisher.offset_endpoint_port``."""
    rank, events = arguments["data_parallel_rank"], dict(arguments["kv_events_config"])
    for name in ("endpoint", "replay_endpoint") if rank else ():
        assert "inproc" in events[name], "Invalid endpoint: must contain 'inproc' or 'tcp'"
        events[name] = f"{events[name]}_dp{rank}"
    return {**arguments, "kv_events_config": events}


@asynccontextmanager
async def _group(directory: Path) -> AsyncIterator[list[Rank]]:
    """Ranks of a group that is formed and loaded, started. Those that have not ended are closed together."""
    libraries = [ScriptedVllm() for _ in range(NUM_RANKS)]
    given: list[dict[str, Any]] = [{} for _ in range(NUM_RANKS)]

    def start(arguments: Mapping[str, Any], settings: WorkerConfig, memory: object) -> Started:
        rank = settings.group.rank
        given[rank] = dict(arguments)
        return scripted_start(libraries[rank], _as_vllm(arguments))

    def load(group: StepGroup, rank: int) -> Running:
        config = GroupConfig(dp=NUM_RANKS, dp_rank=rank, dp_address=str(directory))
        engine = EngineConfig(num_blocks=64, max_model_len=256)
        settings = WorkerConfig(model_path=bundled_checkpoint_path(), engine=engine, group=config)
        host = build_host("vllm", settings, f"worker-{rank}", group=group)
        assert host is not None
        return Running(host)

    with pytest.MonkeyPatch.context() as patch, formed("shm", directory, NUM_RANKS) as members:
        patch.setattr(vllm, "start_vllm", start)
        patch.setattr(host_module, "HEALTH_INTERVAL_S", 0.01)
        groups = [StepGroup(member, lambda error: None) for member in members]
        # Neither is loaded before the other is.
        running = await asyncio.gather(*(asyncio.to_thread(load, group, rank) for rank, group in enumerate(groups)))
        for each in running:
            each.host.start(each.on_step, each.dead.append)
        ranks = [Rank(*each) for each in zip(running, groups, libraries, given)]
        yield ranks
        await asyncio.gather(*(rank.close() for rank in ranks))
    assert all(library.is_shut_down for library in libraries)


async def test_ranks_meet_and_answer_with_prefixes_of_their_own(tmp_path: Path) -> None:
    async with _group(tmp_path) as ranks:
        places = [(rank.arguments["data_parallel_address"], rank.arguments["data_parallel_rpc_port"]) for rank in ranks]
        assert places[0] == places[1]
        assert places[0][0] == "127.0.0.1"
        assert [rank.arguments["data_parallel_rank"] for rank in ranks] == [0, 1]
        assert all(rank.arguments["data_parallel_size"] == 2 for rank in ranks)
        assert all(rank.arguments["data_parallel_external_lb"] for rank in ranks)
        for rank in ranks:
            await rank.running.add("a")
            await rank.running.end("a")
            # By events, which a rank publishes elsewhere than it was told to.
            await noticed(lambda heard=rank.running.events: heard)
        assert ranks[0].running.tokens("a") == ranks[1].running.tokens("a")
        assert len(PROMPT) >= BLOCK_SIZE


async def test_a_rank_is_there_until_all_are_closed(tmp_path: Path) -> None:
    async with _group(tmp_path) as ranks:
        first, second = ranks
        leaving = asyncio.create_task(first.close())
        await noticed(lambda: first.group.has_left)
        await second.running.add("a")
        await second.running.end("a")
        assert not first.library.is_shut_down, "steps of the second need its experts"
        await second.close()
        await leaving
        assert not first.running.dead + second.running.dead


async def test_a_lost_rank_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    async with _group(tmp_path) as ranks:
        ranks[1].group.close()  # as the kernel does when the process ends
        await noticed(lambda: ranks[0].running.dead)
        assert "rank 1 of the data-parallel group (place 1) has ended" in ranks[0].running.dead[0].message


async def test_a_dead_engine_process_ends_all_ranks_with_its_reason(tmp_path: Path) -> None:
    async with _group(tmp_path) as ranks:
        ranks[1].library.health = DeadVllmError()
        await noticed(lambda: ranks[0].running.dead)
        reason = ranks[0].running.dead[0].message
        assert "rank 1 of the data-parallel group (place 1) has failed: vLLM's engine process has ended" in reason


def test_where_a_rank_publishes() -> None:
    events = CacheEvents("ipc:///d/inproc-events", "ipc:///d/inproc-replay")
    assert rank_events(events, 0) == events
    assert rank_events(events, 3) == CacheEvents("ipc:///d/inproc-events_dp3", "ipc:///d/inproc-replay_dp3")
