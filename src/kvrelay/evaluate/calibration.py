"""The costs of this machine, measured once, and the rate from which all measured rates are shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from kvrelay.bench.client.connection import ConnectionPool, Target, parse_target
from kvrelay.bench.client.service import first_model
from kvrelay.bench.report.machine import describe_machine
from kvrelay.certify.servers import running_cluster
from kvrelay.cli.processes import run_async
from kvrelay.errors import FatalError, KvrelayError
from kvrelay.evaluate.load import Point, answered_per_s, sent_of
from kvrelay.evaluate.plan import Pace, Wish, pace_of, plan_of
from kvrelay.evaluate.workbench import NO_TIME, SPLIT, START_S, TWO_RANKS, ServerCase, Workbench, why_of
from kvrelay.simulate.calibrate_command import calibrate
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.probe import frontend_sender

CLIENTS = 16
"""Of the closed loop whose rate is the capacity."""
LENGTHS = (64, 1024)
SHORTENED = (1, 2, 4, 8)
"""How many times requests may be shortened, so that slow models answer enough of them."""
POINTS_SHARE = 2 / 3
"""Of the budget of time, for all that is not a start."""
STREAMS_SHARE, STREAMS = 0.1, 8
"""Of the budget of time, for streams that tell costs; so many for each that is counted, those at once included."""
TWO_RANKS_SHARE = 0.1
"""If 1P1D's calibration took more of the budget, there is none of two ranks."""
STREAM_S = 0.6
"""A guess, for the bar."""
_LINK = ("token_bytes", "link_bytes_per_s", "transfer_overhead_s", "queue_hop_s", "frontend_request_s")


class Basis(msgspec.Struct, frozen=True):
    """``costs``: by ranks of a worker. ``pace``: of the requests that are sent, which are ``shortened`` so many times.
    ``not_measured``: costs that keep their defaults. ``refused``: why there is no worker of two ranks."""

    costs: dict[int, Costs]
    pace: Pace
    shortened: int = 1
    not_measured: tuple[str, ...] = ()
    refused: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        ranks = f"Workers of two ranks are neither measured nor simulated: {self.refused}"
        defaults = f"Not measured, so the simulator's defaults are used: {', '.join(self.not_measured)}."
        return (*((defaults,) if self.not_measured else ()), *((ranks,) if self.refused else ()))

    @property
    def capacity(self) -> float:
        """Of 1P1D, in requests/s of the load as it is, more or less."""
        return self.pace.per_s / self.shortened

    def rate(self, share: float) -> float:
        """A share of what 1P1D does with CLIENTS clients, rounded so that it can be named."""
        return float(f"{share * self.pace.per_s:.3g}")

    def at(self, share: float, **how: Any) -> Point:
        """The load at that share."""
        return Point(f"{self.rate(share):g} requests/s", rate=self.rate(share), **how)


def seconds_for(bench: Workbench) -> float:
    """A guess, for the bar."""
    return 2 * (START_S + 4 * bench.options.sizes.streams * STREAM_S) + bench.options.sizes.seconds


def basis_of(bench: Workbench, wishes_of: Callable[[Basis], Sequence[Wish]]) -> Basis:
    """``wishes_of``: what will be measured. Raises KvrelayError if 1P1D cannot be calibrated; without costs of TP 2
    only one rank is simulated."""

    def shortened(costs: Costs) -> int:
        """As few times as all of it fits into that share of the budget, with the fewest requests and without starts."""
        for times in SHORTENED:
            pace = pace_of(costs, bench.load.shortened(times), 0.0)
            wishes = wishes_of(Basis({1: costs}, pace, times))
            if plan_of(
                wishes, pace, bench.options.sizes.rounds, 0.0, POINTS_SHARE * bench.options.sizes.budget_s
            ).is_whole:
                break
        return times

    key = f"calibration / {SPLIT.name}"
    split = bench.journal.take(key, lambda: run_async(_calibrated(bench, SPLIT, shortened)))
    costs, times = {1: msgspec.convert(split["costs"], Costs)}, split["shortened"]
    ranks = bench.journal.take(
        f"calibration / {TWO_RANKS.name}", lambda: _two_ranks(bench, split["start_s"], split["seconds"])
    )
    if not ranks["error"]:
        # One aggregated worker shows no hand-off.
        link = {name: getattr(costs[1], name) for name in _LINK}
        costs[2] = msgspec.structs.replace(msgspec.convert(ranks["costs"], Costs), **link)
    pace = pace_of(costs[1], bench.load.shortened(times), split["start_s"], split["per_s"])
    return Basis(costs, pace, times, tuple(split["not_measured"]), ranks["error"])


