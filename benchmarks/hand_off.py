"""What a hand-off costs the computation beside it.

    first token    a lone prompt on a prefill and a decode worker, in either order, beside one as long on a worker that
                   does both: the difference is what no computation hides
    decode steps   steps of an engine while another process writes into its KV pool, with a notification after each
                   prompt's KV; while that process copies as many bytes, as often, within itself; and undisturbed.
                   The copy takes the memory's bandwidth and a core like the writes; what the writes cost beyond it is
                   the receiver's work.

All sides take turns, so a drift of the machine affects them alike.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from tests.chaos.answers import KnownPrompt
from tests.chaos.client import ChaosClient
from tests.chaos.cluster import ClusterUnderTest

from kvrelay.bench.peer import START_TIMEOUT_S, Peer, say
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.transfer import COMPATIBILITY, pool_metadata, pool_thread
from kvrelay.cli.options import SettingsSource, field_options, json_option
from kvrelay.cli.processes import run_async
from kvrelay.config import EngineConfig, RunnerConfig, TransferConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.handoff import OrderPolicy
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.workers import KvMetadata
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.transfer.factory import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.p2p.address import UNGUARDED
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import Pieces, TransferOp

NUM_PROMPTS_OF_LEN = {300: 10, 2000: 1}
"""Prompts of a turn, by their length: short ones vary more."""
NUM_BLOCKS = 1024
TOKENS = range(16, 512)
NUM_SEQS = 8
SEQ_LEN = 100
STEPS_PER_TURN = 200
"""A turn must last for several posts: steps that no copy met say nothing."""
PIECE_BYTES = 1 << 20
POST_BYTES = 8 << 20
ALONE, COPY, STREAM = "alone", "copy", "stream"

_COLUMNS = {
    "of": "name",
    "without, ms": "without_s:ms.2f",
    "with, ms": "with_s:ms.2f",
    "ratio": "ratio:.3f",
    "lowest": "ratio_min:.3f",
    "quarter": "ratio_low:.3f",
    "three quarters": "ratio_high:.3f",
    "highest": "ratio_max:.3f",
    "target": "target",
    "turns": "num_turns",
}


@click.command()
@click.option("--rounds", default=7, type=click.IntRange(1, 1000), help="Turns; medians are reported.")
@click.option("--stream-mib-s", default=256, type=click.IntRange(1, 65536), help="KV that streams in, MiB per second.")
@field_options(TransferConfig, exclude=("kv_checksums",))
@json_option
def hand_off(rounds: int, stream_mib_s: int, as_json: bool, **flags: Any) -> None:
    """The first token of a lone prompt with a hand-off and without, and decode steps while KV streams in and while none
    does.

    Example: python -m benchmarks hand-off --transport shm --rounds 15
    """
    config = SettingsSource((TransferConfig,), None, flags).build(TransferConfig)
    report = run_beside_compute(bundled_checkpoint_path(), config, rounds, stream_mib_s)
    print_result(report, beside_text(report), as_json)


def run_beside_compute(model: Path, config: TransferConfig, num_turns: int, mib_per_s: int) -> Row:
    """Both parts, with one thread per worker. ``mib_per_s``: the rate at which KV streams in; ``bytes_per_s``: what the
    other process copied and wrote while decode steps were timed. Raises FatalError, TransferError."""
    first_tokens = run_async(_first_tokens(model, config.transport, num_turns))
    steps, rates = _decode_steps(model, config, num_turns, mib_per_s)
    about = {"machine": describe_machine(), "transport": config.transport}
    return {**about, "first_tokens": first_tokens, "decode_steps": steps, "bytes_per_s": rates}


def beside_text(report: Row) -> str:
    """The figures as a table."""
    rows = results_table([*report["first_tokens"], *report["decode_steps"]], _COLUMNS)
    rates = ", ".join(f"{how} {rate / 2**20:.0f} MiB/s" for how, rate in report["bytes_per_s"].items())
    return f"transport {report['transport']}\n\n{rows}\n\n{rates}"


def _beside(name: str, turns: Sequence[tuple[float, float]], target: float | str) -> Row:
    """``turns``: seconds without and with. Medians over the turns, and of the turns' ratios, with the quartiles and the
    ends of these. ``target``: the ratio should not be above it."""
    without_s, with_s = (statistics.median(turn[at] for turn in turns) for at in (0, 1))
    ratios = sorted(second / first for first, second in turns)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "name": name,
        "without_s": without_s,
        "with_s": with_s,
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_low": low,
        "ratio_high": high,
        "ratio_max": ratios[-1],
        "target": target,
        "num_turns": len(turns),
    }


# -- first token ------------------------------------------------------------------------------------------------------

_Clients = dict[OrderPolicy | None, ChaosClient]
"""By order; None: of the worker that does both."""


async def _first_tokens(model: Path, transport: str, num_turns: int) -> list[Row]:
    flags = [str(model), "--num-threads", "1", "--num-blocks", str(NUM_BLOCKS), "--transport", transport]
    apart = [*flags, "--disagg-policy", "threshold", "--max-local-prefill-length", "64"]
    draw = random.Random(0)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        alone = await enter(ClusterUnderTest(flags, [], {"prefill": 0, "decode": 1}, 1))
        both = await enter(ClusterUnderTest(apart, [], {"prefill": 1, "decode": 1}, 1))
        clients: _Clients = {None: await enter(ChaosClient(alone.url, alone.model))}
        for order in OrderPolicy:
            clients[order] = await enter(ChaosClient(both.url, both.model, order))
        rows = []
        for length in NUM_PROMPTS_OF_LEN:
            # The first one warms up.
            turns = [await _turn(clients, draw, length, number) for number in range(num_turns + 1)][1:]
            for order in OrderPolicy:
                pairs = [(turn[None], turn[order]) for turn in turns]
                rows.append(_beside(f"first token of {length:,} tokens, {order}", pairs, 1.10))
    return rows


async def _turn(clients: _Clients, draw: random.Random, length: int, number: int) -> dict[OrderPolicy | None, float]:
    """Median seconds to the first token by each client, who ask one after the other, forwards and backwards."""
    times: dict[OrderPolicy | None, list[float]] = {order: [] for order in clients}
    for at in range(number, number + NUM_PROMPTS_OF_LEN[length]):
        for order in list(clients)[:: -1 if at % 2 else 1]:
            times[order].append(await first_token_s(clients[order], draw, length))
    return {order: statistics.median(found) for order, found in times.items()}


async def first_token_s(client: ChaosClient, draw: random.Random, length: int) -> float:
    """Seconds to it, of a prompt that no cache holds."""
    _, record = await client.answer(KnownPrompt(tuple(draw.choices(TOKENS, k=length)), 2, stream=True))
    return record.arrivals_s[0] - record.begin_s


# -- decode steps -----------------------------------------------------------------------------------------------------


def _decode_steps(
    model: Path, config: TransferConfig, num_turns: int, mib_per_s: int
) -> tuple[list[Row], dict[str, float]]:
    from kvrelay.executors.torch import HostMemory, build_executor

    memory = shared_memory(config)
    runner = RunnerConfig(num_threads=1, device="cpu")
    engine = EngineConfig(num_blocks=NUM_BLOCKS, max_num_seqs=NUM_SEQS, kv_watermark=0)
    executor = build_executor(model, runner, engine, HostMemory(pool_allocator(config, memory)))
    thread = TransferThread(build_transport(config, "benchmark-parent", memory=memory, address=UNGUARDED), config)
    thread.on_notification(lambda _: None)
    thread.start()
    try:
        executor.warm_up()
        decoding = _Decoding(EngineCore(executor, engine, MonotonicClock(), worker_id="bench"))
        region = executor.kv_region
        agent = thread.register(region, kv_compatibility=COMPATIBILITY).result(START_TIMEOUT_S)
        # The upper half of the pool, which no sequence uses.
        half = region.num_bytes // 2
        parent = pool_metadata("benchmark-parent", config.transport, agent, region)
        target = _Target(parent, half, region.num_bytes - half, mib_per_s)
        encoded = (msgspec.json.encode(each).decode() for each in (config, target))
        with Peer("benchmarks.hand_off", *encoded) as peer:
            writer = _Writer(thread, peer)
            ways, turns = [ALONE, COPY, STREAM], []
            for number in range(num_turns + 1):
                found = {}
                for how in ways:
                    with writer.busy(how):
                        found[how] = decoding.step_s()
                ways.append(ways.pop(0))  # each of them comes first, second and last
                if number:  # the first one warms up
                    turns.append(found)
            return _step_rows(turns), writer.bytes_per_s
    finally:
        thread.close()
        executor.shutdown()
        if memory is not None:
            memory.close()


def _step_rows(turns: Sequence[dict[str, float]]) -> list[Row]:
    """``turns``: seconds of a step by what the other process did."""
    pairs: tuple[tuple[str, str, str, float | str], ...] = (
        ("KV streams in, over as large a copy", COPY, STREAM, 1.05),
        ("KV streams in, over undisturbed", ALONE, STREAM, "-"),
        ("as large a copy, over undisturbed", ALONE, COPY, "-"),
    )
    return [
        _beside(f"decode step of {NUM_SEQS}: {name}", [(turn[first], turn[second]) for turn in turns], target)
        for name, first, second, target in pairs
    ]


class _Decoding:
    """An engine that always decodes NUM_SEQS sequences."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._count = 0

    def step_s(self) -> float:
        """Mean seconds of STEPS_PER_TURN decode steps: a median would hide the few that a copy met."""
        while self._core.has_unfinished():
            self._core.step()
        draw = random.Random(self._count)
        for _ in range(NUM_SEQS):
            self._count += 1
            sampling = SamplingParams(max_tokens=STEPS_PER_TURN + 2, temperature=0.0, ignore_eos=True)
            self._core.add_request(Request(f"r{self._count}", draw.choices(TOKENS, k=SEQ_LEN), sampling))
        self._core.step()  # the prefill
        begin_s = time.perf_counter()
        for _ in range(STEPS_PER_TURN):
            self._core.step()
        return (time.perf_counter() - begin_s) / STEPS_PER_TURN


