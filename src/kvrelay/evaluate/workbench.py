"""Measured cases: servers of this machine, one at a time, each under the load at several points.

Cases take turns: each once a round, every other round backwards, so that a drift of the machine affects all alike. A
case that fails is noted in its rows, and the others continue.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.bench.cases import turns_of
from kvrelay.bench.client.connection import ConnectionPool, parse_target
from kvrelay.bench.client.driver import LoadDriver, RunLimits, warm_up
from kvrelay.bench.client.service import first_model
from kvrelay.bench.client.stream import BodyOptions
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import INTERRUPTED, RunInfo, RunResult, ServeReport, figure, serve_report
from kvrelay.bench.serving import require_success
from kvrelay.certify.machine import watched
from kvrelay.certify.servers import Cluster, running_cluster
from kvrelay.cli.processes import run_async
from kvrelay.config import WorkerRole
from kvrelay.errors import KvrelayError
from kvrelay.evaluate.journal import Journal
from kvrelay.evaluate.load import EvaluatedLoad, Point, answered_per_s, sent_of
from kvrelay.evaluate.options import EvaluateOptions
from kvrelay.launch.frontend_calls import listed_requests, request_waterfall
from kvrelay.marks.waterfall import Waterfall, phases_until

DRAIN_S = 30.0
START_S = 6.0
"""A guess of a server's start, for the bar."""
POINT_S = 1.5
"""And of what a point takes besides sending."""
NUM_WARM = 4
MAX_WATERFALLS = 100
UNATTRIBUTED = "unattributed"
FIGURES = {
    "tokens_per_s": "output_tokens_per_s",
    **{
        f"{name}_{p}_s": f"{of}.{path}"
        for name, of in (("ttft", "ttft_s"), ("itl", "itl_s"), ("gap", "gap_s"), ("e2e", "e2e_s"))
        for p, path in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
    },
    "tpot_p50_s": "tpot_s.median",
    "goodput": "goodput.share",
    "good_per_s": "goodput.requests_per_s",
}
"""Figures of a row: these of the report of a run."""


class ServerCase(msgspec.Struct, frozen=True):
    """A server: its name, the flags of ``kvrelay serve`` that make it what it is, and the roles (old, new) that one
    worker after the other changes once it runs."""

    name: str
    flags: tuple[str, ...]
    roles: tuple[tuple[WorkerRole, WorkerRole], ...] = ()


SPLIT = ServerCase("1P1D", ("--prefill", "1", "--decode", "1"))
REPLICAS = ServerCase("two replicas", ("--prefill", "0", "--decode", "2"))
ONE = ServerCase("one worker", ("--prefill", "0", "--decode", "1"))
TWO_RANKS = ServerCase("TP 2", ("--prefill", "0", "--decode", "1", "--tp", "2"))


