"""Engines of a data-parallel group, on their threads, over both carriers: each step's collective finds every rank."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.contracts.waiting import eventually
from tests.dp.groups import CARRIERS, formed
from tests.patience import PATIENCE_S

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.dp.group import StepGroup
from kvrelay.dp.member import GroupMember
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.step import ModelOutput, SchedulerOutput, StepOutput
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import EngineDeadError, PeerLostError
from kvrelay.executors.mock import MockExecutor, mock_generate

VOCAB_SIZE = 100
LOOKAHEAD = 4


class MeetingExecutor(MockExecutor):
    """A mock whose forward passes meet those of all other ranks, as an all-to-all does."""

    def __init__(self, meeting: threading.Barrier) -> None:
        config = EngineConfig(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, block_size=4)
        super().__init__(config, MockConfig(speedup_ratio=0), vocab_size=VOCAB_SIZE, max_model_len=256)
        self.config = config
        self.meeting = meeting
        self.num_steps = 0

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        assert work.num_seqs
        self.execute_dummy()
        return super().execute(work)

    def execute_dummy(self) -> None:
        self.num_steps += 1
        try:
            self.meeting.wait(PATIENCE_S)
        except threading.BrokenBarrierError as exc:
            raise PeerLostError("a collective failed") from exc


class Rank:
    def __init__(self, member: GroupMember, meeting: threading.Barrier) -> None:
        self.executor = MeetingExecutor(meeting)
        self.lost: list[EngineDeadError] = []
        self.group = StepGroup(member, self.lost.append)
        self.core = EngineCore(self.executor, self.executor.config, MonotonicClock(), worker_id="w", group=self.group)
        self.thread = EngineThread(self.core)
        self.tokens: dict[str, list[int]] = {}
        self.dead: list[EngineDeadError] = []

    def start(self) -> None:
        self.group.ready(self.executor)
        self.thread.start(self.take, self.dead.append)

    def take(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    def add(self, request_id: str, prompt: list[int], num_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.thread.post(lambda core: core.add_request(Request(request_id, prompt, sampling)))

    async def has(self, request_id: str, prompt: list[int], num_tokens: int) -> None:
        await eventually(lambda: len(self.tokens.get(request_id, ())) == num_tokens or bool(self.dead))
        assert self.tokens[request_id] == mock_generate(prompt, num_tokens, vocab_size=VOCAB_SIZE), self.dead

    @property
    def is_asleep(self) -> bool:
        return not self.core.has_work() and self.thread.progress.iteration is None


async def start_all(members: list[GroupMember]) -> list[Rank]:
    meeting = threading.Barrier(len(members))
    ranks = [Rank(member, meeting) for member in members]
    await asyncio.gather(*(asyncio.to_thread(rank.start) for rank in ranks))
    return ranks


async def close_all(ranks: list[Rank]) -> None:
    closed = await asyncio.gather(*(asyncio.to_thread(rank.thread.close, PATIENCE_S) for rank in ranks))
    assert all(closed)
    assert not any(rank.dead for rank in ranks)
    assert len({rank.executor.num_steps for rank in ranks}) == 1


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_every_step_is_run_by_every_rank(carrier: str, tmp_path: Path):
    with formed(carrier, tmp_path, num_ranks=3, lookahead=LOOKAHEAD) as members:
        ranks = await start_all(members)
        # On one rank only, then on all of them, then in bursts, with sleep in between.
        ranks[1].add("a", [1, 2, 3], 9)
        await ranks[1].has("a", [1, 2, 3], 9)
        await eventually(lambda: all(rank.is_asleep for rank in ranks))
        assert ranks[0].executor.num_steps <= 9 + LOOKAHEAD + 1
        for burst in range(5):
            for number, rank in enumerate(ranks):
                rank.add(f"b{burst}", [burst + 1, number + 1], burst * 7 + number + 1)
            for number, rank in enumerate(ranks):
                await rank.has(f"b{burst}", [burst + 1, number + 1], burst * 7 + number + 1)
            if burst % 2:
                await eventually(lambda: all(rank.is_asleep for rank in ranks))
        await eventually(lambda: all(rank.is_asleep for rank in ranks))
        assert len({rank.executor.num_steps for rank in ranks}) == 1
        await close_all(ranks)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_an_idle_group_takes_no_steps(carrier: str, tmp_path: Path):
    with formed(carrier, tmp_path, lookahead=0) as members:
        ranks = await start_all(members)
        ranks[0].add("a", [1, 2, 3], 1)
        await ranks[0].has("a", [1, 2, 3], 1)
        # The round that cleans up, and rounds that only answer questions, take none.
        for rank in ranks:
            for _ in range(3):
                await rank.thread.call(lambda core: core.metrics())
            await rank.thread.call(lambda core: core.clear_cache())
        await eventually(lambda: all(rank.is_asleep for rank in ranks))
        assert [rank.executor.num_steps for rank in ranks] == [1, 1]
        await close_all(ranks)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_closed_rank_steps_on_for_the_others(carrier: str, tmp_path: Path):
    with formed(carrier, tmp_path, lookahead=LOOKAHEAD) as members:
        ranks = await start_all(members)
        closing = asyncio.create_task(asyncio.to_thread(ranks[1].thread.close, PATIENCE_S))
        await eventually(lambda: ranks[1].group.has_left)
        ranks[0].add("a", [1, 2, 3], 30)
        await ranks[0].has("a", [1, 2, 3], 30)
        assert not closing.done()
        await close_all(ranks[:1])
        assert await closing
        assert ranks[0].executor.num_steps == ranks[1].executor.num_steps


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_lost_rank_ends_the_engines(carrier: str, is_busy: bool, tmp_path: Path):
    with formed(carrier, tmp_path, num_ranks=3, lookahead=LOOKAHEAD) as members:
        ranks = await start_all(members)
        if is_busy:
            ranks[0].add("a", [1, 2, 3], 200)
            await eventually(lambda: len(ranks[0].tokens.get("a", ())) > 3)
        ranks[2].group.close()
        await eventually(lambda: all(rank.group.ended is not None for rank in ranks))
        # What the kernel does to the collective of a process that is gone.
        ranks[0].executor.meeting.abort()
        for rank in ranks[:2]:
            await eventually(lambda rank=rank: bool(rank.dead))
            assert "rank 2 of the data-parallel group (place 2) has ended" in rank.dead[0].message
        for rank in ranks:
            assert rank.thread.close(PATIENCE_S)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_every_rank_hears_why_one_has_failed(carrier: str, tmp_path: Path):
    def fail(work: SchedulerOutput) -> ModelOutput:
        raise RuntimeError("out of memory")

    with formed(carrier, tmp_path, lookahead=LOOKAHEAD) as members:
        ranks = await start_all(members)
        ranks[1].executor.execute = fail
        ranks[1].add("a", [1, 2, 3], 200)
        # Then the failed engine's process ends, and with it the collective that the other rank may be in.
        await eventually(lambda: ranks[0].group.ended is not None)
        ranks[0].executor.meeting.abort()
        await eventually(lambda: bool(ranks[0].dead and ranks[1].dead))
        assert "out of memory" in ranks[1].dead[0].message
        assert "rank 1 of the data-parallel group (place 1) has failed: RuntimeError" in ranks[0].dead[0].message
        for rank in ranks:
            assert rank.thread.close(PATIENCE_S)


async def test_a_group_that_ends_while_it_loads(tmp_path: Path):
    with formed("shm", tmp_path) as members:
        lost: list[EngineDeadError] = []
        group = StepGroup(members[0], lost.append)
        members[1].close()
        with pytest.raises(EngineDeadError, match="rank 1 of the data-parallel group"):
            await asyncio.to_thread(group.ready, None)
        await eventually(lambda: len(lost) == 1)


async def test_ranks_of_a_dense_model_run_free(tmp_path: Path):
    with formed("shm", tmp_path) as members:
        meeting = threading.Barrier(1)
        ranks = [Rank(member, meeting) for member in members]
        await asyncio.gather(*(asyncio.to_thread(rank.group.ready, None) for rank in ranks))
        for rank in ranks:
            rank.thread.start(rank.take, rank.dead.append)
        ranks[0].add("a", [1, 2, 3], 9)
        await ranks[0].has("a", [1, 2, 3], 9)
        assert [rank.executor.num_steps for rank in ranks] == [9, 0]
        await asyncio.gather(*(asyncio.to_thread(rank.thread.close, PATIENCE_S) for rank in ranks))