class _Target(msgspec.Struct, frozen=True):
    """Where the other process writes: ``num_bytes`` of the peer's pool from ``offset`` on."""

    peer: KvMetadata
    offset: int
    num_bytes: int
    mib_per_s: int


class _Writer:
    """The other process. Between hand-offs the receiver's transfer thread sleeps, as a worker's does."""

    def __init__(self, thread: TransferThread, peer: Peer) -> None:
        self._thread, self._peer = thread, peer
        self._done: dict[str, tuple[int, float]] = {}

    @property
    def bytes_per_s(self) -> dict[str, float]:
        return {how: num_bytes / seconds for how, (num_bytes, seconds) in self._done.items()}

    @contextmanager
    def busy(self, how: str) -> Iterator[None]:
        """The other process does this meanwhile."""
        if how == ALONE:
            yield
            return
        if how == STREAM:
            self._thread.open_handoff()
        self._peer.ask(how.encode())
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            num_bytes, seconds = self._done.get(how, (0, 0.0))
            num_bytes += int(self._peer.ask(b"stop"))
            self._done[how] = num_bytes, seconds + time.perf_counter() - begin_s
            if how == STREAM:
                self._thread.close_handoff()


def _write_main(config: TransferConfig, target: _Target) -> None:
    """In the other process: copy or write from the order to "stop", then say how many bytes; until stdin ends."""
    num_bytes = min(POST_BYTES, target.num_bytes)
    with pool_thread(config, "benchmark-writer", num_bytes) as (_, thread, region):
        thread.register(region, kv_compatibility=COMPATIBILITY).result(START_TIMEOUT_S)
        thread.add_peer(target.peer).result(START_TIMEOUT_S)
        thread.open_handoff()
        own, copy = np.ones(num_bytes, np.uint8), np.ones(target.num_bytes, np.uint8)

        def copied(start: int) -> None:
            for at in range(0, num_bytes, PIECE_BYTES):
                piece = own[at : at + PIECE_BYTES]
                np.copyto(copy[start + at : start + at + len(piece)], piece)

        ways: dict[str, Callable[[int], None]] = {
            COPY: copied,
            STREAM: lambda start: _write_once(thread, target, start, num_bytes),
        }
        ways[STREAM](0)
        say(b"ready")
        for order in sys.stdin.buffer:
            say(b"going")
            stop = threading.Event()
            moved = [0]
            move = ways[order.decode().strip()]
            moving = threading.Thread(target=_move_on, args=(move, target, num_bytes, stop, moved))
            moving.start()
            sys.stdin.buffer.readline()
            stop.set()
            moving.join()
            say(str(moved[0]).encode())


def _move_on(
    move: Callable[[int], object], target: _Target, num_bytes: int, stop: threading.Event, moved: list[int]
) -> None:
    """Move after move at the target's rate."""
    begin_s = time.monotonic()
    while not stop.is_set():
        move(moved[0] % (target.num_bytes - num_bytes + 1))
        moved[0] += num_bytes
        stop.wait(max(0.0, begin_s + moved[0] / (target.mib_per_s * 2**20) - time.monotonic()))


def _write_once(thread: TransferThread, target: _Target, start: int, num_bytes: int) -> None:
    """The KV of one prompt, and a notification."""
    ended = threading.Event()
    starts = np.arange(0, num_bytes, PIECE_BYTES, dtype=np.int64)
    lengths = np.minimum(PIECE_BYTES, num_bytes - starts)
    plan = Pieces(starts, starts + (target.offset + start), lengths)
    thread.submit(TransferOp.WRITE, target.peer.worker_id, plan, b"done", on_done=lambda _: ended.set())
    ended.wait()


if __name__ == "__main__":
    _write_main(msgspec.json.decode(sys.argv[1], type=TransferConfig), msgspec.json.decode(sys.argv[2], type=_Target))
