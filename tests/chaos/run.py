"""A chaos run: start a cluster, learn the answers without faults, then load the cluster, inject faults, and count.

With the mock engine the answers are computed, so that prompts can be new; one wrong block shows as a wrong token. With
the torch engine they are the answers that it gave three times: several at once, one at a time, and in another order.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.chaos.answers import KnownPrompt, Verdict, fresh_prompt, keep_stable, make_prompts
from tests.chaos.client import SILENCE_LIMIT_S, ChaosClient, RequestRefusedError
from tests.chaos.cluster import ClusterUnderTest
from tests.chaos.faults import FaultInjector
from tests.chaos.plan import Fault, make_plan
from tests.chaos.recency import found_of, lost_sessions, surely_kept
from tests.chaos.report import (
    AskedPrompt,
    ChaosReport,
    Spread,
    count_verdicts,
    problems_of,
    spread,
    summarise_faults,
    targets_of,
    worst_pauses,
)
from tests.chaos.sessions import Agents, Key

from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.machine import describe_machine
from kvrelay.config.loading import state_directories
from kvrelay.core.handoff import OrderPolicy
from kvrelay.errors import ConfigError, FatalError
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.executors.mock import mock_generate
from kvrelay.http.api_keys import append_key, new_api_key
from kvrelay.planner import Hold
from kvrelay.planner.log import read_log

MAX_PROMPT_LEN = 600
NUM_PROMPTS = 120
NUM_PROMPTS_OF_RANKS = 40
"""With several ranks: asked one at a time, each token costs several collectives, which take turns on few cores."""
NUM_LEARNERS = 8
NUM_BLOCKS = 512
"""Blocks of a worker's KV pool: few, so that cached prefixes are evicted and prompts must be computed again."""
MAX_WAITING_REQUESTS = 32
"""Of each frontend."""
DECODE_STEP_S = 0.02
"""Of the mock engine: long enough for a fault to strike during a stream."""
RANK_TIMEOUT_S = 20.0
"""No fault stops a rank process. With more ranks than cores, one that waits for its turn must not count as hung."""
WAITS_OF_A_FAULT = 3
"""A fault waits for a whole cluster, for its victim's end and for the healing, each for at most ``heal_timeout_s``."""
IDLE_TIMEOUT_S = 20.0
MIN_STABLE_SHARE = 0.5
SLOW_PREFILL_TOKEN_S = 0.002
"""Of the mock engine under a planner that acts: its prefill workers are too slow for the load, so it has to act."""
TIGHT = ("--slo-ttft-ms", "300", "--slo-itl-ms", "40")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of ``python -m tests.chaos``; times in seconds. ``log_path`` None: the cluster writes to a temporary
    file."""

    model_path: Path
    engine_kind: str
    duration_s: float
    seed: int
    num_prefill: int
    num_decode: int
    num_frontends: int
    num_clients: int
    lease_ttl_s: float
    fault_interval_s: float
    log_path: Path | None = None
    tp: int = 1
    pp: int = 1
    num_prompts: int | None = None
    """Prompts with known answers; None: as many as fit into a minute or two on two cores."""
    order: OrderPolicy = OrderPolicy.AUTO
    transport: str = "nixl"
    data_flags: tuple[str, ...] = ()
    """The flags of a worker's data plane and tiers, ``transport`` included."""
    has_tiers: bool = False
    planner: str = "suggest"
    """Its mode: suggest, or act."""
    num_sessions: int = 0
    """Agents' sessions at once, beside the clients. With any, clients have API keys."""

    @property
    def num_ranks(self) -> int:
        """Of each worker."""
        return self.tp * self.pp

    @property
    def num_questions(self) -> int:
        return self.num_prompts or (NUM_PROMPTS_OF_RANKS if self.num_ranks > 1 else NUM_PROMPTS)

    @property
    def worker_flags(self) -> list[str]:
        """Model and flags of a worker; ``serve`` takes the same."""
        flags = [str(self.model_path), "--engine", self.engine_kind, "--lease-ttl-s", f"{self.lease_ttl_s:g}"]
        flags += ["--disagg-policy", "threshold", "--max-local-prefill-length", "64"]
        flags += ["--num-blocks", str(NUM_BLOCKS), *self.data_flags]
        # The deadline must not rescue a lost prefill before its client counts it as hung.
        flags += ["--remote-prefill-timeout-s", f"{4 * SILENCE_LIMIT_S:g}"]
        if self.engine_kind == "mock":
            if self.planner == "act":
                flags += ["--prefill-token-s", f"{SLOW_PREFILL_TOKEN_S:g}"]
            return [*flags, "--decode-base-s", f"{DECODE_STEP_S:g}"]
        flags += ["--dtype", "float32", "--num-threads", "1", "--tp", str(self.tp), "--pp", str(self.pp)]
        return [*flags, "--rank-timeout-s", f"{RANK_TIMEOUT_S:g}"]