def _two_ranks(bench: Workbench, start_s: float, seconds: float) -> dict[str, Any]:
    """``start_s`` and ``seconds``: what start and calibration of 1P1D took. A server that refuses two ranks does so at
    its start, so that is tried if only the calibration takes too long."""
    most_s = TWO_RANKS_SHARE * bench.options.sizes.budget_s
    try:
        if start_s > most_s:
            raise FatalError(NO_TIME)
        return run_async(_calibrated(bench, TWO_RANKS, lambda costs: 1, has_time=seconds <= most_s))
    except KvrelayError as exc:
        return {"error": why_of(exc)}


async def _calibrated(
    bench: Workbench, case: ServerCase, shortened: Callable[[Costs], int], *, has_time: bool = True
) -> dict[str, Any]:
    options, what, began_s = bench.options, f"calibration: {case.name}", time.monotonic()
    longest = min(LENGTHS[1], bench.load.context // 2)
    lengths = (min(LENGTHS[0], longest // 2), longest)
    found: dict[str, Any] = {"error": ""}
    async with AsyncExitStack() as stack:
        with bench.bar.part(f"{what}, starting", START_S):
            flags, log = [*bench.flags, *case.flags], bench.log(f"calibration-{case.name}")
            cluster = await stack.enter_async_context(running_cluster(flags, log))
        start_s = time.monotonic() - began_s
        if not has_time:
            raise FatalError(NO_TIME)
        target = parse_target(cluster.url)
        streams = min(options.sizes.streams, await _streams_within(target, longest, options.sizes.budget_s))
        with bench.bar.part(f"{what}, {streams} streams of each kind", 4 * streams * STREAM_S):
            calibrated = await calibrate(cluster.control, target, describe_machine(), lengths, streams, options.seed)
        costs = calibrated.costs
        found |= {"costs": costs, "not_measured": calibrated.not_measured, "streams": streams}
        if case == SPLIT:
            found["shortened"] = times = shortened(costs)
            own = bench.calibrated(options, bench.load, times, pace_of(costs, bench.load.shortened(times), start_s))
            point = Point("capacity", concurrency=CLIENTS)
            num = own.pace.num_at(point, options.sizes.seconds) + CLIENTS // 2
            with bench.bar.part(f"{what}, {CLIENTS} clients", own.pace.point_s(point, num)):
                _, result = await own.run(cluster.url, point, options.seed, num)
            found["per_s"] = answered_per_s(sent_of(result.records))
        end_s = time.monotonic()
    seconds = time.monotonic() - began_s
    return found | {"start_s": start_s + time.monotonic() - end_s, "seconds": seconds}


async def _streams_within(target: Target, length: int, budget_s: float) -> int:
    """How many streams of each kind the calibration's share of the time has room for, by one of them."""
    async with ConnectionPool(target) as pool:
        send = frontend_sender(pool, await first_model(pool))
        for first in range(2):
            began_s = time.monotonic()
            await send([first + 32] * length)
        stream_s = time.monotonic() - began_s
    return max(int(STREAMS_SHARE * budget_s / (STREAMS * stream_s)), 2)
