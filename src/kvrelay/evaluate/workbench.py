"""Measured cases: servers of this machine, one at a time, each under the load at several points.

Cases take turns: each once a round, every other round backwards, so that a drift of the machine affects all alike; if
the plan has no time for so many starts, a case does all its rounds in one. A case that fails, or for which there is no
time, is noted in its rows, and the others continue.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.bench.cases import turns_of
from kvrelay.bench.client.connection import ConnectionPool, parse_target
from kvrelay.bench.client.driver import LoadDriver, RunLimits, warm_up
from kvrelay.bench.client.service import first_model
from kvrelay.bench.client.stream import BodyOptions
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import FIGURES, INTERRUPTED, RunInfo, RunResult, ServeReport, figure, serve_report
from kvrelay.bench.serving import require_success
from kvrelay.certify.machine import cpu_seconds, watched
from kvrelay.certify.servers import Cluster, NotStartedError, running_cluster
from kvrelay.cli.processes import run_async
from kvrelay.config import WorkerRole
from kvrelay.errors import FatalError, KvrelayError
from kvrelay.evaluate.journal import Journal
from kvrelay.evaluate.load import EvaluatedLoad, Point, answered_per_s, sent_of
from kvrelay.evaluate.options import EvaluateOptions
from kvrelay.evaluate.plan import MIN_REQUESTS, WARM_TOKENS, Pace, Plan, Wish
from kvrelay.launch.frontend_calls import listed_requests, request_waterfall
from kvrelay.marks.waterfall import Waterfall, phases_until

MIN_DRAIN_S = 10.0
"""For answers that are under way at the end of the sending, besides the time of the sending and of two alone."""
START_S = 8.0
"""A guess of a server's start and end, until one was measured."""
NO_TIME = "no time was left"
NUM_WARM = 4
MAX_WATERFALLS = 100
UNATTRIBUTED = "unattributed"


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

    def plan(self, name: str, seconds: float) -> None:
        """All that will be done, before the first part."""
        self._bar.stage(name, seconds)
        self._done_s = 0.0

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
    """Takes cases, once each: what the journal has is not taken again. ``load`` is simulated; ``sent``, which may have
    shorter requests, is sent. Nothing is begun that would not end by ``ends_s``, by the monotonic clock. ``plan`` and
    ``pace``: of what is measured after the calibration."""

    plan = Plan()
    pace = Pace(START_S, 1.0, 1.0, 1.0)

    def __init__(self, options: EvaluateOptions, load: EvaluatedLoad, journal: Journal, bar: PartBar) -> None:
        self.options, self.load, self.journal, self.bar = options, load, journal, bar
        self.sent, self.ends_s = load, time.monotonic() + options.sizes.budget_s

    def calibrated(self, options: EvaluateOptions, load: EvaluatedLoad, shortened: int, pace: Pace) -> Workbench:
        """The same with what the calibration has decided."""
        other = copy(self)
        other.options, other.pace = options, pace
        other.load, other.sent = load, load.shortened(shortened)
        return other

    def with_plan(self, plan: Plan) -> Workbench:
        other = copy(self)
        other.plan = plan
        return other

    @property
    def left_s(self) -> float:
        """Of the budget of time."""
        return self.ends_s - time.monotonic()

    @property
    def flags(self) -> tuple[str, ...]:
        """Of every server."""
        options = self.options
        return (
            *(str(options.model_path), "--served-model-name", "evaluated"),
            *("--slo-ttft-ms", f"{options.slo_ttft_ms:g}", "--slo-itl-ms", f"{options.slo_itl_ms:g}"),
            *options.serve_words,
        )

    def log(self, name: str) -> Path:
        """Of a server."""
        return self.options.output / "logs" / f"{name}.log".replace(" ", "-")

    def rows(self, section: str, cases: Sequence[ServerCase], points: Sequence[Point]) -> list[dict[str, Any]]:
        """One row for each case, round and point."""
        rounds = range(1, self.options.sizes.rounds + 1)
        # What an earlier run has begun has as many requests in all its rounds.
        begun = {_point_of(key): self.journal[key]["asked"] for key in self._rows_of(section)}
        requests = self.plan.requests_of(section) | begun
        turns = [(case, [number]) for number, case in turns_of(cases, len(rounds))]
        for case, numbers in [(case, list(rounds)) for case in cases] if self.plan.is_held else turns:
            # Points take turns, too.
            steps = [(number, point) for number in numbers for point in points[:: 1 if number % 2 else -1]]
            missing = [
                (number, point)
                for number, point in steps
                if point.name in requests and _key(section, case, point, number) not in self.journal
            ]
            if missing:
                run_async(self._turn(section, case, missing, requests))
        return [
            self.journal[_key(section, case, point, number)]
            if point.name in requests
            else _about(case, point, number, f"{NO_TIME} for it in the plan")
            for number in rounds
            for case in cases
            for point in points
        ]

    def rest_of(self, wish: Wish) -> Wish:
        """Without the points that have been measured in all rounds."""
        done = Counter(map(_point_of, self._rows_of(wish.section)))
        all_rows = wish.num_cases * self.options.sizes.rounds
        return msgspec.structs.replace(wish, points=tuple(one for one in wish.points if done[one.name] < all_rows))

    def _rows_of(self, section: str) -> list[str]:
        return [key for key in self.journal if key.startswith(f"{section} / ")]

    async def _turn(
        self, section: str, case: ServerCase, left: list[tuple[int, Point]], requests: Mapping[str, int]
    ) -> None:
        """A server from its start to its end, with these rounds' points."""
        log = self.log(f"{section}-{case.name}-{left[0][0]}")

        def note(row: dict[str, Any]) -> None:
            number, point = left.pop(0)
            asked = {"asked": requests[point.name]}
            self.journal.add(_key(section, case, point, number), _about(case, point, number) | asked | row)

        try:
            async with AsyncExitStack() as stack:
                with self._part(f"{section}: {case.name}, starting", self.pace.start_s):
                    cluster = await stack.enter_async_context(running_cluster([*self.flags, *case.flags], log))
                    for old, new in case.roles:
                        await cluster.change_role(old, new)
                while left:
                    number, point = left[0]
                    num = requests[point.name]
                    what = f"{section}: {case.name}, round {number}, {point.name}, {num} requests"
                    with self._part(what, self.pace.point_s(point, num)):
                        note(await self.measure(cluster, point, salt_of(section, point.name, number), number, num))
        except KvrelayError as exc:
            while left:
                note({"error": why_of(exc)})

    @contextmanager
    def _part(self, what: str, seconds: float) -> Iterator[None]:
        """Raises FatalError if there is no time for it."""
        if seconds > self.left_s:
            raise FatalError(NO_TIME)
        with self.bar.part(what, seconds):
            yield

    async def measure(self, cluster: Cluster, point: Point, salt: int, number: int, num: int) -> dict[str, Any]:
        """The figures of ``num`` requests at this point. Raises BenchError, FatalError."""
        if point.idle_s:
            return {"idle_cores": await idle_cores(cluster.pid, point.idle_s)}
        if point.settings:
            await cluster.set(**point.settings)
        before = places_of(await cluster.workers())
        with watched() as watch:
            report, result = await self.run(cluster.url, point, salt, num, number)
        places, sent = places_of(await cluster.workers()) - before, sent_of(result.records)
        too_few = f"{len(sent)} of {num} requests were answered, which is too few to tell anything"
        return {
            "error": too_few if len(sent) < min(MIN_REQUESTS, num) else "",
            **{name: figure(report.total, path) for name, path in FIGURES.items()},
            "tokens_per_s": report.total.output_tokens_per_s,
            "num": report.total.successful,
            "failed": report.total.failed,
            "unanswered": num - len(sent),
            "remote": places["remote"] / max(places.total(), 1),
            "foreign_cores": watch.foreign_cores,
            "stolen_cores": watch.stolen_cores,
            "rate": point.rate,
            "concurrency": point.concurrency,
            "requests_per_s": answered_per_s(sent),
            "records": sent,
            "phases": await first_token_phases(cluster.url, len(sent)) if point.has_phases else {},
        }

    async def run(self, url: str, point: Point, salt: int, num: int, number: int = 0) -> tuple[ServeReport, RunResult]:
        """One measured run of ``num`` requests, after a short warm-up; a server that is much slower than 1P1D is cut
        off. Raises BenchError."""
        options = self.options
        async with ConnectionPool(parse_target(url, None, point.order)) as pool:
            body = BodyOptions(await first_model(pool))
            brief = self.sent.shortened(1, WARM_TOKENS)
            await warm_up(pool, body, brief.at(Point("warm-up"), salt + 1, NUM_WARM), NUM_WARM, NUM_WARM)
            send_s = (num + 1) / self.pace.rate_of(point)
            limits = RunLimits(send_s, send_s + 2 * self.pace.alone_s + MIN_DRAIN_S)
            result = await LoadDriver(pool, body, limits, self.bar).run((self.sent.at(point, salt, num, number),))
        if result.note == INTERRUPTED:
            raise asyncio.CancelledError
        info = RunInfo(options.engine, url, body.model, body.endpoint.value, options.command, "")
        report = serve_report(info, result, [], options.slo)
        require_success(report)
        return report, result


def why_of(error: KvrelayError) -> str:
    """For a row of the report."""
    return error.why if isinstance(error, NotStartedError) else error.message


async def idle_cores(pid: int, seconds: float) -> float:
    """CPU seconds of the process and all below it in a second."""
    began_s, before_s = time.monotonic(), cpu_seconds(pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - before_s) / (time.monotonic() - began_s)


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


def _about(case: ServerCase, point: Point, number: int, error: str = "") -> dict[str, Any]:
    """What each row has."""
    name, at = point.shown or (case.name, point.name)
    return {"case": name, "point": at, "round": number, "error": error}


def _key(section: str, case: ServerCase, point: Point, number: int) -> str:
    return f"{section} / {case.name} / {point.name} / {number}"


def _point_of(key: str) -> str:
    return key.split(" / ")[-2]
