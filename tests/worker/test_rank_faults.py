"""Hand-offs of workers with several ranks when something breaks: computed again and counted, never a wrong token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.worker.cluster import LOOPBACK, Client, Cluster, Node, cluster

from kvrelay import LLM, SamplingParams
from kvrelay.config import EngineConfig, RunnerConfig, WorkerRole
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.step import Executor
from kvrelay.errors import EngineDeadError
from kvrelay.executors.torch import build_executor
from kvrelay.transfer.base import Post
from kvrelay.transfer.values import Pieces

pytestmark = pytest.mark.slow

PROMPT = tuple(16 + (7 * number + number * number) % 400 for number in range(200))
CHECKED = replace(LOOPBACK, kv_checksums=True)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What the plain engine answers."""
    with LLM(dtype="float32", device="cpu", num_blocks=64) as llm:
        (output,) = llm.generate([list(PROMPT)], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    return list(output.token_ids)


def ranks(tp: int) -> Callable[[EngineConfig], Executor]:
    def build(config: EngineConfig) -> Executor:
        runner = RunnerConfig(dtype="float32", device="cpu", tp=tp, num_threads=1, rank_timeout_s=60.0)
        executor = build_executor(bundled_checkpoint_path(), runner, config)
        executor.warm_up()
        return executor

    return build


async def pair_of(shared: Cluster, of_prefill: int, of_decode: int) -> tuple[Node, Node, Client]:
    """Workers with so many tensor-parallel ranks."""
    prefill, decode = await asyncio.gather(
        shared.join(WorkerRole.PREFILL, ranks(of_prefill)), shared.join(WorkerRole.DECODE, ranks(of_decode))
    )
    await shared.acquainted(prefill, decode)
    return prefill, decode, await shared.client(decode)


async def test_a_rank_killed_in_mid_transfer_costs_a_prefill(expected: list[int]) -> None:
    """The write never ends, and then its worker does."""
    async with cluster() as shared:
        prefill, decode, client = await pair_of(shared, 2, 1)
        shared.fabric.faults.drop_next = 1000
        client.send("r", PROMPT, ignore_eos=True)
        await shared.until(lambda: prefill.worker.stats().transfer.num_unfinished > 0)
        os.kill(prefill.core.executor.rank_pids[1], signal.SIGKILL)
        shared.time_out_transfers()
        assert isinstance(await shared.gone(prefill), EngineDeadError)
        assert await client.answer("r") == expected
        assert decode.worker.stats().decode.num_remote_done == 0


async def test_lost_writes_of_one_rank_are_found_and_computed_again(expected: list[int]) -> None:
    """Everything for the decode worker's second rank is lost on the way, and the transport does not notice."""
    async with cluster(transfer=CHECKED) as shared:
        prefill, decode, client = await pair_of(shared, 1, 2)
        layout = decode.core.executor.kv_layout
        part = next(layout.parts(0)).num_bytes

        def of_first_rank(plan: Pieces) -> Pieces:
            kept = plan.remote_offsets // part % layout.num_ranks == 0
            return Pieces(plan.local_offsets[kept], plan.remote_offsets[kept], plan.lengths[kept])

        def lossy(post: Post) -> None:
            post.pieces = of_first_rank(post.pieces)

        prefill.transport.before.append(lossy)
        client.send("r", PROMPT, ignore_eos=True)
        assert await client.answer("r") == expected
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 1
        assert decode.worker.stats().decode.num_remote_done == 0
        prefill.transport.before.remove(lossy)
        again = tuple(reversed(PROMPT))
        client.send("again", again, ignore_eos=True)
        await client.answer("again")
        assert decode.worker.stats().decode.num_remote_done == 1
        assert decode.worker.stats().decode.num_kv_checksum_mismatches == 1
