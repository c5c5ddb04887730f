"""The planner against static clusters, in virtual time: shifting, constant and bursty loads.

Every figure is a function of the arguments: the simulator reads no clock. Each load runs on every split of the slots
and on a cluster that the planner changes, which begins with half of them in each role.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec

from kvrelay.bench.report.files import write_text
from kvrelay.bench.report.table import Row, results_table
from kvrelay.config import DisaggConfig
from kvrelay.core.step_cost import StepCost
from kvrelay.placement.base import Objectives as Limits
from kvrelay.planner import Objectives
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loads import generated_arrivals
from kvrelay.simulate.planned import PlannedCluster
from kvrelay.simulate.simulation import simulate

SLOW = Costs(step=StepCost(0.02, 0.02, 2e-4, 1e-8, 1e-3, 2e-7), spread=0.03)
"""A slow machine: 50 steps a second at most, so that an hour of it is simulated in a minute."""
FAST = Costs(step=StepCost(0.00689, 0.00689, 3.25e-5, 1.06e-9, 1e-5, 5.22e-8), spread=0.03)
"""The estimate of an H100 with an 8B model, see docs/simulator.md."""
TOLERANCE = 1.25
"""Goodput is counted at so many times the objectives that engines and planner aim at."""

_COLUMNS = {
    "load": "case",
    "best static": "best",
    "worst static": "worst",
    "aggregated": "aggregated:.3f",
    "planner": "planned:.3f",
    "of the best": "of_best:.2f",
    "changes": "num_changes",
}


class Case(msgspec.Struct, frozen=True):
    """A load on ``slots`` workers. ``statics``: the splits to try, by their prefill workers; 0: aggregated."""

    name: str
    arrivals: list[Arrival]
    costs: Costs
    slots: int
    aim: Objectives
    statics: tuple[int, ...]

    @property
    def limits(self) -> Limits:
        return Limits(TOLERANCE * self.aim.ttft_s, TOLERANCE * self.aim.itl_s)

    def spec(self, prefill: int) -> ClusterSpec:
        """With so many prefill workers."""
        disagg = DisaggConfig(slo_ttft_ms=self.aim.ttft_s * 1e3, slo_itl_ms=self.aim.itl_s * 1e3)
        decode = self.slots - prefill if prefill else 0
        return ClusterSpec(prefill=prefill, decode=decode, both=0 if prefill else self.slots, disagg=disagg)


def run(case: Case, seed: int) -> Row:
    """Goodput, 0 to 1, of all splits, of which those with two roles are compared, and of the planner."""
    statics = {}
    for prefill in case.statics:
        spec = case.spec(prefill)
        statics[str(spec)] = simulate(spec, case.arrivals, case.costs, seed=seed).goodput(case.limits)
        click.echo(f"{case.name}: {spec} {statics[str(spec)]:.3f}", err=True)
    aggregated = statics.pop(str(case.spec(0)), 0.0)
    planned = PlannedCluster(case.spec(case.slots // 2), case.arrivals, case.costs, case.aim, seed=seed)
    goodput = planned.run().goodput(case.limits)
    for at_s, action in planned.actions:
        click.echo(f"{case.name}: {at_s:6.0f} s {type(action).__name__} {action.reason}", err=True)
    best, worst = max(statics, key=lambda name: statics[name]), min(statics, key=lambda name: statics[name])
    return {
        "case": case.name,
        "best": f"{statics[best]:.3f} ({best})",
        "worst": f"{statics[worst]:.3f} ({worst})",
        "aggregated": aggregated,
        "planned": goodput,
        "of_best": goodput / max(statics[best], 1e-9),
        "num_changes": len(planned.actions),
    }


def shifting(rate: float, period_s: float, seed: int) -> Case:
    """Long prompts with short answers, then the reverse; at least ten minutes and a whole period."""
    num = round(rate * max(period_s, 600.0))
    load = f"shift:rate={rate},num={num},prompt=2000,answer=200,period={period_s},swing=0.8"
    name = f"shift, {rate:g}/s, period {period_s / 60:g} min"
    return Case(name, generated_arrivals(load, seed), SLOW, 4, Objectives(ttft_s=2.0, itl_s=0.08), (0, 1, 2, 3))


def constant(rate: float, seed: int) -> Case:
    """An hour."""
    arrivals = generated_arrivals(f"poisson:rate={rate},num={round(3600 * rate)},prompt=2000,answer=200", seed)
    return Case(f"constant, {rate:g}/s, an hour", arrivals, SLOW, 4, Objectives(ttft_s=2.0, itl_s=0.08), (2,))


def bursts(seed: int, slots: int = 12, quiet_s: float = 60.0, burst_s: float = 20.0, cycles: int = 4) -> Case:
    """1 request/s and then 24, with prompts of 8,000 tokens and answers of 100."""
    quiet, burst = (
        generated_arrivals(
            f"poisson:rate={rate},num={round(rate * seconds * cycles * 1.5)},prompt=8000,answer=100", seed
        )
        for rate, seconds in ((1.0, quiet_s), (24.0, burst_s))
    )
    arrivals = [*_stretched(quiet, 0.0, quiet_s, quiet_s + burst_s, cycles)]
    arrivals += _stretched(burst, quiet_s, burst_s, quiet_s + burst_s, cycles)
    arrivals.sort(key=lambda arrival: arrival.time_s)
    aim = Objectives(ttft_s=2.0, itl_s=0.025)
    return Case("bursts, 1 to 24/s", arrivals, FAST, slots, aim, (*range(0, slots, 2), slots - 1))


def _stretched(
    arrivals: Sequence[Arrival], begin_s: float, length_s: float, cycle_s: float, cycles: int
) -> Iterable[Arrival]:
    """The arrivals' time runs only in a part of each cycle."""
    for arrival in arrivals:
        cycle, within_s = divmod(arrival.time_s, length_s)
        if cycle < cycles:
            yield msgspec.structs.replace(arrival, time_s=cycle * cycle_s + begin_s + within_s)


@click.command()
@click.option("--only", default="shift,constant,bursts", help="Loads.")
@click.option("--rate", default=2.4, help="Requests per second of shift and constant.")
@click.option("--periods", default="60,300,1800", help="Seconds, of shift.")
@click.option("--seed", default=1, help="Seed of loads and draws.")
@click.option("--output", type=click.Path(path_type=Path), help="File for the table; default: none.")
def planner(only: str, rate: float, periods: str, seed: int, output: Path | None) -> None:
    """Goodput of the planner beside static splits, in virtual time.

    Example: python -m benchmarks planner --only shift --periods 300
    """
    wanted = only.split(",")
    cases = [shifting(rate, float(period), seed) for period in periods.split(",") if "shift" in wanted]
    cases += [constant(rate, seed)] if "constant" in wanted else []
    cases += [bursts(seed)] if "bursts" in wanted else []
    rows: list[Row] = []
    for case in cases:
        rows.append(run(case, seed))
        if output is not None:
            write_text(output, results_table(rows, _COLUMNS, markdown=True))
    click.echo(results_table(rows, _COLUMNS, markdown=True))
