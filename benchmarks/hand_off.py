"""What a hand-off costs the computation beside it.

    first token    a long prompt on a prefill and a decode worker, beside the same prompt on one worker that does both:
                   the difference is the part of the transfer that no computation hides
    decode steps   steps of an engine while another process writes into its KV pool, beside steps without that

Both sides take turns, so a drift of the machine affects both alike.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import msgspec
import numpy as np
from tests.chaos.answers import KnownPrompt
from tests.chaos.client import ChaosClient
from tests.chaos.cluster import ClusterUnderTest

from benchmarks.loads import describe_machine
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.transfer import COMPATIBILITY, START_TIMEOUT_S, peer_process, pool_metadata, pool_thread
from kvrelay.cli.options import SettingsSource, field_options, json_option
from kvrelay.cli.processes import run_async
from kvrelay.config import EngineConfig, RunnerConfig, TransferConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.workers import KvMetadata
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.errors import TransferError
from kvrelay.transfer.factory import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import Pieces, TransferOp

PROMPT_LEN = 2000
NUM_BLOCKS = 1024
TOKENS = range(16, 512)
NUM_SEQS = 8
SEQ_LEN = 100
STEPS_PER_TURN = 50
PIECE_BYTES = 1 << 20
POST_BYTES = 8 << 20


_COLUMNS = {
    "of": "name",
    "alone, ms": "alone_s:ms.2f",
    "beside, ms": "beside_s:ms.2f",
    "ratio": "ratio:.3f",
    "lowest": "ratio_min:.3f",
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
    """The first token of a long prompt with a hand-off and without, and decode steps while KV streams in and while none
    does.

    Example: python -m benchmarks hand-off --transport shm --rounds 15
    """
    config = SettingsSource((TransferConfig,), None, flags).build(TransferConfig)
    report = run_beside_compute(bundled_checkpoint_path(), config, rounds, stream_mib_s)
    print_result(report, beside_text(report), as_json)


def run_beside_compute(model: Path, config: TransferConfig, num_turns: int, mib_per_s: int) -> Row:
    """Both parts, with one thread per worker. ``mib_per_s``: the rate at which KV streams in;
    ``streamed_bytes_per_s``: what the other process wrote while decode steps were timed. Raises FatalError,
    TransferError."""
    first = run_async(_first_tokens(model, config.transport, num_turns))
    step, rate = _decode_steps(model, config, num_turns, mib_per_s)
    about = {"machine": describe_machine(), "transport": config.transport}
    return {**about, "first_token": first, "decode_step": step, "streamed_bytes_per_s": rate}


def beside_text(report: Row) -> str:
    """The figures as a table."""
    rows = results_table([report["first_token"], report["decode_step"]], _COLUMNS)
    rate = report["streamed_bytes_per_s"] / 2**20
    return f"transport {report['transport']}\n\n{rows}\n\nKV streamed in at {rate:.0f} MiB/s"


def _beside(name: str, turns: Sequence[tuple[float, float]], target: float) -> Row:
    """``turns``: seconds alone and beside. Medians over the turns and their ratio; ``ratio_min`` and ``ratio_max`` are
    those of single turns. ``target``: the ratio should not be above it."""
    alone_s, beside_s = (statistics.median(turn[at] for turn in turns) for at in (0, 1))
    ratios = [beside / alone for alone, beside in turns]
    return {
        "name": name,
        "alone_s": alone_s,
        "beside_s": beside_s,
        "ratio": beside_s / alone_s,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "target": target,
        "num_turns": len(turns),
    }


# -- first token ------------------------------------------------------------------------------------------------------


async def _first_tokens(model: Path, transport: str, num_turns: int) -> Row:
    flags = [str(model), "--num-threads", "1", "--num-blocks", str(NUM_BLOCKS), "--transport", transport]
    apart = [*flags, "--disagg-policy", "threshold", "--max-local-prefill-length", "64"]
    draw = random.Random(0)
    turns = []
    async with AsyncExitStack() as stack:
        clients = []
        for own, shape in ((flags, {"prefill": 0, "decode": 1}), (apart, {"prefill": 1, "decode": 1})):
            cluster = await stack.enter_async_context(ClusterUnderTest(own, [], shape, 1))
            clients.append(await stack.enter_async_context(ChaosClient(cluster.url, cluster.model)))
        for number in range(num_turns + 1):
            # A new prompt in every turn: no cache holds it.
            prompt = KnownPrompt(tuple(draw.choices(TOKENS, k=PROMPT_LEN)), 2, stream=True)
            found = {at: await _first_token_s(clients[at], prompt) for at in ((0, 1) if number % 2 else (1, 0))}
            if number:  # the first one warms up
                turns.append((found[0], found[1]))
    return _beside(f"first token of {PROMPT_LEN:,} tokens", turns, 1.10)


async def _first_token_s(client: ChaosClient, prompt: KnownPrompt) -> float:
    _, record = await client.answer(prompt)
    return record.arrivals_s[0] - record.begin_s


# -- decode steps -----------------------------------------------------------------------------------------------------


def _decode_steps(model: Path, config: TransferConfig, num_turns: int, mib_per_s: int) -> tuple[Row, float]:
    from kvrelay.executors.torch import build_executor

    memory = shared_memory(config)
    runner = RunnerConfig(num_threads=1, device="cpu")
    engine = EngineConfig(num_blocks=NUM_BLOCKS, max_num_seqs=NUM_SEQS, kv_watermark=0)
    executor = build_executor(model, runner, engine, pool_allocator(config, memory))
    thread = TransferThread(build_transport(config, "benchmark-parent", memory=memory, is_guarded=False), config)
    thread.on_notification(lambda _: None)
    thread.start()
    try:
        executor.warm_up()
        decoding = _Decoding(EngineCore(executor, engine, MonotonicClock(), worker_id="bench"))
        region = executor.kv_region
        agent = thread.register(region, kv_compatibility=COMPATIBILITY).result(START_TIMEOUT_S)
        thread.open_handoff()
        # The upper half of the pool, which no sequence uses.
        half = region.num_bytes // 2
        target = _Target(
            pool_metadata("benchmark-parent", config, agent, region), half, region.num_bytes - half, mib_per_s
        )
        encoded = (msgspec.json.encode(each).decode() for each in (config, target))
        with peer_process("benchmarks.hand_off", *encoded) as (_, orders, answers):
            writer, turns = _Writer(orders, answers), []
            for number in range(num_turns + 1):
                alone_s = decoding.step_s()
                with writer.writing():
                    beside_s = decoding.step_s()
                if number:  # the first one warms up
                    turns.append((alone_s, beside_s))
            return _beside(f"decode step of {NUM_SEQS}", turns, 1.05), writer.bytes_per_s
    finally:
        thread.close()
        executor.shutdown()
        if memory is not None:
            memory.close()


class _Decoding:
    """An engine that always decodes NUM_SEQS sequences."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._count = 0

    def step_s(self) -> float:
        """Median seconds of STEPS_PER_TURN decode steps."""
        while self._core.has_unfinished():
            self._core.step()
        draw = random.Random(self._count)
        for _ in range(NUM_SEQS):
            self._count += 1
            sampling = SamplingParams(max_tokens=STEPS_PER_TURN + 2, temperature=0.0, ignore_eos=True)
            self._core.add_request(Request(f"r{self._count}", draw.choices(TOKENS, k=SEQ_LEN), sampling))
        self._core.step()  # the prefill
        seconds = []
        for _ in range(STEPS_PER_TURN):
            begin_s = time.perf_counter()
            self._core.step()
            seconds.append(time.perf_counter() - begin_s)
        return statistics.median(seconds)