async def run_chaos(options: ChaosOptions, progress: Progress) -> ChaosReport:
    """Run it. Raises FatalError if the cluster does not start, ConfigError if the duration is too short for faults, for
    several ranks of the mock engine, or for sessions of another one."""
    if options.engine_kind != "torch" and options.num_ranks > 1:
        raise ConfigError(f"--tp {options.tp} --pp {options.pp} need --engine torch", param="tp")
    if options.num_sessions and options.engine_kind != "mock":
        raise ConfigError("--sessions needs --engine mock, whose answers can be computed", param="sessions")
    plan = make_plan(
        options.duration_s,
        options.seed,
        interval_s=options.fault_interval_s,
        with_ranks=options.num_ranks > 1,
        with_broker=options.has_tiers,
        with_planner=options.planner == "act",
    )
    keys = _api_keys() if options.num_sessions else {}
    cluster = _cluster_of(options, keys.get(Key.HONEST))
    questions = _Questions(options)
    progress("starting the cluster")
    async with cluster, ChaosClient(cluster.url, cluster.model, api_key=keys.get(Key.HONEST)) as client:
        calm = await questions.learn(client, progress)
        burst_size = MAX_WAITING_REQUESTS * options.num_frontends * 2
        injector = FaultInjector(cluster, client, questions.known, options.lease_ttl_s, burst_size)
        agents = Agents(client, questions.answered, keys, questions.vocab_size)
        skipped = await _disturb(options, plan, client, agents, injector, questions, cluster.heal_timeout_s, progress)
        progress("waiting until nothing is in flight")
        leaked, problem = await cluster.until_idle(IDLE_TIMEOUT_S + options.lease_ttl_s)
        problems = [*([problem] if problem else []), *cluster.unclean_exits(), *await cluster.stop()]
    verdicts = count_verdicts(client.records)
    faults = summarise_faults(injector.records, client.records, options.lease_ttl_s)
    kept = {
        key: surely_kept(returns, client.records, injector.records, NUM_BLOCKS)
        for key, returns in agents.returns.items()
    }
    return {
        "machine": describe_machine(),
        "engine": options.engine_kind,
        "transport": options.transport,
        "duration_s": options.duration_s,
        "seed": options.seed,
        "lease_ttl_s": options.lease_ttl_s,
        "num_ranks": options.num_ranks,
        "num_prompts": len(questions.known),
        "requests": len(client.records),
        "output_tokens": client.num_output_tokens,
        **{verdict.value: verdicts[verdict] for verdict in Verdict if verdict is not Verdict.REFUSED},
        "reconnected": client.num_reconnected,
        "refused": client.num_refused,
        "refusal_max_s": round(client.refusal_max_s, 4),
        "cancelled": client.num_cancelled,
        **asdict(cluster.counts),
        "leaked_blocks": leaked,
        "sessions": {key: found_of(agents.returns[key], kept[key]) | dict(agents.verdicts[key]) for key in keys},
        "planner": options.planner,
        "planned_changes": _planned_changes(),
        "skipped_faults": skipped,
        "undisturbed_pause": _pauses(calm),
        "longest_pause": _pauses(client.records),
        "worst_pauses": worst_pauses(client.records, injector.records),
        "faults": faults,
        "targets": targets_of(verdicts, leaked, faults, options.lease_ttl_s, injector.rank_death_s),
        "problems": (*problems, *problems_of(client.records, injector.records), *lost_sessions(kept[Key.HONEST])),
    }


