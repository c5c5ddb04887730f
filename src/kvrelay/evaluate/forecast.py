"""What is simulated with the measured costs: the search for the best cluster of the slots, and single clusters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.load import fitted
from kvrelay.evaluate.workbench import Workbench
from kvrelay.simulate.advise import Advice, advise
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.loads import generated_arrivals
from kvrelay.simulate.pool import num_processes_for, runner
from kvrelay.simulate.trial import Candidate, Outcome, Setting, Trial

SEARCH_S, TRIAL_S = 0.11, 0.004
"""Guesses of what the search and one simulation take for each request of the load."""
MAX_LATE = 1e9
"""JSON has no infinity."""


def seconds_for(bench: Workbench, num: int) -> float:
    """Of so many simulations."""
    return num * TRIAL_S * len(bench.load.arrivals)


def advised(bench: Workbench, basis: Basis) -> Advice:
    """The search over all clusters of the slots. Raises InvalidInputError if none meets the objectives."""
    made_from = basis.costs, bench.options.objectives, bench.options.load_text
    found = bench.journal.take("advice", lambda: _advise(bench, basis), made_from)
    return msgspec.convert(found, Advice, strict=False)


def _advise(bench: Workbench, basis: Basis) -> Advice:
    options, load = bench.options, bench.load

    def load_of_seed(seed: int) -> Sequence[Arrival]:
        assert options.load_spec is not None
        return fitted(generated_arrivals(options.load_spec, seed), load.vocab_size, load.context).arrivals

    with bench.bar.part(f"simulation: clusters of {options.slots} slots", SEARCH_S * len(load.arrivals)):
        bench.bar.stage("", 1.0)
        found = advise(
            load.arrivals,
            basis.costs,
            options.slots,
            options.objectives,
            seed=options.seed,
            load_of_seed=None if options.load_spec is None else load_of_seed,
            num_processes=num_processes_for(0),
            on_progress=lambda share, candidate: bench.bar.update(share, str(candidate)),
        )
    table = tuple(msgspec.structs.replace(row, outcome=_finite(row.outcome)) for row in found.table)
    return msgspec.structs.replace(found, table=table)


def outcomes(
    bench: Workbench, basis: Basis, name: str, candidates: Sequence[Candidate], factors: Sequence[float]
) -> list[tuple[Candidate, float, Outcome]]:
    """Each candidate under the load at each multiple of its rate; ``name``: for journal and bar."""

    def simulated() -> list[Any]:
        setting = Setting(((bench.options.seed, bench.load.arrivals),), basis.costs, bench.options.objectives)
        pairs = list(itertools.product(candidates, factors))
        found: dict[tuple[Candidate, float], Outcome] = {}
        seconds = seconds_for(bench, len(pairs))
        with bench.bar.part(f"simulation: {name}", seconds), runner(setting, num_processes_for(0)) as runs:
            for candidate, factor in pairs:
                runs.submit(Trial(candidate, len(bench.load.arrivals), factor))
            bench.bar.stage("", len(pairs))
            for trial, outcome in runs.results():
                found[trial.candidate, trial.factor] = _finite(msgspec.structs.replace(outcome, ttft_sample_ms=()))
                bench.bar.update(len(found), str(trial.candidate))
        return [(*pair, found[pair]) for pair in pairs]

    found = bench.journal.take(name, simulated, (basis.costs, bench.options.load_text, candidates, factors))
    return msgspec.convert(found, list[tuple[Candidate, float, Outcome]])


def _finite(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(outcome, late=min(outcome.late, MAX_LATE))
