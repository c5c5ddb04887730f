"""A rank that ends or hangs ends the executor, with the reason; nothing is left of it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.executors.harness import Harness
from tests.patience import PATIENCE_S, stop

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.core.layout import paged_kv
from kvrelay.errors import CheckpointError, ConfigError, EngineDeadError, FatalError
from kvrelay.executors.host_memory import HostMemory
from kvrelay.executors.torch.config import ModelFacts
from kvrelay.executors.torch.parallel.executor import ParallelExecutor, require_agreement
from kvrelay.executors.torch.parallel.messages import WeightsLoaded
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.transfer.shm.memory import SharedPoolMemory

pytestmark = pytest.mark.slow

Start = Callable[..., ParallelExecutor]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also between two looks at it
        return False


def gone(pids: tuple[int, ...]) -> bool:
    return not any(runs(pid) for pid in pids)


@pytest.fixture
def ranks(start_ranks: Start, checkpoint_of: Callable[[str], Path]) -> ParallelExecutor:
    executor = start_ranks(checkpoint_of("llama"), 2, 1)
    executor.warm_up()
    return executor


def test_a_rank_that_is_killed_between_steps_is_named(ranks: ParallelExecutor) -> None:
    harness = Harness(ranks)
    sequence = harness.add(0, [1, 2, 3])
    harness.step((sequence, 3))
    ranks.check()
    os.kill(ranks.rank_pids[1], signal.SIGKILL)
    wait_for(lambda: gone(ranks.rank_pids[1:]))

    def is_noticed() -> bool:
        try:
            ranks.check()
        except EngineDeadError:
            return True
        return False

    wait_for(is_noticed)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(tp 1 of 2, pp 0 of 1\), pid \d+, was killed by SIGKILL"):
        harness.step((sequence, 1))
    wait_for(lambda: gone(ranks.rank_pids))


def test_a_rank_that_is_killed_during_a_step_is_named(ranks: ParallelExecutor) -> None:
    """It is stopped first, so that the step cannot end before it is killed."""
    pid = ranks.rank_pids[0]
    stop(pid)
    harness = Harness(ranks)
    sequence = harness.add(0, [1, 2, 3])
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"])
    with pytest.raises(EngineDeadError, match=r"rank 0 .* was killed by SIGKILL"):
        harness.step((sequence, 3))
    killer.wait()
    wait_for(lambda: gone(ranks.rank_pids))


def test_a_rank_that_hangs_is_named_and_ended(start_ranks: Start, checkpoint_of: Callable[[str], Path]) -> None:
    ranks = start_ranks(checkpoint_of("llama"), 2, 1, timeout_s=2.0)
    ranks.warm_up()
    stop(ranks.rank_pids[1])
    harness = Harness(ranks)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* has finished no layer for 2 s"):
        harness.step((harness.add(0, [1, 2, 3]), 3))
    wait_for(lambda: gone(ranks.rank_pids))
    with pytest.raises(EngineDeadError, match="rank 1"):
        ranks.check()


def test_a_rank_that_hangs_between_steps_is_named_and_ended(
    start_ranks: Start, checkpoint_of: Callable[[str], Path]
) -> None:
    ranks = start_ranks(checkpoint_of("llama"), 1, 2, timeout_s=2.0)
    ranks.warm_up()
    ranks.check()
    stop(ranks.rank_pids[0])

    def is_noticed() -> bool:
        try:
            ranks.check()
        except EngineDeadError as exc:
            return "rank 0 (tp 0 of 1, pp 0 of 2)" in exc.message and "rank 1" not in exc.message
        return False

    wait_for(is_noticed)
    wait_for(lambda: gone(ranks.rank_pids))


def test_ranks_end_with_the_process_that_started_them(checkpoint_of: Callable[[str], Path]) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tests.executors.torch.parallel.conftest import start\n"
        "ranks = start(Path(sys.argv[1]), 2, 1); print(*ranks.rank_pids, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(checkpoint_of("llama"))], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = tuple(int(word) for word in parent.stdout.readline().split())
    assert len(pids) == 2
    stop(pids[1])
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(pids))


def test_what_a_rank_cannot_do_is_refused_at_start(start_ranks: Start, checkpoint_of: Callable[[str], Path]) -> None:
    model = checkpoint_of("llama")
    with pytest.raises(ConfigError, match="tp 3 does not divide num_attention_heads 8"):
        start_ranks(model, 3, 1)
    with pytest.raises(ConfigError, match="pp 3 does not divide num_hidden_layers 4"):
        start_ranks(model, 1, 3)
    with pytest.raises(ConfigError, match="max_model_len"):
        start_ranks(model, 1, 1, max_model_len=10**6)
    with pytest.raises(ConfigError, match=r"num_blocks: a KV pool of .*TiB was asked for"):
        start_ranks(model, 1, 1, num_blocks=10**12)


FACTS = ModelFacts(512, 1024, (1,), "weights", 128)
LOADED = WeightsLoaded(paged_kv(2, 1, 16, 64, "float32"), 100, "cpu", FACTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": msgspec.structs.replace(FACTS, weights_fingerprint="others")},
        {"layout": paged_kv(2, 1, 32, 64, "float32")},
        {"facts": msgspec.structs.replace(FACTS, vocab_size=513)},
    ],
    ids=["weights", "layout", "vocabulary"],
)
def test_ranks_that_disagree_are_refused_at_start(changes: dict[str, object]) -> None:
    ranks = [ParallelRank.numbered(index, 2, 1) for index in range(2)]
    require_agreement(ranks, [LOADED, msgspec.structs.replace(LOADED, max_blocks=7)])
    with pytest.raises(CheckpointError, match=r"rank 1 .* has loaded another model than rank 0"):
        require_agreement(ranks, [LOADED, msgspec.structs.replace(LOADED, **changes)])


def test_without_memory_to_share_with_peers_the_ranks_still_share_theirs(checkpoint_of: Callable[[str], Path]) -> None:
    """What transport auto falls back to: its allocator gives memory that no one else can map."""
    memory = SharedPoolMemory()
    runner = RunnerConfig(dtype="float32", device="cpu", tp=2, rank_timeout_s=60.0)
    engine = EngineConfig(num_blocks=64, max_model_len=256, max_num_seqs=4)

    def anonymous(num_bytes: int) -> mmap.mmap:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    executor = ParallelExecutor(checkpoint_of("llama"), runner, engine, HostMemory(anonymous, memory.reserve))
    try:
        harness = Harness(executor)
        sequence = harness.add(0, [1, 2, 3])
        harness.step((sequence, 3))
        used = sequence.blocks[0]
        assert len(set(executor.checksum_blocks([used, (used + 1) % 64]))) == 2
        with pytest.raises(FatalError, match="did not allocate its KV pool in shared memory"):
            memory.offset_of(executor.kv_region)
    finally:
        executor.shutdown()
        memory.close()
