"""Agents' sessions under both policies of retention, in turn: prompt tokens that were computed, and first tokens of
later turns.

Each session is a closed loop: a turn's prompt repeats the conversation, and is sent when the tool that the answer
before it called has ended. The tools' times are log-normal, 0.1 to 30 s. The pools of all decode workers together hold
a part of the sessions. Simulated, or measured on clusters that are started here, with the mock engine.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from benchmarks.options import serve_args_option
from kvrelay.bench.cases import Case, CaseTimes, running
from kvrelay.bench.client.connection import ConnectionPool
from kvrelay.bench.compare import serve_case
from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.table import Row, results_table
from kvrelay.cli.options import json_option
from kvrelay.config import EngineConfig, MockConfig, TiersConfig
from kvrelay.core.step_cost import StepCost
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.answer import Usage
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loads import generated_arrivals
from kvrelay.simulate.simulation import simulate
from kvrelay.tiers.block import Shape
from kvrelay.tiers.host import NUM_WAYS, bytes_of

Retention = Literal["value", "recency"]
POLICIES: tuple[Retention, ...] = ("recency", "value")
SETTINGS = {"1P1D": (1, 1), "2P2D": (2, 2)}
BLOCK_SIZE, VOCAB_SIZE = 16, 400
COSTS = Costs(step=StepCost(prefill_token_s=1e-5))
"""Prefills are not the bottleneck: else sessions wait for them longer than for their tools."""
_MOCK = MockConfig()
MOCK_SHAPE = Shape(bytes(16), BLOCK_SIZE, 8 * BLOCK_SIZE)
MOCK_COSTS = Costs(
    step=StepCost(
        step_s=_MOCK.decode_base_s,
        prefill_s=_MOCK.prefill_base_s,
        prefill_token_s=_MOCK.prefill_token_s,
        pair_s=0.0,
        decode_s=_MOCK.decode_seq_s,
        context_s=0.0,
    ),
    token_bytes=MOCK_SHAPE.block_bytes // BLOCK_SIZE,
    host_bytes_per_s=4e6,
)
"""Of a block of 128 bytes it is not the bytes that take time."""
_COLUMNS = {
    "setting": "setting",
    "round": "round",
    "blocks": "blocks:.0f",
    "tokens, recency": "recency_tokens:,.0f",
    "value": "value_tokens:,.0f",
    "value/recency": "tokens_ratio:.3f",
    "first token: recency, ms": "recency_ttft_ms:.1f",
    "value, ms": "value_ttft_ms:.1f",
    "value/recency, ms": "ttft_ratio:.3f",
}


class Outcome(msgspec.Struct, frozen=True):
    """``num_computed``: prompt tokens that the decode worker did not have. ``ttft_s``: the mean of all turns but the
    first of each session."""

    num_computed: int
    ttft_s: float


@click.command()
@click.option("--sessions", default=64, type=click.IntRange(2, 5000), help="Sessions that run at once.")
@click.option("--turns", default=12, type=click.IntRange(2, 100), help="Turns of a session.")
@click.option("--tools", default=3, type=click.IntRange(1, 16), help="Kinds of tools.")
@click.option("--prompt", default=1500, type=click.IntRange(16), help="Tokens of a session's first prompt.")
@click.option("--answer", default=40, type=click.IntRange(1), help="Mean tokens of an answer.")
@click.option("--share", default=0.25, type=click.FloatRange(0.05, 4.0), help="Of the sessions that the pools hold.")
@click.option("--host-share", default=0.0, type=click.FloatRange(0.0, 4.0), help="Of those that host memory holds.")
@click.option("--mock-costs", is_flag=True, help="Simulate with the costs of the mock engine.")
@click.option("--settings", default=",".join(SETTINGS), help=f"Of {', '.join(SETTINGS)}.")
@click.option("--rounds", default=2, type=click.IntRange(1, 100), help="Loads; each meets both policies in turn.")
@click.option("--measured", is_flag=True, help="Run clusters of mock workers instead of the simulator.")
@click.option("--faster", default=1.0, type=click.FloatRange(1.0, 100.0), help="With --measured: divisor of all times.")
@serve_args_option
@json_option
def agents(**given: Any) -> None:
    """Retention by value beside recency, for agents' sessions.

    Example: python -m benchmarks agents --settings 1P1D --rounds 1
    """
    names = [name.strip() for name in given["settings"].split(",")]
    if unknown := [name for name in names if name not in SETTINGS]:
        raise InvalidInputError(f"--settings: {unknown[0]!r} is none of {', '.join(SETTINGS)}", param="settings")
    rows = [compared(name, number, given) for name in names for number in range(given["rounds"])]
    text = f"{describe_machine()}\n\n{results_table(rows, _COLUMNS, left=1)}"
    print_result({"machine": describe_machine(), "given": given, "rows": rows}, text, given["as_json"])


def compared(name: str, number: int, given: dict[str, Any]) -> Row:
    """Both policies on load ``number``; every other time the second one begins."""
    load = load_of(given, number)
    num_blocks = blocks_of(load, given["sessions"] * given["share"] / SETTINGS[name][1])
    run = measured if given["measured"] else simulated
    found: dict[Retention, Outcome] = {}
    for policy in POLICIES[:: -1 if number % 2 else 1]:
        found[policy] = run(name, policy, num_blocks, load, given)
    row: Row = {"setting": name, "round": number + 1, "blocks": num_blocks}
    for kept_by, outcome in found.items():
        row |= {f"{kept_by}_tokens": outcome.num_computed, f"{kept_by}_ttft_ms": 1e3 * outcome.ttft_s}
    row["tokens_ratio"] = found["value"].num_computed / found["recency"].num_computed
    row["ttft_ratio"] = found["value"].ttft_s / found["recency"].ttft_s
    return row


def load_of(given: dict[str, Any], seed: int) -> list[Arrival]:
    """All turns; a session begins every quarter of a second."""
    turns = given["turns"]
    # The last prompt is five times as long as the first with 12 turns; the conversation grows evenly.
    cached = (turns - 1) / turns * 0.94
    spec = f"agents:sessions={given['sessions']},calls={turns},tools={given['tools']},prompt={given['prompt']}"
    return generated_arrivals(f"{spec},answer={given['answer']},cached={cached:.4f},rate=4", seed)


def blocks_of(load: Sequence[Arrival], num_sessions: float) -> int:
    """Blocks for so many sessions of mean length, but no fewer than the longest needs."""
    mean = statistics.mean(arrival.prompt_tokens + arrival.answer_tokens for arrival in load)
    longest = max(arrival.prompt_tokens + arrival.answer_tokens for arrival in load)
    return max(round(num_sessions * mean / BLOCK_SIZE), longest // BLOCK_SIZE + 2)


def host_memory_of(load: Sequence[Arrival], num_sessions: float) -> int:
    """Bytes of host memory for the mock engine's blocks of so many sessions of mean length."""
    mean = statistics.mean(arrival.prompt_tokens + arrival.answer_tokens for arrival in load)
    num_blocks = round(num_sessions * mean / BLOCK_SIZE)
    return bytes_of(-(-num_blocks // NUM_WAYS), MOCK_SHAPE) if num_blocks else 0


def simulated(name: str, policy: Retention, num_blocks: int, load: Sequence[Arrival], given: dict[str, Any]) -> Outcome:
    """By the simulator."""
    prefill, decode = SETTINGS[name]
    engine = EngineConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_retention=policy)
    tiers = TiersConfig(host_kv_cache=str(host_memory_of(load, given["sessions"] * given["host_share"])))
    spec = ClusterSpec(prefill=prefill, decode=decode, engine=engine, tiers=tiers)
    result = simulate(spec, load, MOCK_COSTS if given["mock_costs"] or tiers.is_on else COSTS)
    if len(result.done) < len(load):
        raise BenchError(f"{len(load) - len(result.done)} turns have no answer: {result.first_error}")
    return outcome_of(load, result.num_computed_tokens, [request.ttft_s for request in result.requests])


def outcome_of(load: Sequence[Arrival], num_computed: int, ttfts_s: Sequence[float]) -> Outcome:
    """``ttfts_s``: of each turn."""
    later = [ttft_s for arrival, ttft_s in zip(load, ttfts_s, strict=True) if arrival.after is not None]
    return Outcome(num_computed, statistics.mean(later))


# -- measured ---------------------------------------------------------------------------------------------------------


def measured(name: str, policy: Retention, num_blocks: int, load: Sequence[Arrival], given: dict[str, Any]) -> Outcome:
    """By a cluster of mock workers."""
    prefill, decode = SETTINGS[name]
    arguments = f"--engine mock --prefill {prefill} --decode {decode} --num-blocks {num_blocks}"
    arguments += f" --block-size {BLOCK_SIZE} --speedup-ratio {given['faster']} {given['serve_args']}"
    if num_bytes := host_memory_of(load, given["sessions"] * given["host_share"]):
        arguments += f" --host-kv-cache {num_bytes} --host-kv-linger-s 0"
    case = serve_case(f"{name} {policy}", None, arguments, f"--kv-retention {policy}")
    got = asyncio.run(served(case, load, given["faster"], is_hinted=True))
    return outcome_of(load, sum(turn.num_computed for turn in got), [turn.first_s for turn in got])


class _Chunk(msgspec.Struct):
    usage: Usage


class Turn(msgspec.Struct, frozen=True):
    """What a client got: seconds to its first token, and prompt tokens that were not cached."""

    first_s: float
    num_computed: int


async def served(case: Case, load: Sequence[Arrival], faster: float = 1.0, *, is_hinted: bool = False) -> list[Turn]:
    """By a cluster that is started for it; ``faster``: what all times are divided by. ``is_hinted``: requests say which
    tool follows, or that none does. Raises BenchError."""
    with tempfile.TemporaryDirectory() as folder:
        async with running(case, Path(folder), CaseTimes()) as target:
            pool = ConnectionPool(target)
            try:
                return await _sessions(pool, load, faster, is_hinted)
            finally:
                await pool.close()


async def _sessions(pool: ConnectionPool, load: Sequence[Arrival], faster: float, is_hinted: bool) -> list[Turn]:
    """Send each turn when its time has come."""
    begun_s = time.perf_counter()
    ended: list[asyncio.Future[float]] = [asyncio.get_running_loop().create_future() for _ in load]

    async def run(index: int, arrival: Arrival) -> Turn:
        after_s = begun_s if arrival.after is None else await ended[arrival.after]
        await asyncio.sleep(max(after_s + arrival.time_s / faster - time.perf_counter(), 0.0))
        turn = await _turn(pool, arrival, index, is_hinted)
        ended[index].set_result(time.perf_counter())
        return turn

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index, arrival)) for index, arrival in enumerate(load)]
    return [task.result() for task in tasks]


