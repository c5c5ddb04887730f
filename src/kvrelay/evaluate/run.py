"""One evaluation from its options to its report: the plan, and the sections in order."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.files import to_json, write_text
from kvrelay.bench.report.machine import describe_machine
from kvrelay.certify.findings import CertifyReport
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate import calibration, forecast
from kvrelay.evaluate.findings import Report, Section
from kvrelay.evaluate.journal import END, Journal
from kvrelay.evaluate.load import EvaluatedLoad, fitted
from kvrelay.evaluate.options import EvaluateOptions, suited, versions
from kvrelay.evaluate.page import page_of
from kvrelay.evaluate.sections import (
    SECTIONS,
    accuracy,
    answer,
    arrangements,
    chunks,
    larger,
    link,
    loads,
    policies,
    prefixes,
    ratios,
    sizes,
    transfers,
)
from kvrelay.evaluate.workbench import PartBar, Workbench
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.simulate.loads import load_of

_T = TypeVar("_T")
KIND = "kvrelay-evaluate/1"
PARTS = {
    part.NAME: (part.seconds_for, part.take)
    for part in (sizes, ratios, larger, chunks, loads, transfers, policies, prefixes)
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
    chosen = {name: PARTS[name] for name in SECTIONS if name in bench.options.sections}
    planned = [
        *(calibration.seconds_for(bench), forecast.SEARCH_S, arrangements.seconds_for(bench), accuracy.SECONDS),
        *(seconds_for(bench) for seconds_for, _ in chosen.values()),
    ]
    ends = itertools.accumulate(planned)
    bench.bar.plan(sum(planned))

    def done(found: _T) -> _T:
        bench.bar.reach(next(ends))
        return found

    basis = done(calibration.basis_of(bench))
    options = suited(bench.options, basis.costs[1].step, basis.capacity, bench.load.mean_prompt)
    load = bench.load if options.load_text == bench.options.load_text else _load(options)
    bench = Workbench(options, load, bench.journal, bench.bar)
    # First of all: objectives that no cluster meets are refused here, before anything long is measured.
    advice = done(forecast.advised(bench, basis))
    separated, rows = done(arrangements.take(bench, basis))
    checked, found = done(accuracy.take(bench, basis, rows))
    others = [section for _, take in chosen.values() for section in done(take(bench, basis, advice))]
    linked = link.take(bench.options.model_path, basis.costs[1], bench.load.context, certificate)
    order = policies.order(bench, basis) if policies.NAME in chosen else "auto; not measured here"
    first = answer.section_of(bench.options, bench.load, advice, found, order, separated.notes)
    decision, at_rate = answer.decision_of(advice)
    figures = {"decision": decision, "at_rate": at_rate, "above": advice.best, "rate": advice.rate}
    figures |= {"capacities": advice.capacities, "simulator_errors": found}
    return [first, checked, separated, *others, linked], figures, options


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