class _Target(msgspec.Struct, frozen=True):
    """Where the other process writes: ``num_bytes`` of the peer's pool from ``offset`` on."""

    peer: KvMetadata
    offset: int
    num_bytes: int
    mib_per_s: int


@dataclass(slots=True)
class _Writer:
    orders: IO[bytes]
    answers: IO[bytes]
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The other process writes meanwhile."""
        self._order(b"go\n")
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self.num_bytes += int(self._order(b"stop\n"))
            self.seconds += time.perf_counter() - begin_s

    def _order(self, word: bytes) -> bytes:
        self.orders.write(word)
        self.orders.flush()
        answer = self.answers.readline()
        if not answer:
            raise TransferError("the writing process has ended", peer="benchmark-parent")
        return answer


def _write_main(config: TransferConfig, target: _Target) -> None:
    """In the other process: write from "go" to "stop", then say how many bytes; until stdin ends."""
    num_bytes = min(POST_BYTES, target.num_bytes)
    with pool_thread(config, "benchmark-writer", num_bytes) as (_, thread, region):
        thread.register(region, kv_compatibility=COMPATIBILITY).result(START_TIMEOUT_S)
        thread.add_peer(target.peer).result(START_TIMEOUT_S)
        thread.open_handoff()
        _write_once(thread, target, 0, num_bytes)
        _say(b"ready")
        for _ in sys.stdin.buffer:  # "go"
            _say(b"going")
            stop = threading.Event()
            written = [0]
            writing = threading.Thread(target=_write_on, args=(thread, target, num_bytes, stop, written))
            writing.start()
            sys.stdin.buffer.readline()
            stop.set()
            writing.join()
            _say(str(written[0]).encode())


def _write_on(
    thread: TransferThread, target: _Target, num_bytes: int, stop: threading.Event, written: list[int]
) -> None:
    """Write post after post at the target's rate."""
    begin_s = time.monotonic()
    while not stop.is_set():
        _write_once(thread, target, written[0] % (target.num_bytes - num_bytes + 1), num_bytes)
        written[0] += num_bytes
        stop.wait(max(0.0, begin_s + written[0] / (target.mib_per_s * 2**20) - time.monotonic()))


def _write_once(thread: TransferThread, target: _Target, start: int, num_bytes: int) -> None:
    ended = threading.Event()
    starts = np.arange(0, num_bytes, PIECE_BYTES, dtype=np.int64)
    lengths = np.minimum(PIECE_BYTES, num_bytes - starts)
    plan = Pieces(starts, starts + (target.offset + start), lengths)
    thread.submit(TransferOp.WRITE, target.peer.worker_id, plan, None, on_done=lambda _: ended.set())
    ended.wait()


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _write_main(msgspec.json.decode(sys.argv[1], type=TransferConfig), msgspec.json.decode(sys.argv[2], type=_Target))
