"""Experts spread over ranks: the same tokens as one process with all experts, whichever ranks have requests."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.dp.groups import FACTS, address_for, formed, join_all
from tests.patience import PATIENCE_S, until

from kvrelay.config import EngineConfig, GroupConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.dp.group import StepGroup
from kvrelay.dp.member import GroupMember
from kvrelay.dp.messages import RankInfo
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.step import StepOutput
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import ConfigError, EngineDeadError, PeerLostError
from kvrelay.executors.torch import build_executor
from kvrelay.executors.torch.config import load_model_config
from kvrelay.executors.torch.parallel.collectives import group_store
from kvrelay.executors.torch.parallel.executor import ParallelExecutor
from kvrelay.executors.torch.parallel.experts import ExpertSeat
from kvrelay.executors.torch.parallel.rank import ParallelRank, check_sizes

ENGINE = EngineConfig(num_blocks=256, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)
NUM_OUTPUTS = 10
Prompts = list[list[int]]


class Rank:
    """One data-parallel rank: engine, thread, rank processes."""

    def __init__(self, model: Path, member: GroupMember, config: GroupConfig, tp: int, pp: int) -> None:
        self.dead: list[EngineDeadError] = []
        self.tokens: dict[str, list[int]] = {}
        self.group = StepGroup(member, self.dead.append)
        # Waiting for a rank of a busy machine is no hang.
        runner = RunnerConfig(dtype="float32", device="cpu", tp=tp, pp=pp, num_threads=1, rank_timeout_s=PATIENCE_S)
        self.executor = ParallelExecutor(model, runner, ENGINE, group=config)
        self.executor.warm_up()
        core = EngineCore(self.executor, ENGINE, MonotonicClock(), worker_id="w", group=self.group)
        self.core, self.thread = core, EngineThread(core)
        self.group.ready(self.executor)
        self.thread.start(self._take, self.dead.append)

    def _take(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    def send(self, name: str, prompts: Prompts, num_outputs: int = NUM_OUTPUTS) -> None:
        for number, prompt in enumerate(prompts):
            request = Request(f"{name}{number}", prompt, greedy(num_outputs))
            self.thread.post(lambda core, request=request: core.add_request(request))

    def answers(self, name: str, count: int) -> list[list[int]]:
        names = [f"{name}{number}" for number in range(count)]
        until(lambda: bool(self.dead) or all(len(self.tokens.get(each, ())) == NUM_OUTPUTS for each in names))
        assert not self.dead
        return [self.tokens[each] for each in names]


def greedy(num_outputs: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)


@contextmanager
def group_of(
    model: Path, directory: Path, dp: int, tp: int = 1, pp: int = 1, carrier: str = "shm"
) -> Iterator[list[Rank]]:
    address = address_for(carrier, directory)
    members = join_all(address, [RankInfo(rank, dp, f"place {rank}", FACTS) for rank in range(dp)])

    def start(rank: int) -> Rank:
        member = members[rank]
        assert isinstance(member, GroupMember), member
        return Rank(model, member, GroupConfig(dp=dp, ep=True, dp_rank=rank, dp_address=str(address)), tp, pp)

    with ThreadPoolExecutor(dp) as pool:
        ranks = list(pool.map(start, range(dp)))
        try:
            yield ranks
        finally:
            assert all(pool.map(lambda rank: rank.thread.close(PATIENCE_S), ranks))


def alone(model: Path, prompts: Prompts) -> list[list[int]]:
    """The answers of one process with all experts."""
    executor = build_executor(model, RunnerConfig(dtype="float32", device="cpu", num_threads=1), ENGINE)
    executor.warm_up()
    core = EngineCore(executor, ENGINE, MonotonicClock(), worker_id="one")
    for number, prompt in enumerate(prompts):
        core.add_request(Request(str(number), prompt, greedy(NUM_OUTPUTS)))
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    executor.shutdown()
    return [tokens[str(number)] for number in range(len(prompts))]


def some_prompts(count: int) -> Prompts:
    draw = random.Random(11)
    return [[draw.randrange(16, 1000) for _ in range(draw.choice((1, 3, 20, 90)))] for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "carrier"), [pytest.param("mixtral", "shm", marks=pytest.mark.matrix), ("qwen3-moe", "rpc")]
)
def test_tokens_equal_one_process(arch: str, carrier: str, checkpoint_of: Any, tmp_path: Path) -> None:
    model, prompts = checkpoint_of(arch), some_prompts(12)
    expected = alone(model, prompts)
    with group_of(model, tmp_path, dp=2, carrier=carrier) as ranks:
        # All on one rank, while the other has none; then some on each.
        ranks[1].send("a", prompts)
        assert ranks[1].answers("a", 12) == expected
        ranks[0].send("b", prompts[:5])
        ranks[1].send("c", prompts[5:])
        assert ranks[0].answers("b", 5) + ranks[1].answers("c", 7) == expected
        until(lambda: not any(rank.core.has_work() for rank in ranks))
        assert ranks[0].group.participant.local_step == ranks[1].group.participant.local_step
        assert ranks[0].group.num_dummy_steps > 0


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_group(checkpoint_of: Any, tmp_path: Path) -> None:
    """A rank process of one engine: its engine names it, and the other one ends as well, whatever it is doing."""
    with group_of(checkpoint_of("qwen3-moe"), tmp_path, dp=2) as ranks:
        ranks[0].send("a", [[1, 2, 3]], num_outputs=480)
        until(lambda: len(ranks[0].tokens.get("a0", ())) > 5)
        os.kill(ranks[1].executor.rank_pids[0], signal.SIGKILL)
        until(lambda: all(rank.dead for rank in ranks))
        assert "was killed by SIGKILL" in ranks[1].dead[0].message
        # Which of its losses the other rank names depends on what it hears first.
        reason = ranks[0].dead[0].message
        assert "rank 1 of the data-parallel group (place 1) has failed" in reason or "a collective failed" in reason


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 2, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 2, 2)])
def test_tokens_with_other_shapes(arch: str, dp: int, tp: int, pp: int, checkpoint_of: Any, tmp_path: Path) -> None:
    model, prompts = checkpoint_of(arch), some_prompts(8)
    with group_of(model, tmp_path, dp, tp, pp) as ranks:
        for number, rank in enumerate(ranks):
            rank.send("a", prompts[number:])
        found = [rank.answers("a", 8 - number) for number, rank in enumerate(ranks)]
    # With tensor parallelism sums over ranks are rounded otherwise: there the ranks are compared with each other.
    expected = alone(model, prompts) if tp == 1 else found[0]
    for number, answers in enumerate(found):
        assert answers == expected[number:]


def test_the_store_needs_no_port_but_a_free_one(tmp_path: Path) -> None:
    """It is that by which the experts of several hosts find each other. A rank may ask before it is served."""
    with socket.socket() as other, formed("rpc", tmp_path) as members, ThreadPoolExecutor(1) as pool:
        server = members[0].server
        assert server is not None
        with suppress(OSError):  # somebody else has the neighbouring port
            other.bind((server.address.host, server.address.port + 1))
            other.listen()
        asking = pool.submit(group_store, server.address, is_host=False, timeout_s=PATIENCE_S)
        store = group_store(server.address, is_host=True, timeout_s=PATIENCE_S)
        store.set("key", "value")
        assert asking.result(PATIENCE_S).get("key") == b"value"


def test_a_rank_does_not_wait_for_a_store_that_never_comes(tmp_path: Path) -> None:
    """Rank 0 has failed before it served one."""
    with ThreadPoolExecutor(1) as pool:
        with formed("rpc", tmp_path) as members:
            server = members[0].server
            assert server is not None
            asking = pool.submit(group_store, server.address, is_host=False, timeout_s=PATIENCE_S)
            until(lambda: len(server.connections) == 3)
        with pytest.raises(PeerLostError, match="does not tell where the group's store is"):
            asking.result(PATIENCE_S)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_each_expert_has_one_seat() -> None:
    seats = [
        ExpertSeat.of(ParallelRank(tp_rank, 2), GroupConfig(dp=4, ep=True, dp_rank=dp_rank, dp_address="/x"))
        for dp_rank in range(4)
        for tp_rank in range(2)
    ]
    assert [seat.index for seat in seats] == list(range(8))
    assert [expert for seat in seats for expert in seat.experts(16)] == list(range(16))


@pytest.mark.parametrize(
    ("arch", "tp", "pp", "dp", "reason"),
    [
        ("llama", 1, 1, 2, "this model has none"),
        ("mixtral", 1, 3, 2, "pp 3 does not divide num_hidden_layers"),
        ("mixtral", 2, 1, 64, "fewer than the 128 ranks"),
        ("mixtral", 1, 1, 3, r"dp 3 \* tp 1 = 3 ranks do not divide"),
    ],
)
def test_sizes_that_cannot_be(arch: str, tp: int, pp: int, dp: int, reason: str, checkpoint_of: Any) -> None:
    group = GroupConfig(dp=dp, ep=True, dp_rank=dp - 1, dp_address="/x")
    with pytest.raises(ConfigError, match=reason):
        check_sizes(load_model_config(checkpoint_of(arch)), tp, pp, group)
