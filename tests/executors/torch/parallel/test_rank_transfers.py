"""Ranks that move their own KV, as processes: with pools of their own, as on GPUs, and with the joined one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.executors.harness import Harness
from tests.executors.torch.parallel.conftest import TIMEOUT_S
from tests.patience import PATIENCE_S, stop

from kvrelay.config import TransferConfig
from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.core.layout import BlockRun, MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.engine.step import Executor
from kvrelay.errors import EngineDeadError
from kvrelay.executors.host_memory import HostMemory
from kvrelay.executors.torch import build_executor
from kvrelay.executors.torch.parallel.executor import ParallelExecutor
from kvrelay.transfer.base import PostEnd
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.p2p.address import UNGUARDED
from kvrelay.transfer.ranks.build import build_ranked_transport
from kvrelay.transfer.ranks.link import RankLinks
from kvrelay.transfer.ranks.transport import RankedTransport
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.values import TransferOp

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 43))
BLOCKS = {"p": (5, 6, 2), "d": (1, 0, 9)}
ENGINE = EngineConfig(num_blocks=32, max_model_len=256, max_num_seqs=4, block_size=16)


class Worker:
    """An executor and its data plane, polled by hand."""

    def __init__(
        self, stack: ExitStack, name: str, model: Path, tp: int, pp: int, config: TransferConfig, *, joined: bool
    ) -> None:
        self.name, links, memory = name, RankLinks(), SharedPoolMemory()
        stack.callback(memory.close)
        runner = RunnerConfig(dtype="float32", device="cpu", tp=tp, pp=pp, rank_timeout_s=TIMEOUT_S)
        if tp * pp > 1:
            pool = (memory.allocate, memory.reserve) if joined else (None, None)
            self.executor: Executor = ParallelExecutor(
                model, runner, ENGINE, HostMemory(*pool, links.offer), joins_pools=joined
            )
        else:
            self.executor = build_executor(model, runner, ENGINE, HostMemory(memory.allocate))
        stack.callback(self.executor.shutdown)
        layout = self.executor.kv_layout
        self.transport: RankedTransport = build_ranked_transport(config, name, layout, links, memory, address=UNGUARDED)
        stack.callback(self.transport.close)
        region: MemoryRegion = self.executor.kv_region
        assert region.is_pool
        self.metadata = KvMetadata(
            worker_id=name,
            rank=0,
            transport=self.transport.name,
            agent=self.transport.register(region),
            address=region.address,
            num_bytes=region.num_bytes,
            block_bytes=layout.block_bytes,
            device="cpu",
            device_id=0,
            kv_compatibility="same",
            layout=layout,
        )
        self.ended: list[PostEnd] = []
        self.payloads: list[bytes] = []

    def poll(self) -> None:
        ended, notifications = self.transport.poll()
        self.ended += ended
        self.payloads += notifications

    def write_to(self, other: Worker, notify: bytes) -> None:
        mapping = LayoutMapping(self.executor.kv_layout, other.executor.kv_layout)
        runs = (BlockRun(0, BLOCKS[each.name]) for each in (self, other))
        self.transport.post(TransferOp.WRITE, other.name, mapping.pieces(TransferOp.WRITE, *runs), notify)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


CASES = [
    pytest.param("nixl", (2, 1), (1, 1), False, id="nixl-tp2-tp1-own"),
    pytest.param("shm", (1, 2), (2, 1), True, id="shm-pp2-tp2-joined"),
    pytest.param("nixl", (2, 1), (1, 2), False, id="nixl-tp2-pp2-own", marks=pytest.mark.matrix),
    pytest.param("p2p", (2, 1), (2, 1), False, id="p2p-tp2-tp2-own", marks=pytest.mark.matrix),
    pytest.param("p2p", (1, 1), (2, 2), True, id="p2p-tp1-tp2pp2-joined", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("transport", "prefill", "decode", "joined"), CASES)
def test_what_ranks_compute_arrives_at_the_peers_ranks(
    stack: ExitStack,
    checkpoint_of: Callable[[str], Path],
    transport: str,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    joined: bool,
) -> None:
    """Checksums do not depend on layouts, and are read where each worker keeps its KV."""
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    config = TransferConfig(transport=transport)  # type: ignore[arg-type]
    model = checkpoint_of("llama")
    giver = Worker(stack, "p", model, *prefill, config, joined=joined)
    taker = Worker(stack, "d", model, *decode, config, joined=joined)
    harness = Harness(giver.executor)
    harness.step((harness.add(0, PROMPT, blocks=BLOCKS["p"]), len(PROMPT)))
    expected = giver.executor.checksum_blocks(BLOCKS["p"])
    assert len(set(expected)) == len(expected)
    assert taker.executor.checksum_blocks(BLOCKS["d"]) != expected
    giver.transport.add_peer(taker.metadata)
    giver.write_to(taker, b"done")
    until(lambda: giver.poll() or taker.poll() or (taker.payloads and giver.ended))
    assert taker.payloads == [b"done"]
    assert [end.error for end in giver.ended] == [None]
    assert taker.executor.checksum_blocks(BLOCKS["d"]) == expected


def test_a_rank_that_is_killed_during_a_transfer_fails_it_and_ends_the_executor(
    stack: ExitStack, checkpoint_of: Callable[[str], Path]
) -> None:
    config, model = TransferConfig(transport="shm"), checkpoint_of("llama")
    giver = Worker(stack, "p", model, 2, 1, config, joined=True)
    taker = Worker(stack, "d", model, 1, 1, config, joined=True)
    giver.transport.add_peer(taker.metadata)
    assert isinstance(giver.executor, ParallelExecutor)
    pid = giver.executor.rank_pids[1]
    # Stopped first, so that its part cannot end before it is killed.
    stop(pid)
    giver.write_to(taker, b"never")
    until(lambda: (giver.poll(), giver.transport.num_pending)[1] == 1)
    os.kill(pid, signal.SIGKILL)
    until(lambda: giver.poll() or giver.ended)
    assert "rank 1 (tp 1 of 2, pp 0 of 1) is gone" in str(giver.ended[0].error)
    taker.poll()
    assert taker.payloads == []
    with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL"):
        until(giver.executor.check)


def test_a_rank_that_never_reports_is_killed_before_its_peer_is_free_again(
    stack: ExitStack, checkpoint_of: Callable[[str], Path]
) -> None:
    config, model = TransferConfig(transport="shm", transfer_timeout_s=0.5), checkpoint_of("llama")
    giver = Worker(stack, "p", model, 2, 1, config, joined=True)
    taker = Worker(stack, "d", model, 1, 1, config, joined=True)
    giver.transport.add_peer(taker.metadata)
    assert isinstance(giver.executor, ParallelExecutor)
    before = taker.executor.checksum_blocks(range(32))
    stop(giver.executor.rank_pids[0])
    giver.write_to(taker, b"never")
    # What the transfer thread does at the deadline. When it returns, nothing of the post can move any more.
    giver.transport.remove_peer("d")
    with pytest.raises(EngineDeadError, match=r"rank 0 .* was killed by SIGKILL"):
        until(giver.executor.check)
    giver.poll()
    assert len(giver.ended) == 1
    assert giver.ended[0].error is not None
    # Rank 1 may have moved its half of the three blocks; rank 0 has moved nothing.
    now = taker.executor.checksum_blocks(range(32))
    assert {i for i in range(32) if now[i] != before[i]} <= set(BLOCKS["d"])