def _cluster_of(options: ChaosOptions, api_key: str | None) -> ClusterUnderTest:
    serve_flags = ["--max-waiting-requests", str(MAX_WAITING_REQUESTS), "--order", options.order]
    if options.planner == "act":
        serve_flags += ["--planner", "act", *TIGHT]
    if api_key is not None:
        serve_flags += ["--api-keys-file", str(_keys_path())]
    return ClusterUnderTest(
        [*options.worker_flags, *serve_flags],
        options.worker_flags,
        {"prefill": options.num_prefill, "decode": options.num_decode},
        options.num_frontends,
        options.log_path,
        is_planned=options.planner == "act",
        api_key=api_key,
    )


def _keys_path() -> Path:
    return state_directories()[-1] / "chaos-api-keys"


def _api_keys() -> dict[Key, str]:
    """New ones, in a file for the frontends."""
    _keys_path().parent.mkdir(parents=True, exist_ok=True)
    made = {key: new_api_key(key.value) for key in Key}
    for key, (_, line) in made.items():
        append_key(_keys_path(), key.value, line)
    return {key: secret for key, (secret, _) in made.items()}


def _planned_changes() -> int:
    """Changes that the planner has carried out, of all its incarnations."""
    log = state_directories()[-1] / "planner-default.jsonl"
    decisions = read_log(log) if log.exists() else ()
    return sum(
        decision.is_carried_out and not isinstance(decision.actions[0], Hold)
        for decision in decisions
    )  # fmt: skip


def _pauses(records: Iterable[AskedPrompt]) -> Spread | None:
    pauses = (record.longest_pause_s(record.begin_s, math.inf) for record in records if record.is_stream)
    return spread(pause for pause in pauses if pause is not None)


class _Questions:
    """The prompts of a run. ``known`` are the prompts with known answers, empty until ``learn``."""

    def __init__(self, options: ChaosOptions) -> None:
        facts = checkpoint_facts(options.model_path)
        self._eos, self.vocab_size = facts.eos_token_ids, facts.vocab_size
        self._is_mock = options.engine_kind == "mock"
        self._seed = options.seed
        self._count = options.num_questions
        self.known: list[KnownPrompt] = []

    async def learn(self, client: ChaosClient, progress: Progress) -> list[AskedPrompt]:
        """Send all prompts without faults. Returns the records. Raises FatalError if too few answers are known."""
        prompts = make_prompts(
            self._count, self._seed, vocab_size=self.vocab_size, max_len=MAX_PROMPT_LEN, with_sampling=not self._is_mock
        )
        progress(f"asking {len(prompts)} prompts undisturbed, {NUM_LEARNERS} at once")
        first, calm = await _ask_all(client, prompts, range(len(prompts)), at_once=NUM_LEARNERS)
        answers = [first]
        if self._is_mock:
            answers.append([self._computed(prompt) for prompt in prompts])
        else:
            shuffled = random.Random(self._seed).sample(range(len(prompts)), len(prompts))
            for order, at_once in ((range(len(prompts)), 1), (shuffled, NUM_LEARNERS)):
                progress(f"asking them again, {at_once} at once")
                more, records = await _ask_all(client, prompts, order, at_once=at_once)
                answers.append(more)
                calm += records
        self.known = keep_stable(prompts, answers)
        if len(self.known) < len(prompts) * (1.0 if self._is_mock else MIN_STABLE_SHARE):
            raise FatalError(f"only {len(self.known)} of {len(prompts)} answers were right while nothing was disturbed")
        return calm

    def draw(self, rng: random.Random) -> KnownPrompt:
        """A known prompt at random; with the mock engine, whose answers can be computed, every other one is new."""
        if not self._is_mock or rng.random() < 0.5:
            return rng.choice(self.known)
        return self.answered(fresh_prompt(rng, self.known, vocab_size=self.vocab_size))

    def answered(self, prompt: KnownPrompt) -> KnownPrompt:
        """With the answer of the mock engine."""
        return replace(prompt, answer=tuple(self._computed(prompt)))

    def _computed(self, prompt: KnownPrompt) -> list[int]:
        return mock_generate(prompt.token_ids, prompt.max_tokens, vocab_size=self.vocab_size, eos_token_ids=self._eos)


