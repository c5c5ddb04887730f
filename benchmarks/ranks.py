"""Ranks that move their own KV beside the worker's process moving it for all of them, on one host's CPUs.

    bytes          the same blocks from one tensor-parallel worker to another, by posts as hand-offs make them:
                   seconds, and seconds of CPU of all processes of both workers
    first token    a long prompt on a prefill and a decode worker, by two clusters that run side by side

Both ways take turns. What counts is the ratio: wall-clock seconds of a busy machine mean nothing, its CPU time little.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

import click
from tests.chaos.client import ChaosClient
from tests.chaos.cluster import ClusterUnderTest

from benchmarks.hand_off import first_token_s
from benchmarks.loads import in_turns, print_rows
from kvrelay.bench.report.table import Row
from kvrelay.bench.transfer import pool_metadata
from kvrelay.certify.machine import cpu_seconds
from kvrelay.cli.options import json_option
from kvrelay.cli.processes import run_async
from kvrelay.config import EngineConfig, RunnerConfig, TransferConfig
from kvrelay.core.layout import BlockRun
from kvrelay.core.workers import KvMetadata
from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.torch import HostMemory, build_executor
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.p2p.address import UNGUARDED
from kvrelay.transfer.ranks.build import build_ranked_transport
from kvrelay.transfer.ranks.link import RankLinks
from kvrelay.transfer.ranks.transport import RankedTransport
from kvrelay.transfer.shm.memory import SharedPoolMemory
from kvrelay.transfer.values import TransferOp

WAYS = ("gathered", "per rank")
NUM_BLOCKS = 512
BLOCKS_PER_POST = 128
PASSES = 16
"""How often a turn moves all blocks: a process's CPU time counts in steps of 10 ms."""
POLL_S = 6e-5
"""Of a transfer thread that expects something."""
PROMPT_LEN = 2000
_COLUMNS = {
    "of": "name",
    "gathered, ms": "gathered_s:ms.2f",
    "per rank, ms": "per_rank_s:ms.2f",
    "per rank/gathered": "ratio:.3f",
    "lowest": "ratio_min:.3f",
    "highest": "ratio_max:.3f",
    "turns": "num_turns",
}


@click.command()
@click.option("--rounds", default=15, type=click.IntRange(2, 1000), help="Turns of each way.")
@click.option("--transport", default="nixl", type=click.Choice(["nixl", "shm", "p2p"]), help="Transport of KV.")
@click.option("--tp-prefill", default=2, type=click.IntRange(1, 8), help="Ranks of the prefill worker.")
@click.option("--tp-decode", default=2, type=click.IntRange(1, 8), help="Ranks of the decode worker.")
@click.option("--first-token/--no-first-token", default=True, help="Run the two clusters, too.")
@json_option
def ranks(rounds: int, transport: str, tp_prefill: int, tp_decode: int, first_token: bool, as_json: bool) -> None:
    """KV that each rank moves, beside KV that one process moves for all ranks.

    Example: python -m benchmarks ranks --transport shm --rounds 21
    """
    rows = _move_in_turns(transport, (tp_prefill, tp_decode), rounds)
    if first_token:
        rows.append(run_async(_first_tokens(transport, (tp_prefill, tp_decode), rounds)))
    title = f"transport {transport}, tp {tp_prefill} to {tp_decode}"
    print_rows(rows, _COLUMNS, as_json, title=title, transport=transport, tp=[tp_prefill, tp_decode])


def _compared(name: str, turns: Sequence[tuple[float, float]]) -> Row:
    """``turns``: gathered, per rank. Medians, and the ratios of single turns."""
    gathered_s, per_rank_s = (statistics.median(turn[at] for turn in turns) for at in (0, 1))
    ratios = [per_rank / gathered for gathered, per_rank in turns if gathered]
    return {
        "name": name,
        "gathered_s": gathered_s,
        "per_rank_s": per_rank_s,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "num_turns": len(turns),
    }


# -- bytes ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _End:
    """One way's end of one worker."""

    transport: RankedTransport
    metadata: KvMetadata