async def _turn(pool: ConnectionPool, arrival: Arrival, index: int, is_hinted: bool) -> Turn:
    body: dict[str, Any] = {
        "prompt": arrival.prompt(index, VOCAB_SIZE),
        "max_tokens": arrival.answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if is_hinted:
        body["kv_hints"] = {"tool": arrival.tool} if arrival.tool else {"release": True}
    data = msgspec.json.encode(body)
    came: list[tuple[int, bytes]] = []
    sent_ns = time.perf_counter_ns()
    head = pool.target.head("POST", "/v1/completions", len(data))
    answer = await pool.send(head + data, lambda now_ns, chunk: came.append((now_ns, chunk)))
    if answer.status != 200 or not came:
        raise BenchError(f"turn {index}: {answer.status} {answer.body[:200].decode(errors='replace')}")
    usage = usage_of(b"".join(chunk for _, chunk in came))
    return Turn((came[0][0] - sent_ns) / 1e9, usage.prompt_tokens - usage.num_cached_tokens)


def usage_of(stream: bytes) -> Usage:
    """The last event's. Raises BenchError."""
    for event in reversed(stream.split(b"\n\n")):
        if b'"usage":{' in event:
            return msgspec.json.decode(event.removeprefix(b"data: "), type=_Chunk).usage
    raise BenchError("the stream ended without its usage")
