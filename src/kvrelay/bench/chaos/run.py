"""A chaos run from start to stop: start a cluster, learn the answers undisturbed, load it, break it, count.

With the mock engine the answers are computed, so that prompts can be new; one wrong block shows as a wrong token.
With the torch engine they are what it answered three times: several at once, one at a time, and in another order.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from kvrelay.bench.chaos.answers import KnownPrompt, Verdict, fresh_prompt, keep_stable, make_prompts
from kvrelay.bench.chaos.cluster import ClusterUnderTest
from kvrelay.bench.chaos.faults import FaultInjector
from kvrelay.bench.chaos.load import SILENCE_LIMIT_S, ChaosClient, DrawPrompt, RequestFailedError, RequestRefusedError
from kvrelay.bench.chaos.plan import Fault, make_plan
from kvrelay.bench.chaos.report import (
    ChaosReport,
    FaultRecord,
    RequestRecord,
    Spread,
    count_verdicts,
    problems_of,
    spread,
    summarise_faults,
    targets_of,
    worst_pauses,
)
from kvrelay.bench.suite import describe_machine
from kvrelay.errors import FatalError
from kvrelay.executors.mock import mock_generate

MAX_PROMPT_LEN = 600
NUM_LEARNERS = 8
START_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 20.0
MIN_STABLE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What ``kvrelay bench chaos`` was told. Lengths of time in seconds."""

    model_path: Path
    engine: str = "mock"
    duration_s: float = 300.0
    seed: int = 0
    num_prefill: int = 2
    num_decode: int = 2
    num_frontends: int = 2
    num_clients: int = 8
    num_prompts: int = 120
    num_blocks: int = 512
    """Of a worker's KV pool: few, so that cached prefixes are evicted and prompts have to be computed again."""
    max_waiting_requests: int = 32
    """Of each frontend."""
    lease_ttl_s: float = 2.0
    fault_interval_s: float = 3.0
    decode_step_s: float = 0.02
    """Of the mock engine: streams live long enough to meet a fault."""
    log_path: Path | None = None
    """What the cluster writes goes there; None: to a temporary file."""

    def __post_init__(self) -> None:
        if min(self.num_prefill, self.num_decode) < 2:
            raise FatalError("chaos needs two workers of each role, so that one of each may die")

    @property
    def worker_flags(self) -> list[str]:
        """Flags of a worker; those of ``serve`` besides its own."""
        flags = ["--engine", self.engine, "--lease-ttl-s", f"{self.lease_ttl_s:g}", "--max-local-prefill-length", "64"]
        flags += ["--num-blocks", str(self.num_blocks)]
        # A lost prefill must not be rescued by its deadline before its client counts it as hung.
        flags += ["--remote-prefill-timeout-s", f"{4 * SILENCE_LIMIT_S:g}"]
        if self.engine == "mock":
            return [*flags, "--decode-base-s", f"{self.decode_step_s:g}"]
        return [*flags, "--dtype", "float32", "--num-threads", "1"]


Progress = Callable[[str], None]


async def run_chaos(options: ChaosOptions, progress: Progress) -> ChaosReport:
    """Run it. Raises FatalError when the cluster does not start, ConfigError for a duration without room for faults."""
    plan = make_plan(options.duration_s, options.seed, interval_s=options.fault_interval_s)
    num_workers = {"prefill": options.num_prefill, "decode": options.num_decode}
    flags = [
        str(options.model_path),
        *options.worker_flags,
        "--max-waiting-requests",
        str(options.max_waiting_requests),
    ]
    worker_flags = [str(options.model_path), *options.worker_flags]
    cluster = ClusterUnderTest(
        flags, worker_flags, num_workers, options.num_frontends, START_TIMEOUT_S, options.log_path
    )
    progress("starting the cluster")
    async with cluster, ChaosClient(cluster.url, cluster.model) as client:
        prompts, calm = await _learn(options, client, progress)
        injector = FaultInjector(
            cluster,
            client,
            prompts,
            lease_ttl_s=options.lease_ttl_s,
            burst_size=options.max_waiting_requests * options.num_frontends * 2,
        )
        skipped = await _disturb(options, plan, client, injector, prompts, cluster.heal_timeout_s, progress)
        progress("waiting until nothing is in flight")
        leaked, problem = await cluster.until_idle(IDLE_TIMEOUT_S + options.lease_ttl_s)
        problems = [problem] if problem else []
        problems += cluster.unclean_exits()
        problems += await cluster.stop()
    remote = cluster.num_remote_prefills
    return _report(options, client, injector.records, prompts, calm, remote, leaked, skipped, problems)


async def _learn(
    options: ChaosOptions, client: ChaosClient, progress: Progress
) -> tuple[list[KnownPrompt], list[RequestRecord]]:
    """The prompts with their answers, and the records of asking them undisturbed. Raises FatalError."""
    is_mock = options.engine == "mock"
    prompts = make_prompts(
        options.num_prompts,
        options.seed,
        vocab_size=_vocabulary(options)[0],
        max_len=MAX_PROMPT_LEN,
        with_sampling=not is_mock,
    )
    progress(f"asking {len(prompts)} prompts undisturbed")
    first, calm = await _ask_all(client, prompts, range(len(prompts)), at_once=NUM_LEARNERS)
    answers = [first]
    if is_mock:
        vocab_size, eos = _vocabulary(options)
        answers.append(
            [mock_generate(p.token_ids, p.max_tokens, vocab_size=vocab_size, eos_token_ids=eos) for p in prompts]
        )
    else:
        shuffled = random.Random(options.seed).sample(range(len(prompts)), len(prompts))
        for order, at_once in ((range(len(prompts)), 1), (shuffled, NUM_LEARNERS)):
            more, records = await _ask_all(client, prompts, order, at_once=at_once)
            answers.append(more)
            calm += records
    known = keep_stable(prompts, answers)
    if len(known) < len(prompts) * (1.0 if is_mock else MIN_STABLE_SHARE):
        raise FatalError(f"only {len(known)} of {len(prompts)} answers were right while nothing was disturbed")
    return known, calm


