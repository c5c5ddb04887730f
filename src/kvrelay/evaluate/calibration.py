"""The costs of this machine, measured once, and the rate from which all measured rates are shares."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import msgspec

from kvrelay.bench.client.connection import parse_target
from kvrelay.bench.report.machine import describe_machine
from kvrelay.certify.servers import running_cluster
from kvrelay.cli.processes import run_async
from kvrelay.errors import KvrelayError
from kvrelay.evaluate.load import Point, answered_per_s, sent_of
from kvrelay.evaluate.workbench import SPLIT, START_S, TWO_RANKS, ServerCase, Workbench
from kvrelay.simulate.calibrate_command import calibrate
from kvrelay.simulate.costs import Costs

CLIENTS = 16
"""Of the closed loop whose rate is the capacity."""
LENGTHS = (64, 1024)
STREAM_S = 0.6
"""A guess, for the bar."""
_LINK = ("token_bytes", "link_bytes_per_s", "transfer_overhead_s", "queue_hop_s", "frontend_request_s")


class Basis(msgspec.Struct, frozen=True):
    """``costs``: by ranks of a worker. ``capacity``: of 1P1D, in requests/s with CLIENTS clients. ``notes``: what keeps
    its default, and what could not be calibrated."""

    costs: dict[int, Costs]
    capacity: float
    notes: tuple[str, ...]

    def rate(self, share: float) -> float:
        """A share of the capacity, rounded so that it can be named."""
        return float(f"{share * self.capacity:.3g}")

    def at(self, share: float, **how: Any) -> Point:
        """The load at that share."""
        return Point(f"{self.rate(share):g} requests/s", rate=self.rate(share), **how)


def seconds_for(bench: Workbench) -> float:
    return 2 * (START_S + 8 * bench.options.sizes.streams * STREAM_S) + bench.options.sizes.seconds


def basis_of(bench: Workbench) -> Basis:
    """Raises KvrelayError if 1P1D cannot be calibrated; without costs of TP 2 only one rank is simulated."""
    split = bench.journal.take(f"calibration / {SPLIT.name}", lambda: run_async(_calibrated(bench, SPLIT)))
    notes = [f"Not measured, so the simulator's defaults are used: {', '.join(split['not_measured'])}."]
    costs = {1: msgspec.convert(split["costs"], Costs)}
    ranks = bench.journal.take(f"calibration / {TWO_RANKS.name}", lambda: _tried(bench, TWO_RANKS))
    if ranks["error"]:
        notes.append(f"Workers of two ranks are not simulated: {ranks['error']}")
    else:
        # One aggregated worker shows no hand-off.
        link = {name: getattr(costs[1], name) for name in _LINK}
        costs[2] = msgspec.structs.replace(msgspec.convert(ranks["costs"], Costs), **link)
    return Basis(costs, split["capacity"], tuple(notes))


def _tried(bench: Workbench, case: ServerCase) -> dict[str, Any]:
    try:
        return run_async(_calibrated(bench, case))
    except KvrelayError as exc:
        return {"error": exc.message}


async def _calibrated(bench: Workbench, case: ServerCase) -> dict[str, Any]:
    options, what = bench.options, f"calibration: {case.name}"
    log = bench.log(f"calibration-{case.name}")
    longest = min(LENGTHS[1], bench.load.context // 2)
    lengths = (min(LENGTHS[0], longest // 2), longest)
    async with AsyncExitStack() as stack:
        with bench.bar.part(f"{what}, starting", START_S):
            cluster = await stack.enter_async_context(running_cluster([*bench.flags, *case.flags], log))
        with bench.bar.part(f"{what}, {options.sizes.streams} streams of each kind", 4 * STREAM_S):
            target = parse_target(cluster.url)
            found = await calibrate(
                cluster.control, target, describe_machine(), lengths, options.sizes.streams, options.seed
            )
        if case != SPLIT:
            return {"error": "", "costs": found.costs}
        with bench.bar.part(f"{what}, {CLIENTS} clients", options.sizes.seconds):
            _, result = await bench.run(cluster.url, Point("capacity", concurrency=CLIENTS), options.seed)
    return {
        "error": "",
        "costs": found.costs,
        "not_measured": found.not_measured,
        "capacity": answered_per_s(sent_of(result.records)),
    }
