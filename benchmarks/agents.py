"""Agents' sessions under policies of retention and routing, in turn: prompt tokens that were computed, first tokens of
later turns, and goodput.

Each session is a closed loop: a turn's prompt repeats the conversation, and is sent when the tool that the answer
before it called has ended. The tools' times are log-normal, 0.1 to 30 s. The pools of all decode workers together hold
a part of the sessions. Simulated, or measured on clusters that are started here, with the mock engine.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import click
import msgspec

from benchmarks.loads import all_running, print_rows
from benchmarks.options import serve_args_option
from kvrelay.bench.cases import Case
from kvrelay.bench.client.connection import ConnectionPool
from kvrelay.bench.client.service import first_model
from kvrelay.bench.client.stream import BodyOptions, StreamEndpoint, StreamRecorder, encode_body, run_stream
from kvrelay.bench.compare import serve_case
from kvrelay.bench.errors import BenchError
from kvrelay.bench.load.request import LoadRequest
from kvrelay.bench.report.metrics import Outcome as RequestOutcome
from kvrelay.bench.report.metrics import RequestRecord
from kvrelay.bench.report.table import Row
from kvrelay.cli.options import json_option
from kvrelay.config import DisaggConfig, EngineConfig, MockConfig, RouterConfig, TiersConfig
from kvrelay.core.handoff import OrderPolicy
from kvrelay.core.step_cost import StepCost
from kvrelay.errors import InvalidInputError
from kvrelay.placement.cost import objectives_of
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.router import PairDecision, PairRouter, RoutingRequest
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs, costs_of
from kvrelay.simulate.learnt import learnt_by_serving
from kvrelay.simulate.loads import generated_arrivals
from kvrelay.simulate.simulation import Simulation
from kvrelay.tiers.block import Shape
from kvrelay.tiers.host import NUM_WAYS, bytes_of

SETTING = re.compile(r"(\d{1,2})P(\d{1,2})D")
BLOCK_SIZE, VOCAB_SIZE = 16, 400
GPU_OBJECTIVES = DisaggConfig(slo_ttft_ms=1000, slo_itl_ms=30)
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
    "policy": "policy",
    "round": "round",
    "blocks": "blocks:.0f",
    "tokens": "num_computed:,.0f",
    "of the first's": "tokens_ratio:.3f",
    "later first token, ms": "ttft_s:ms",
    "of the first's ": "ttft_ratio:.3f",
    "goodput": "goodput:.3f",
}


class Policy(NamedTuple):
    """``stays``: each session at the decode worker of its first turn."""

    retention: Literal["value", "recency"]
    router: Literal["kv", "kv-weights"] = "kv"
    stays: bool = False


POLICIES = {
    "recency": Policy("recency"),
    "value": Policy("value"),
    "affinity": Policy("recency", stays=True),
    "prefix": Policy("recency", "kv-weights"),
}


class Outcome(msgspec.Struct, frozen=True):
    """``num_computed``: prompt tokens that the decode worker did not have. ``ttft_s``: the mean of all turns but the
    first of each session. ``goodput``: the share of turns within the objectives, if simulated."""

    num_computed: int
    ttft_s: float
    goodput: float | None = None


@click.command()
@click.option("--sessions", default=64, type=click.IntRange(2, 5000), help="Sessions that run at once.")
@click.option("--turns", default=12, type=click.IntRange(2, 100), help="Turns of a session.")
@click.option("--tools", default=3, type=click.IntRange(1, 16), help="Kinds of tools.")
@click.option("--prompt", default=1500, type=click.IntRange(16), help="Tokens of a session's first prompt.")
@click.option("--answer", default=40, type=click.IntRange(1), help="Mean tokens of an answer.")
@click.option("--share", default=0.25, type=click.FloatRange(0.05, 4.0), help="Of the sessions that the pools hold.")
@click.option("--host-share", default=0.0, type=click.FloatRange(0.0, 4.0), help="Of those that host memory holds.")
@click.option(
    "--prefetch-s", default=0.0, type=click.FloatRange(0.0), help="Clients ask for a prefetch so long before."
)
@click.option("--mock-costs", is_flag=True, help="Simulate with the costs of the mock engine.")
@click.option("--costs", help="Simulate with costs of kvrelay simulate, learnt before; objectives: 1 s and 30 ms.")
@click.option("--rate", default=4.0, type=click.FloatRange(0.01), help="Sessions that begin in a second.")
@click.option("--block-size", default=BLOCK_SIZE, type=click.IntRange(1), help="Tokens of a block.")
@click.option("--settings", default="1P1D,2P2D", help="Prefill and decode workers.")
@click.option("--policies", default="recency,value", help=f"Of {', '.join(POLICIES)}; the last two are simulated only.")
@click.option("--rounds", default=2, type=click.IntRange(1, 100), help="Loads; each meets all policies in turn.")
@click.option("--measured", is_flag=True, help="Run clusters of mock workers instead of the simulator.")
@click.option("--faster", default=1.0, type=click.FloatRange(1.0, 100.0), help="With --measured: divisor of all times.")
@serve_args_option
@json_option
def agents(**given: Any) -> None:
    """Retention by value beside recency, and beside other routers, for agents' sessions.

    Example: python -m benchmarks agents --settings 1P1D --rounds 1
    """
    policies = given["policies"].split(",")
    if unknown := set(policies) - POLICIES.keys():
        raise InvalidInputError(f"--policies: {unknown.pop()!r} is none of {', '.join(POLICIES)}", param="policies")
    if given["measured"] and any(POLICIES[name] != Policy(POLICIES[name].retention) for name in policies):
        raise InvalidInputError("--policies: only recency and value can be measured", param="policies")
    loads = itertools.product(given["settings"].split(","), range(given["rounds"]))
    rows = [row for name, number in loads for row in compared(name, number, given)]
    print_rows(rows, _COLUMNS, given["as_json"], left=2, given=given)


def compared(name: str, number: int, given: dict[str, Any]) -> list[Row]:
    """The policies on load ``number``; every other time the last one begins. Raises InvalidInputError."""
    shape = SETTING.fullmatch(name)
    if shape is None:
        raise InvalidInputError(f"--settings: {name!r} is not like 2P2D", param="settings")
    setting, load = (int(shape[1]), int(shape[2])), load_of(given, number)
    blocks = blocks_of(load, given["sessions"] * given["share"] / setting[1], given["block_size"])
    run, names = measured if given["measured"] else simulated, given["policies"].split(",")
    order = names[:: -1 if number % 2 else 1]
    found = {policy: run(setting, POLICIES[policy], load, given | {"blocks": blocks}) for policy in order}
    about = {"setting": name, "round": number + 1, "blocks": blocks}
    rows = [{**about, "policy": policy, **msgspec.structs.asdict(found[policy])} for policy in names]
    for row in rows:
        row["tokens_ratio"] = row["num_computed"] / rows[0]["num_computed"]
        row["ttft_ratio"] = row["ttft_s"] / rows[0]["ttft_s"]
    return rows


def load_of(given: dict[str, Any], seed: int) -> list[Arrival]:
    """All turns."""
    turns = given["turns"]
    # The last prompt is five times as long as the first with 12 turns; the conversation grows evenly.
    cached = (turns - 1) / turns * 0.94
    spec = f"agents:sessions={given['sessions']},calls={turns},tools={given['tools']},prompt={given['prompt']}"
    spec += f",answer={given['answer']},cached={cached:.4f},rate={given['rate']},prefetch={given['prefetch_s']}"
    return generated_arrivals(spec, seed)


def blocks_of(load: Sequence[Arrival], num_sessions: float, block_size: int = BLOCK_SIZE) -> int:
    """Blocks for so many sessions of mean length, but no fewer than the longest needs."""
    lengths = [arrival.prompt_tokens + arrival.answer_tokens for arrival in load]
    return max(round(num_sessions * statistics.mean(lengths) / block_size), max(lengths) // block_size + 2)


def host_memory_of(load: Sequence[Arrival], num_sessions: float, shape: Shape = MOCK_SHAPE) -> int:
    """Bytes of host memory for so many sessions of mean length."""
    mean = statistics.mean(arrival.prompt_tokens + arrival.answer_tokens for arrival in load)
    num_blocks = round(num_sessions * mean / shape.block_size)
    return bytes_of(-(-num_blocks // NUM_WAYS), shape) if num_blocks else 0


def simulated(setting: tuple[int, int], policy: Policy, load: Sequence[Arrival], given: dict[str, Any]) -> Outcome:
    """By the simulator. Raises BenchError."""
    engine = EngineConfig(num_blocks=given["blocks"], block_size=given["block_size"], kv_retention=policy.retention)
    costs, disagg, learnt = MOCK_COSTS if given["mock_costs"] or given["host_share"] else COSTS, DisaggConfig(), None
    if given["costs"] is not None:
        costs, disagg = costs_of(given["costs"]), GPU_OBJECTIVES
        learnt = learnt_by_serving(costs, engine)
    shape = Shape(MOCK_SHAPE.fingerprint, engine.block_size, costs.token_bytes * engine.block_size)
    tiers = TiersConfig(host_kv_cache=str(host_memory_of(load, given["sessions"] * given["host_share"], shape)))
    router = RouterConfig(router=policy.router)
    spec = ClusterSpec(*setting, engine=engine, tiers=tiers, router=router, disagg=disagg)
    simulation = Simulation(spec, load, costs, learnt=learnt)
    if policy.stays and simulation.frontend.pairs is not None:
        simulation.frontend.pairs = StayingPairs(simulation.frontend.pairs, disagg, load)
    result = simulation.run()
    if len(result.done) < len(load):
        raise BenchError(f"{len(load) - len(result.done)} turns have no answer: {result.first_error}")
    outcome = outcome_of(load, result.num_computed_tokens, [request.ttft_s for request in result.requests])
    return msgspec.structs.replace(outcome, goodput=result.goodput(objectives_of(disagg)))


class StayingPairs(PairRouter):
    """Keeps each session at the decode worker of its first turn, unless that has refused the turn."""

    def __init__(self, pairs: PairRouter, disagg: DisaggConfig, load: Sequence[Arrival]) -> None:
        super().__init__(pairs.decodes, pairs.prefills, DisaggPolicy(disagg))
        self._load = load
        self._homes: dict[str | None, str] = {}

    def choose(
        self, request: RoutingRequest, order: OrderPolicy = OrderPolicy.PREFILL_FIRST, *, must_be_local: bool
    ) -> PairDecision:
        session = self._load[int(request.request_id.partition("-")[0])].session
        home = self._homes.get(session)
        if home is not None and home not in request.exclude:
            others = {*request.exclude, *self.decodes.worker_ids} - {home}
            request = msgspec.structs.replace(request, exclude=others)
        decision = super().choose(request, order, must_be_local=must_be_local)
        self._homes.setdefault(session, decision.decode.worker_id)
        return decision


def outcome_of(load: Sequence[Arrival], num_computed: int, ttfts_s: Sequence[float]) -> Outcome:
    """``ttfts_s``: of each turn."""
    later = [ttft_s for arrival, ttft_s in zip(load, ttfts_s, strict=True) if arrival.after is not None]
    return Outcome(num_computed, statistics.mean(later))


# -- measured ---------------------------------------------------------------------------------------------------------


def measured(setting: tuple[int, int], policy: Policy, load: Sequence[Arrival], given: dict[str, Any]) -> Outcome:
    """By a cluster of mock workers."""
    prefill, decode = setting
    arguments = f"--engine mock --prefill {prefill} --decode {decode} --num-blocks {given['blocks']}"
    arguments += f" --block-size {given['block_size']} --speedup-ratio {given['faster']} {given['serve_args']}"
    if num_bytes := host_memory_of(load, given["sessions"] * given["host_share"]):
        arguments += f" --host-kv-cache {num_bytes} --host-kv-linger-s 0"
    case = serve_case(policy.retention, None, arguments, f"--kv-retention {policy.retention}")
    got = asyncio.run(served(case, load, given["faster"], is_hinted=True))
    return outcome_of(load, sum(turn.num_computed for turn in got), [turn.first_s for turn in got])


class Turn(msgspec.Struct, frozen=True):
    """What a client got: seconds to its first token, and prompt tokens that were not cached."""

    first_s: float
    num_computed: int


async def served(case: Case, load: Sequence[Arrival], faster: float = 1.0, *, is_hinted: bool = False) -> list[Turn]:
    """By a cluster that is started for it; ``faster``: what all times are divided by. ``is_hinted``: requests say which
    tool follows, or that none does. Raises BenchError."""
    async with all_running([case]) as (target,), ConnectionPool(target) as pool:
        return await _sessions(pool, await first_model(pool), load, faster, is_hinted)


async def _sessions(
    pool: ConnectionPool, model: str, load: Sequence[Arrival], faster: float, is_hinted: bool
) -> list[Turn]:
    """Send each turn when its time has come."""
    begun_s = time.perf_counter()
    ended: list[asyncio.Future[float]] = [asyncio.get_running_loop().create_future() for _ in load]

    async def run(index: int, arrival: Arrival) -> Turn:
        after_s = begun_s if arrival.after is None else await ended[arrival.after]
        due_s = after_s + arrival.time_s / faster
        if arrival.prefetch_s:
            await asyncio.sleep(max(due_s - arrival.prefetch_s / faster - time.perf_counter(), 0.0))
            group.create_task(_sent(pool, model, arrival, index, {"prefetch": True}))
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        known = {"tool": arrival.tool} if arrival.tool else {"release": True}
        record = await _sent(pool, model, arrival, index, known if is_hinted else None)
        ended[index].set_result(time.perf_counter())
        return Turn(record.ttft_s or record.e2e_s, record.prompt_tokens - (record.cached_tokens or 0))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index, arrival)) for index, arrival in enumerate(load)]
    return [task.result() for task in tasks]


async def _sent(
    pool: ConnectionPool, model: str, arrival: Arrival, index: int, hints: dict[str, Any] | None
) -> RequestRecord:
    fields = msgspec.json.encode({"ignore_eos": True, "kv_hints": hints})
    request = LoadRequest(tuple(arrival.prompt(index, VOCAB_SIZE)), arrival.answer_tokens)
    body = encode_body(request, BodyOptions(model, plain=True, extra=fields))
    record = await run_stream(pool, StreamEndpoint.COMPLETIONS, body, StreamRecorder("turn", None))
    if record.outcome is not RequestOutcome.OK:
        raise BenchError(f"turn {index}: {record.error}")
    return record