def _vocabulary(options: ChaosOptions) -> tuple[int, tuple[int, ...]]:
    """Its size, and the tokens that end an answer."""
    config = json.loads((options.model_path / "config.json").read_text(encoding="utf-8"))
    eos = config.get("eos_token_id")
    return config["vocab_size"], tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def _drawer(options: ChaosOptions, prompts: Sequence[KnownPrompt]) -> DrawPrompt:
    """Known prompts at random; with the mock engine, whose answers can be computed, every other one is new."""
    vocab_size, eos_ids = _vocabulary(options)

    def draw(rng: random.Random) -> KnownPrompt:
        if options.engine != "mock" or rng.random() < 0.5:
            return rng.choice(prompts)
        prompt = fresh_prompt(rng, prompts, vocab_size=vocab_size)
        answer = mock_generate(prompt.token_ids, prompt.max_tokens, vocab_size=vocab_size, eos_token_ids=eos_ids)
        return replace(prompt, answer=tuple(answer))

    return draw


async def _ask_all(
    client: ChaosClient, prompts: Sequence[KnownPrompt], sequence: Sequence[int], *, at_once: int
) -> tuple[list[list[int]], list[RequestRecord]]:
    """Every prompt's answer, in the order of ``prompts``, asked in the order of ``sequence``. Raises FatalError."""
    limit = asyncio.Semaphore(at_once)
    answers: dict[int, list[int]] = {}
    records: list[RequestRecord] = []

    async def ask(number: int) -> None:
        async with limit:
            answers[number], record = await client.answer(replace(prompts[number], stream=True))
            records.append(record)

    tasks = [asyncio.ensure_future(ask(number)) for number in sequence]
    try:
        await asyncio.gather(*tasks)
    except (RequestFailedError, RequestRefusedError, aiohttp.ClientError) as exc:
        for task in tasks:
            task.cancel()
        raise FatalError(f"a request failed while nothing was disturbed: {exc!r}") from exc
    return [answers[number] for number in range(len(prompts))], records


async def _disturb(
    options: ChaosOptions,
    plan: Sequence[Fault],
    client: ChaosClient,
    injector: FaultInjector,
    prompts: Sequence[KnownPrompt],
    heal_timeout_s: float,
    progress: Progress,
) -> int:
    """Load and faults for the whole duration, and until the last fault has healed; gives how many did not."""
    stop = asyncio.Event()
    draw = _drawer(options, prompts)
    start_s = time.monotonic()
    asking = [
        asyncio.ensure_future(client.keep_asking(draw, options.seed * 1000 + number, stop))
        for number in range(options.num_clients)
    ]
    running: list[asyncio.Future[None]] = []
    for number, fault in enumerate(plan, 1):
        await asyncio.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
        progress(f"{time.monotonic() - start_s:6.1f} s  {number}/{len(plan)}  {fault.name}")
        running.append(asyncio.ensure_future(injector.run(fault)))
    await asyncio.sleep(max(0.0, start_s + options.duration_s - time.monotonic()))
    late: set[asyncio.Future[None]] = set()
    if running:
        done, late = await asyncio.wait(running, timeout=heal_timeout_s)
        await asyncio.gather(*done)
    for task in late:
        task.cancel()
    stop.set()
    await asyncio.gather(*asking)
    await asyncio.gather(*late, return_exceptions=True)
    return len(late)


def _report(
    options: ChaosOptions,
    client: ChaosClient,
    faults: Sequence[FaultRecord],
    prompts: Sequence[KnownPrompt],
    calm: Sequence[RequestRecord],
    remote_prefills: int,
    leaked: int,
    skipped: int,
    problems: Sequence[str],
) -> ChaosReport:
    verdicts = count_verdicts(client.records)
    summaries = summarise_faults(faults, client.records, options.lease_ttl_s)
    return ChaosReport(
        machine=describe_machine(),
        engine=options.engine,
        duration_s=options.duration_s,
        seed=options.seed,
        lease_ttl_s=options.lease_ttl_s,
        num_prompts=len(prompts),
        requests=len(client.records),
        output_tokens=client.num_output_tokens,
        right=verdicts[Verdict.RIGHT],
        wrong=verdicts[Verdict.WRONG],
        missing=verdicts[Verdict.MISSING],
        repeated=verdicts[Verdict.REPEATED],
        failed=verdicts[Verdict.FAILED],
        hung=verdicts[Verdict.HUNG],
        reconnected=client.num_reconnected,
        refused=client.refusals.count,
        refusal_max_s=round(client.refusals.max_s, 4),
        cancelled=client.num_cancelled,
        remote_prefills=remote_prefills,
        leaked_blocks=leaked,
        skipped_faults=skipped,
        undisturbed_pause=_pauses(calm),
        longest_pause=_pauses(client.records),
        worst_pauses=worst_pauses(client.records, faults),
        faults=summaries,
        targets=targets_of(verdicts, leaked, summaries, options.lease_ttl_s),
        problems=(*problems, *problems_of(client.records, faults)),
    )


def _pauses(records: Sequence[RequestRecord]) -> Spread | None:
    pauses = (record.longest_pause_s(record.begin_s, math.inf) for record in records if record.is_stream)
    return spread(pause for pause in pauses if pause is not None)