class PartBar(ProgressBar):
    """The evaluation's one bar: seconds that are planned and done, and what runs now."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._done_s = self._part_s = 0.0
        self._what, self._total = "", 1.0

    def plan(self, seconds: float) -> None:
        """All that will be done, before the first part."""
        self._bar.stage("evaluate", seconds)

    def reach(self, seconds: float) -> None:
        """So much of the plan is done, taken now or by an earlier run."""
        self._done_s = seconds

    @contextmanager
    def part(self, what: str, seconds: float) -> Iterator[None]:
        """``what`` runs now, and was planned to take so long."""
        self._what, self._part_s, self._total = what, seconds, 1.0
        self._bar.update(self._done_s, what)
        yield
        self._done_s += seconds

    def stage(self, name: str, total: float | None = None) -> None:
        """Of the part that runs now."""
        self._total = total or 0.0

    def update(self, completed: float, note: str = "") -> None:
        share = min(completed / self._total, 1.0) if self._total else 0.0
        self._bar.update(self._done_s + share * self._part_s, f"{self._what}, {note}")


class Workbench:
    """Takes cases, once each: what the journal has is not taken again."""

    def __init__(self, options: EvaluateOptions, load: EvaluatedLoad, journal: Journal, bar: PartBar) -> None:
        self.options, self.load, self.journal, self.bar = options, load, journal, bar

    @property
    def flags(self) -> tuple[str, ...]:
        """Of every server."""
        options = self.options
        return (
            *(str(options.model_path), "--engine", options.engine, "--served-model-name", "evaluated"),
            *("--slo-ttft-ms", f"{options.slo_ttft_ms:g}", "--slo-itl-ms", f"{options.slo_itl_ms:g}"),
            *options.serve_flags,
        )

    def log(self, name: str) -> Path:
        """Of a server."""
        return self.options.output / "logs" / f"{name}.log".replace(" ", "-")

    def rows(self, section: str, cases: Sequence[ServerCase], points: Sequence[Point]) -> list[dict[str, Any]]:
        """One row for each case, round and point."""
        rounds = self.options.sizes.rounds
        for number, case in turns_of(cases, rounds):
            missing = [point for point in points if _key(section, case, point, number) not in self.journal]
            if missing:
                run_async(self._turn(section, case, number, missing))
        return [
            self.journal[_key(section, case, point, number)]
            for number in range(1, rounds + 1)
            for case in cases
            for point in points
        ]

    def seconds_for(self, num_cases: int, num_points: int) -> float:
        """What ``rows`` takes, more or less."""
        return self.options.sizes.rounds * num_cases * (START_S + num_points * (self.options.sizes.seconds + POINT_S))

    async def _turn(self, section: str, case: ServerCase, number: int, points: Sequence[Point]) -> None:
        log = self.log(f"{section}-{case.name}-{number}")
        # Points take turns, too.
        left = list(points[:: 1 if number % 2 else -1])

        def note(row: dict[str, Any]) -> None:
            point = left.pop(0)
            name, at = point.shown or (case.name, point.name)
            about = {"case": name, "point": at, "round": number, "error": ""}
            self.journal.add(_key(section, case, point, number), about | row)

        what = f"{section}: {case.name}, round {number}"
        try:
            async with AsyncExitStack() as stack:
                with self.bar.part(f"{what}, starting", START_S):
                    cluster = await stack.enter_async_context(running_cluster([*self.flags, *case.flags], log))
                    for old, new in case.roles:
                        await cluster.change_role(old, new)
                while left:
                    with self.bar.part(f"{what}, {left[0].name}", self.options.sizes.seconds + POINT_S):
                        note(await self.measure(cluster, left[0], salt_of(section, left[0].name, number), number))
        except KvrelayError as exc:
            while left:
                note({"error": exc.message})

    async def measure(self, cluster: Cluster, point: Point, salt: int, number: int) -> dict[str, Any]:
        """The figures of the load at this point. Raises BenchError, FatalError."""
        if point.settings:
            await cluster.set(**point.settings)
        before = places_of(await cluster.workers())
        with watched() as watch:
            report, result = await self.run(cluster.url, point, salt, number)
        places, sent = places_of(await cluster.workers()) - before, sent_of(result.records)
        return {
            **{name: figure(report.total, path) for name, path in FIGURES.items()},
            "num": report.total.successful,
            "failed": report.total.failed,
            "remote": places["remote"] / max(places.total(), 1),
            "foreign_cores": watch.foreign_cores,
            "rate": point.rate,
            "concurrency": point.concurrency,
            "requests_per_s": answered_per_s(sent),
            "records": sent,
            "phases": await first_token_phases(cluster.url, len(sent)) if point.has_phases else {},
        }

    async def run(self, url: str, point: Point, salt: int, number: int = 0) -> tuple[ServeReport, RunResult]:
        """One measured run, after a short warm-up. Raises BenchError."""
        options = self.options
        pool = ConnectionPool(parse_target(url, None, point.order))
        try:
            body = BodyOptions(await first_model(pool))
            await warm_up(pool, body, self.load.at(Point("warm-up"), salt + 1), NUM_WARM, NUM_WARM)
            limits = RunLimits(options.sizes.seconds, DRAIN_S)
            result = await LoadDriver(pool, body, limits, self.bar).run((self.load.at(point, salt, number),))
        finally:
            await pool.close()
        if result.note == INTERRUPTED:
            raise asyncio.CancelledError
        info = RunInfo(options.engine, url, body.model, body.endpoint.value, options.command, "")
        report = serve_report(info, result, [], options.slo)
        require_success(report)
        return report, result


def salt_of(section: str, point: str, number: int) -> int:
    """Of a point's prompts in a round: the same for all servers, so that they get the same."""
    return zlib.crc32(f"{section} {point} {number}".encode())


async def first_token_phases(url: str, num_requests: int) -> dict[str, float]:
    """Mean seconds by phase of ``kvrelay waterfall`` until the first token, over the latest so many requests with a
    remote prefill. Raises KvrelayError."""
    found: list[dict[str, float]] = []
    for line in await listed_requests(url, max(min(num_requests, MAX_WATERFALLS), 1), "recent"):
        if line["place"] == "remote" and line["ttft_ms"] is not None:
            one = msgspec.convert(await request_waterfall(url, line["id"]), Waterfall)
            phases = phases_until(one.spans, line["ttft_ms"])
            found.append(phases | {UNATTRIBUTED: max(line["ttft_ms"] - sum(phases.values()), 0.0)})
    names = dict.fromkeys(name for phases in found for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in found) / len(found) / 1e3 for name in names}


def places_of(workers: Sequence[dict[str, Any]]) -> Counter[str]:
    """Where prefills ran since the workers' start, by place and reason."""
    return sum((Counter(worker["decode"]["places"]) for worker in workers), Counter[str]())


def _key(section: str, case: ServerCase, point: Point, number: int) -> str:
    return f"{section} / {case.name} / {point.name} / {number}"