async def _ask_all(
    client: ChaosClient, prompts: Sequence[KnownPrompt], sequence: Sequence[int], *, at_once: int
) -> tuple[list[list[int]], list[AskedPrompt]]:
    """Every prompt's answer, in the order of ``prompts``, asked in the order of ``sequence``. Raises FatalError."""
    limit = asyncio.Semaphore(at_once)
    answers: dict[int, list[int]] = {}
    records: list[AskedPrompt] = []

    async def ask(number: int) -> None:
        async with limit:
            answers[number], record = await client.answer(replace(prompts[number], stream=True))
            records.append(record)

    try:
        async with asyncio.TaskGroup() as group:
            for number in sequence:
                group.create_task(ask(number))
    except* (BenchError, RequestRefusedError, TimeoutError) as failed:
        raise FatalError(f"a request failed while nothing was disturbed: {failed.exceptions[0]!r}") from failed
    return [answers[number] for number in range(len(prompts))], records


async def _disturb(
    options: ChaosOptions,
    plan: Sequence[Fault],
    client: ChaosClient,
    agents: Agents,
    injector: FaultInjector,
    questions: _Questions,
    heal_timeout_s: float,
    progress: Progress,
) -> int:
    """Run load and faults for the whole duration, and until the last fault has healed. Returns how many faults were
    given up because none of those that were left made progress."""
    stop = asyncio.Event()
    start_s = time.monotonic()
    asking = [
        asyncio.ensure_future(client.keep_asking(questions.draw, options.seed * 1000 + number, stop))
        for number in range(options.num_clients)
    ]
    asking += [
        asyncio.ensure_future(agents.keep_working(number, options.seed, stop)) for number in range(options.num_sessions)
    ]
    running: list[asyncio.Future[None]] = []
    for number, fault in enumerate(plan, 1):
        await asyncio.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
        progress(f"{time.monotonic() - start_s:6.1f} s  {number}/{len(plan)}  {fault.name}")
        running.append(asyncio.ensure_future(injector.run(fault)))
    await asyncio.sleep(max(0.0, start_s + options.duration_s - time.monotonic()))
    late = await _until_stuck(running, heal_timeout_s)
    for task in late:
        task.cancel()
    stop.set()
    await asyncio.gather(*asking)
    await asyncio.gather(*late, return_exceptions=True)
    return len(late)


async def _until_stuck(running: Sequence[asyncio.Future[None]], heal_timeout_s: float) -> set[asyncio.Future[None]]:
    """Wait until all faults have healed. Returns those that are left when none of them has ended for the longest time
    that one may take. There is no bound on all of them together: faults against one role wait for each other, and a
    slow machine then needs as much longer as it is slower. Raises what a fault raised."""
    left = set(running)
    while left:
        done, left = await asyncio.wait(
            left, timeout=WAITS_OF_A_FAULT * heal_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        await asyncio.gather(*done)
        if not done:
            break
    return left