class _Worker:
    """An executor with both ways to its KV."""

    def __init__(self, stack: ExitStack, name: str, transport: str, tp: int) -> None:
        memory, links = SharedPoolMemory(), RankLinks()
        stack.callback(memory.close)
        runner = RunnerConfig(device="cpu", tp=tp, num_threads=1, rank_timeout_s=60)
        engine = EngineConfig(num_blocks=NUM_BLOCKS)
        self.executor = build_executor(
            bundled_checkpoint_path(), runner, engine, HostMemory(memory.allocate, memory.reserve, links.offer)
        )
        stack.callback(self.executor.shutdown)
        config = TransferConfig(transport=transport)  # type: ignore[arg-type]
        self.ends = {}
        for way, offered in zip(WAYS, (RankLinks(), links), strict=True):
            worker_id = f"{name}-{way.replace(' ', '-')}"
            plane = build_ranked_transport(
                config, worker_id, self.executor.kv_layout, offered, memory, address=UNGUARDED
            )
            stack.callback(plane.close)
            region = self.executor.kv_region
            agent, layout = plane.register(region), self.executor.kv_layout
            self.ends[way] = _End(plane, pool_metadata(worker_id, transport, agent, region, layout))


def _move_in_turns(transport: str, tp: tuple[int, int], num_turns: int) -> list[Row]:
    with ExitStack() as stack:
        giver, taker = (_Worker(stack, name, transport, count) for name, count in zip(("p", "d"), tp, strict=True))
        mapping = LayoutMapping(giver.executor.kv_layout, taker.executor.kv_layout)
        draw = random.Random(0)
        blocks = list(range(NUM_BLOCKS))
        sets = {"adjacent blocks": blocks, "scattered blocks": draw.sample(blocks, NUM_BLOCKS)}
        for way in WAYS:
            giver.ends[way].transport.add_peer(taker.ends[way].metadata)
        rows = []
        for name, ids in sets.items():
            seconds: list[tuple[float, float]] = []
            cpu: list[tuple[float, float]] = []
            for number in range(num_turns + 1):
                found = {}
                for way in WAYS if number % 2 else reversed(WAYS):
                    found[way] = _moved(giver.ends[way], taker.ends[way], mapping, ids)
                if number:  # the first one warms up
                    seconds.append((found[WAYS[0]][0], found[WAYS[1]][0]))
                    cpu.append((found[WAYS[0]][1], found[WAYS[1]][1]))
            mib = PASSES * NUM_BLOCKS * taker.executor.kv_layout.block_bytes / 2**20
            rows += [_compared(f"{name}, {mib:.0f} MiB", seconds), _compared(f"{name}, CPU time", cpu)]
        return rows


def _moved(giver: _End, taker: _End, mapping: LayoutMapping, ids: list[int]) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, of all posts, one after the other."""
    cpu_s, begin_s = cpu_seconds(), time.perf_counter()
    for at in [*range(0, len(ids), BLOCKS_PER_POST)] * PASSES:
        run = BlockRun(0, tuple(ids[at : at + BLOCKS_PER_POST]))
        pieces = mapping.pieces(TransferOp.WRITE, run, run)
        handle = giver.transport.post(TransferOp.WRITE, taker.metadata.worker_id, pieces, b"done")
        waiting, arrived = {handle}, 0
        while waiting or not arrived:
            for end in giver.transport.poll()[0]:
                if end.error is not None:
                    raise click.ClickException(end.error)
                waiting.discard(end.handle)
            arrived += len(taker.transport.poll()[1])
            if waiting or not arrived:
                time.sleep(POLL_S)
    return time.perf_counter() - begin_s, cpu_seconds() - cpu_s


# -- first token ------------------------------------------------------------------------------------------------------


async def _first_tokens(transport: str, tp: tuple[int, int], num_turns: int) -> Row:
    own = [str(bundled_checkpoint_path()), "--num-threads", "1", "--num-blocks", str(NUM_BLOCKS)]
    own += ["--transport", transport, "--tp-prefill", str(tp[0]), "--tp-decode", str(tp[1]), "--rank-timeout-s", "60"]
    own += ["--disagg-policy", "threshold", "--max-local-prefill-length", "64"]
    draw = random.Random(0)
    async with AsyncExitStack() as stack:
        clients = []
        for flags in (own, [*own, "--kv-transfer-per-rank"]):
            cluster = await stack.enter_async_context(ClusterUnderTest(flags, [], {"prefill": 1, "decode": 1}, 1))
            clients.append(await stack.enter_async_context(ChaosClient(cluster.url, cluster.model)))
        gathered, per_rank = await in_turns(
            clients, num_turns, lambda client, _: first_token_s(client, draw, PROMPT_LEN)
        )
    return _compared(f"first token of {PROMPT_LEN:,} tokens", list(zip(gathered, per_rank)))
