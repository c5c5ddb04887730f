"""The rows about a cluster that certify has started, or about servers that run already: they ask, and look at counters.

A cluster's prefills are all remote (``--disagg-policy always``) unless a row says otherwise, and the workers' counts
prove it: an answer may be right only because the decode worker computed the prompt itself.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import msgspec

from kvrelay.bench.errors import BenchError
from kvrelay.certify.answers import FALSE_ALARM, Comparison, chance, compare, judge_answers, judge_logprobs, tie_of
from kvrelay.certify.counters import Evidence, judge_operations, judge_way, read_octets, read_ucx
from kvrelay.certify.findings import Facts, Group, Row, Series, Verdict
from kvrelay.certify.kv import Progress
from kvrelay.certify.servers import Answer, Cluster, Prompt, Server
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import FatalError, KvrelayError

NUM_TOKENS = 12
NOISE_CONCURRENCY = 8
NUM_AGAIN = 8
"""How often both sides are asked again about a prompt whose answers differ."""
CANCEL_SHARE = 0.15
LOAD_CONCURRENCY = 8
MAX_FIRST_TOKEN_RATIO = 1.5
IDLE_S = 120.0
FORGET_S = 0.25


class Reference(msgspec.Struct, frozen=True):
    """What the engine alone answers: one prompt at a time, and many at once. ``noise`` is the difference."""

    prompts: tuple[Prompt, ...]
    alone: tuple[Answer, ...]
    together: tuple[Answer, ...]

    @property
    def tie(self) -> float:
        return tie_of(compare(self.alone, self.together, 0.0).logprob_gap)

    @property
    def noise(self) -> Comparison:
        return compare(self.alone, self.together, self.tie)


async def ask_reference(server: Server, prompts: Sequence[Prompt]) -> Reference:
    """Raises BenchError."""
    alone = await server.answers(prompts, NUM_TOKENS)
    together = await server.answers(prompts, NUM_TOKENS, NOISE_CONCURRENCY)
    return Reference(tuple(prompts), tuple(alone), tuple(together))


def judge_model(pair: str, alone: str) -> str | None:
    """Why two servers cannot be compared; None if they can."""
    return None if pair == alone else f"the pair serves {pair!r}, the reference {alone!r}: give servers of one model"


# -- Right ------------------------------------------------------------------------------------------------------------


async def prove_answers(
    server: Server,
    reference: Reference,
    cell: str,
    alone: Callable[[], AbstractAsyncContextManager[Server]],
    cluster: Cluster | None,
    progress: Progress,
) -> list[Row]:
    """Greedy answers and first tokens' logprobs beside the reference. ``alone``: the engine alone, which is asked again
    about prompts whose answers differ. Raises BenchError, FatalError."""
    began_s = time.monotonic()
    before = None
    if cluster is not None:
        await cluster.forget()
        before = await _num_remote(cluster)
    found: list[Answer] = []
    for prompt in reference.prompts:
        found.append(await server.answer(prompt, NUM_TOKENS))
        progress(len(found) / len(reference.prompts))
    compared = compare(reference.alone, found, reference.tie)
    noise = reference.noise
    num_stable = 0
    if compared.differing and chance(compared, noise) >= FALSE_ALARM:
        async with alone() as again:
            num_stable = await _num_stable(server, again, reference, compared)
    verdict, reason = judge_answers(compared, noise, num_stable, NUM_AGAIN)
    if before is not None and cluster is not None:
        local = len(reference.prompts) - (await _num_remote(cluster) - before)
        if local > 0:
            verdict = Verdict.FAIL
            reason = f"{local} of {len(reference.prompts)} prefills were not remote, so they prove nothing; {reason}"
        else:
            reason = f"{reason}; all prefills were remote"
    lengths = sorted(map(len, reference.prompts))
    evidence: Facts = {
        "prompts": len(found),
        "lengths": f"{lengths[0]} to {lengths[-1]}",
        "tokens compared": compared.exposed,
        "ties": compared.num_ties,
        "the engine's own differences": len(noise.differing),
        "false alarms at most": FALSE_ALARM,
    }
    seconds = time.monotonic() - began_s
    rows = [Row(Group.RIGHT, "greedy answers", cell, verdict, reason, evidence, seconds=seconds)]
    verdict, reason = judge_logprobs(compared, noise)
    evidence = {"first tokens": len(compared.first_gaps), "largest gap": max(compared.first_gaps, default=0.0)}
    return [*rows, Row(Group.RIGHT, "logprobs of first tokens", cell, verdict, reason, evidence)]


async def _num_stable(server: Server, alone: Server, reference: Reference, compared: Comparison) -> int:
    """Of the prompts whose answers differ, those that have one answer at the engine alone each time, and never that one
    here."""
    num_stable = 0
    for number in compared.differing[:8]:
        prompt, ours = reference.prompts[number], reference.alone[number]
        theirs = [await server.answer(prompt, NUM_TOKENS) for _ in range(NUM_AGAIN)]
        again = [await alone.answer(prompt, NUM_TOKENS) for _ in range(NUM_AGAIN)]
        is_repeated = all(each.tokens == ours.tokens for each in again)
        num_stable += is_repeated and all(compare([ours], [each], reference.tie).differing for each in theirs)
    return num_stable


async def _num_remote(cluster: Cluster) -> int:
    workers = await cluster.workers()
    if not workers:
        raise FatalError("no worker answers")
    return sum(status["decode"]["num_remote_done"] for status in workers)


async def prove_load(
    server: Server, reference: Reference, cell: str, num_requests: int, cluster: Cluster | None, progress: Progress
) -> tuple[Row, Evidence | None]:
    """Many requests at once, some of which leave; their answers, and no block left in use. The evidence says which way
    their KV took; None for servers that are not ours. Raises FatalError."""
    began_s = time.monotonic()
    load = _Load(server, reference, num_requests, progress)
    evidence: Facts = {"requests": num_requests, "at once": LOAD_CONCURRENCY}
    problems, carried = [], None
    if cluster is None:
        await load.run()
    else:
        octets, num_bytes, num_remote = read_octets(), await _received_bytes(cluster), await _num_remote(cluster)
        forgetting = asyncio.create_task(_forget_often(cluster))
        try:
            await load.run()
        finally:
            await end_tasks([forgetting])
        evidence["hand-offs"] = await _num_remote(cluster) - num_remote
        try:
            evidence["s until all blocks were free"] = round(await cluster.until_idle(1, IDLE_S), 2)
        except FatalError as exc:
            problems.append(f"blocks were left in use: {exc.message}")
        num_bytes = await _received_bytes(cluster) - num_bytes
        carried = Evidence(num_bytes, read_octets().since(octets)) if num_bytes else None
    verdict, reason = judge_answers(load.compared, reference.noise)
    if load.errors:
        problems.append(f"{len(load.errors)} requests failed: {load.errors[0]}")
    if problems:
        verdict, reason = Verdict.FAIL, "; ".join([*problems, reason])
    evidence |= {"whole": len(load.answers), "left": num_requests - len(load.answers) - len(load.errors)}
    title, seconds = "answers under load, with cancellations", time.monotonic() - began_s
    return Row(Group.RIGHT, title, cell, verdict, reason, evidence, seconds=seconds), carried


class _Load:
    """Prompts of the reference in a drawn order, many at once; some clients leave."""

    def __init__(self, server: Server, reference: Reference, num_requests: int, progress: Progress) -> None:
        draw = random.Random(0)
        self._server, self._reference, self._progress = server, reference, progress
        self._order = [draw.randrange(len(reference.prompts)) for _ in range(num_requests)]
        self._leaves_s = {at: draw.uniform(0.0, 0.3) for at in range(num_requests) if draw.random() < CANCEL_SHARE}
        self._slots = asyncio.Semaphore(LOAD_CONCURRENCY)
        self.answers: dict[int, Answer] = {}
        self.errors: list[str] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for at in range(len(self._order)):
                group.create_task(self._one(at))

    async def _one(self, at: int) -> None:
        async with self._slots:
            try:
                async with asyncio.timeout(self._leaves_s.get(at)):
                    self.answers[at] = await self._server.answer(self._reference.prompts[self._order[at]], NUM_TOKENS)
            except TimeoutError:
                pass  # this client has left
            except BenchError as exc:
                self.errors.append(exc.message)
            self._progress(len(self.answers) / len(self._order))

    @property
    def compared(self) -> Comparison:
        """The whole answers beside those of the engine alone."""
        whole = sorted(self.answers)
        ours = [self._reference.alone[self._order[at]] for at in whole]
        return compare(ours, [self.answers[at] for at in whole], self._reference.tie)


async def _forget_often(cluster: Cluster) -> None:
    """The prompts come again and again: without this, caches would have most of their KV."""
    while True:
        await asyncio.sleep(FORGET_S)
        with suppress(KvrelayError):  # it is busy; the next time will do
            await cluster.forget()


async def _received_bytes(cluster: Cluster) -> int:
    return sum(int(status["decode"]["num_received_bytes"]) for status in await cluster.workers())


def way_row(
    cell: str,
    carried: Evidence | None,
    ucx_logs: Sequence[Path],
    transport: str,
    *,
    has_rdma: bool,
    is_alone: bool = True,
) -> Row:
    """Which way the KV of hand-offs took. ``carried``: None if an engine's own connector moved it, whose bytes nobody
    counts. ``ucx_logs``: of processes that have ended."""
    used: dict[str, int] = {}
    for log in ucx_logs:
        for name, count in read_ucx(log.read_text(encoding="utf-8", errors="replace")).items():
            used[name] = used.get(name, 0) + count
    title = "which transport carried the bytes"
    if carried is None:
        verdict, reason = judge_operations(used)
        return Row(Group.FAST, title, cell, verdict, reason)
    carried = msgspec.structs.replace(carried, ucx=used)
    verdict, reason = judge_way(carried, is_same_host=True, has_rdma=has_rdma, transport=transport, is_alone=is_alone)
    evidence: Facts = {"bytes": carried.num_bytes, "way": carried.way.value, "counters": carried.shown}
    return Row(Group.FAST, title, cell, verdict, reason, evidence)


# -- Fast -------------------------------------------------------------------------------------------------------------


async def measure_first_tokens(
    server: Server,
    cluster: Cluster | None,
    alone: Server | None,
    cell: str,
    lengths: Sequence[int],
    num_rounds: int,
    progress: Progress,
    vocab_size: int,
    path_bytes_per_s: float = 0.0,
    bytes_per_token: int = 0,
) -> Row:
    """A lone prompt's first token with a hand-off and without, in turns: at the same workers if they are ours, else at
    the reference server ``alone``. Raises KvrelayError."""
    began_s, draw = time.monotonic(), random.Random(cell)  # prompts that no cache has
    tokens = range(16, min(vocab_size, 500))
    times: dict[str, dict[int, list[float]]] = {"remote": {}, "local": {}}
    for number in range(num_rounds):
        for place in ("remote", "local") if number % 2 else ("local", "remote"):
            asked = server
            if cluster is not None:
                is_local = place == "local"
                await cluster.set(disagg_policy="threshold" if is_local else "always", max_local_prefill_length=10**6)
            elif place == "local" and alone is not None:
                asked = alone
            for length in lengths:
                record = await asked.stream(tuple(draw.choices(tokens, k=length)), 2)
                assert record.ttft_s is not None
                times[place].setdefault(length, []).append(record.ttft_s)
        progress((number + 1) / num_rounds)
    if cluster is not None:
        await cluster.set(disagg_policy="always")
    points = {place: [(float(at), statistics.median(got)) for at, got in of.items()] for place, of in times.items()}
    length, remote_s, local_s = lengths[-1], points["remote"][-1][1], points["local"][-1][1]
    ratio, added_s = remote_s / local_s, max(0.0, remote_s - local_s)
    reason = f"of {length:,} tokens after {remote_s * 1e3:.1f} ms with a hand-off, {local_s * 1e3:.1f} ms without: "
    reason += f"{ratio:.2f} times"
    evidence: Facts = {"remote over local": round(ratio, 3), "rounds": num_rounds}
    if path_bytes_per_s and bytes_per_token:
        alone_s = length * bytes_per_token / path_bytes_per_s
        hidden = max(0.0, 1.0 - added_s / alone_s)
        reason += f"; the KV alone would take {alone_s * 1e3:.2f} ms, of which compute hides {hidden:.0%}"
        evidence["hidden share of the transfer"] = round(hidden, 3)
    verdict = Verdict.PASS if ratio <= MAX_FIRST_TOKEN_RATIO else Verdict.WARN
    series = tuple(Series("first token", f"{place} ({cell})", tuple(line)) for place, line in points.items())
    title, seconds = "first token, remote over local", time.monotonic() - began_s
    return Row(Group.FAST, title, cell, verdict, reason, evidence, series, seconds)


def failed_row(group: Group, title: str, cell: str, error: KvrelayError | OSError) -> Row:
    """A row that could not be taken at all: that is a failure, not a gap."""
    return Row(group, title, cell, Verdict.FAIL, f"could not be tried: {error}")
