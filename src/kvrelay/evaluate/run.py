"""One evaluation from its options to its report: the plan, and the sections in order."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.files import to_json, write_text
from kvrelay.bench.report.machine import describe_machine
from kvrelay.certify.findings import CertifyReport
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate import calibration, forecast
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.findings import Report, Section
from kvrelay.evaluate.journal import END, Journal
from kvrelay.evaluate.load import EvaluatedLoad, fitted
from kvrelay.evaluate.options import EvaluateOptions, suited, versions
from kvrelay.evaluate.page import page_of
from kvrelay.evaluate.plan import Plan, Wish, plan_of
from kvrelay.evaluate.sections import (
    BY_IMPORTANCE,
    SECTIONS,
    accuracy,
    answer,
    arrangements,
    chunks,
    groups,
    larger,
    link,
    loads,
    policies,
    prefixes,
    ratios,
    sizes,
    spent,
    transfers,
)
from kvrelay.evaluate.workbench import NO_TIME, PartBar, Workbench
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.simulate.loads import load_of

_T = TypeVar("_T")
KIND = "kvrelay-evaluate/1"
PARTS = {
    part.NAME: (part.wishes, part.take)
    for part in (sizes, ratios, larger, chunks, loads, transfers, policies, groups, prefixes)
}
"""Of SECTIONS."""
REPORT, PAGE = "evaluate.json", "evaluate.html"


def evaluate(options: EvaluateOptions, bar: ProgressBar, *, resumes: bool) -> Report:
    """Measure and simulate what the journal does not have, and write the report. Raises InvalidInputError for options
    that cannot be, KvrelayError if nothing can be measured."""
    load, certificate = _load(options), link.read_certificate(options.certificate)
    journal = Journal(options.output, options.settings, resumes=resumes)
    if resumes:
        again = f", {journal.num_failed} failed ones are run again" if journal.num_failed else ""
        click.echo(f"going on from {options.output}: {len(journal)} cases are done{again}", err=True)
    bench = Workbench(options, load, journal, PartBar(bar))
    sections, figures, measured = _sections(bench, certificate)
    journal.add(END, None)
    report = Report(
        KIND,
        options.model,
        describe_machine(),
        measured.load_text,
        options.command,
        journal.began,
        versions(),
        measured.settings,
        figures,
        tuple(sections),
    )
    write_text(options.output / REPORT, to_json(report))
    write_text(options.output / PAGE, page_of(report))
    return report


def _sections(
    bench: Workbench, certificate: CertifyReport | None
) -> tuple[list[Section], dict[str, Any], EvaluateOptions]:
    """The answer is made last, and comes first; and its figures, and the options with what was chosen here."""
    chosen = [name for name in SECTIONS if name in bench.options.sections]
    taken_s: dict[str, float] = {}

    def timed(name: str, take: Callable[[], _T]) -> _T:
        began_s = time.monotonic()
        found = take()
        taken_s[name] = time.monotonic() - began_s
        return found

    def wishes_of(basis: Basis) -> list[Wish]:
        own = sorted(chosen, key=BY_IMPORTANCE.index)
        return arrangements.wishes(basis) + [wish for name in own for wish in PARTS[name][0](bench, basis)]

    bench.bar.plan("calibration", calibration.seconds_for(bench) + forecast.SEARCH_S * len(bench.load.arrivals))
    basis = timed("calibration", lambda: calibration.basis_of(bench, wishes_of))
    options = suited(bench.options, basis.costs[1].step, basis.capacity, bench.load.mean_prompt)
    load = bench.load if options.load_text == bench.options.load_text else _load(options)
    bench = bench.calibrated(options, load, basis.shortened, basis.pace)
    # First of all: objectives that no cluster meets are refused here, before anything long is measured.
    advice = timed("search", lambda: forecast.advised(bench, basis))
    left, plans = [arrangements.NAME, *chosen], dict[str, Plan]()

    def planned(name: str) -> Workbench:
        """With a plan of this section and those that come later. What went faster than estimated leaves them its
        time."""
        rest = [bench.rest_of(wish) for wish in wishes_of(basis) if wish.of in left]
        plans[name] = plan = _plan(bench, basis, [wish for wish in rest if wish.points or wish.simulated_s])
        left.remove(name)
        bench.bar.plan("evaluate", sum(taken_s.values()) + plan.seconds)
        bench.bar.reach(sum(taken_s.values()))
        return bench.with_plan(plan)

    own = planned(arrangements.NAME)
    separated, rows = timed(arrangements.NAME, lambda: arrangements.take(own, basis))
    checked, found = timed(accuracy.NAME, lambda: accuracy.take(bench, basis, rows))
    others: list[Section] = []
    for name in chosen:
        own = planned(name)
        if own.plan.has(name):
            others += timed(name, partial(PARTS[name][1], own, basis, advice))
        else:
            others.append(Section(name.capitalize(), f"Not shown: {NO_TIME} for it.", ""))
    linked = link.take(basis, bench.load.context, certificate)
    order = policies.order(bench, basis) if policies.NAME in taken_s else "auto; not measured here"
    at_rates = [*rows, *(loads.rows_of(bench, basis) if loads.NAME in taken_s else ())]
    measured = arrangements.goodput_sentence(at_rates)
    first = answer.section_of(bench.options, bench.load, advice, found, order, measured, separated.notes)
    decision, at_rate = answer.decision_of(advice)
    figures = {"decision": decision, "at_rate": at_rate, "above": advice.best, "rate": advice.rate}
    figures |= {"capacities": advice.capacities, "simulator_errors": found}
    used = spent.section_of(basis, plans, options.sizes, taken_s)
    return [first, checked, separated, *others, linked, used], figures, options


def _plan(bench: Workbench, basis: Basis, wishes: Sequence[Wish]) -> Plan:
    """For the time that is left."""
    sizes = bench.options.sizes
    return plan_of(wishes, basis.pace, sizes.rounds, sizes.seconds, max(bench.left_s - accuracy.SECONDS, 0.0))


def _load(options: EvaluateOptions) -> EvaluatedLoad:
    """Raises InvalidInputError, CheckpointError."""
    limit = options.sizes.requests
    arrivals = load_of(options.trace, options.load_spec, limit=limit, time_scale=options.time_scale, seed=options.seed)
    facts = checkpoint_facts(options.model_path)
    return fitted(arrivals[:limit], facts.vocab_size, facts.max_model_len)


def how_to_go_on(command: str) -> str:
    """The command line that goes on from an interrupted run."""
    words = shlex.split(command)
    return shlex.join([*words, *(["--resume"] if "--resume" not in words else [])])


def check_output(output: Path) -> None:
    """Raise InvalidInputError if the folder is a file."""
    if output.exists() and not output.is_dir():
        raise InvalidInputError(f"--output-dir {output} is a file", param="output_dir")
