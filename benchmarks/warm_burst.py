"""A warm burst: streams start at once whose common prefix one of two workers holds.

All of them on that worker save the prefill of the prefix and slow each other down; the other worker is idle. Each turn
starts a cold server, lets both workers decode, has one prompt after the other computed, and then sends the streams.
"""

from __future__ import annotations

import shlex
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
from benchmarks.own_cluster import serve_command

from kvrelay.bench.cases import Case, CaseTimes, check_names, parse_case, require_success, running, turns_of
from kvrelay.bench.client.connection import Target
from kvrelay.bench.client.driver import RunLimits
from kvrelay.bench.errors import BenchError
from kvrelay.bench.load.mix import ClassSpec, Dataset, DatasetKind
from kvrelay.bench.load.request import Length
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.files import describe_machine, print_result
from kvrelay.bench.report.records import Outcome, RunResult
from kvrelay.bench.report.table import number, table
from kvrelay.bench.serving import RunOptions, run_serve
from kvrelay.cli.processes import run_async

WARM_KIND = "kvrelay-bench-warm-burst/1"
POLICIES = ("kv", "kv-weights")
MOCK_TIMES = "--decode-base-s 0.002 --decode-seq-s 0.001"
"""A worker whose step grows with its streams, as on a CPU or a full GPU."""
QUESTION_TOKENS = 32
_VOCAB_SIZE = 512
_COLUMNS = ("case", "last first token", "last token", "failed")


@dataclass(frozen=True, slots=True)
class WarmLoad:
    """``warm_streams`` answers of ``warm_output`` tokens to prompts with one prefix of ``warm_prefix`` tokens."""

    warm_streams: int
    warm_output: int
    warm_prefix: int

    def classes(self) -> tuple[ClassSpec, ...]:
        """Chats from which the workers learn their steps, in batches of several sizes; the prompts one by one; the
        streams, of the same prompts."""
        chats = Dataset(prompt=Length("fixed", 30), output=Length("fixed", 64), vocab_size=_VOCAB_SIZE)
        learn = (ClassSpec("learn", chats, max_concurrency=size, num_requests=4 * size) for size in (2, 16))
        return *learn, self._streams(1, 1), self._streams(self.warm_output, None)

    def _streams(self, output: int, max_concurrency: int | None) -> ClassSpec:
        dataset = Dataset(
            DatasetKind.SHARED_PREFIX,
            prompt=Length("fixed", QUESTION_TOKENS),
            output=Length("fixed", output),
            groups=1,
            per_group=self.warm_streams,
            system=Length("fixed", self.warm_prefix),
            vocab_size=_VOCAB_SIZE,
        )
        return ClassSpec("stream", dataset, max_concurrency=max_concurrency, num_requests=self.warm_streams)


@dataclass(frozen=True, slots=True)
class WarmTurn:
    """One turn of one case: seconds from the burst to the last first token and to the last token."""

    case: str
    round: int
    first_token_max_s: float | None = None
    last_token_s: float | None = None
    num_failed: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class WarmReport:
    """``results``: per case the medians of its turns."""

    kind: str
    machine: str
    load: WarmLoad
    results: tuple[WarmTurn, ...]
    turns: tuple[WarmTurn, ...]


def measure_warm_burst(given: dict[str, Any]) -> None:
    """``kvrelay bench burst --warm``. Raises BenchError if a turn has failed."""
    load = WarmLoad(**{item.name: given[item.name] for item in fields(WarmLoad)})
    own = () if given["only_given"] else warm_cases(given["engine"], given["model"], given["serve_args"])
    cases = own + tuple(parse_case(text) for text in given["cases"])
    check_names(cases)
    turns: list[WarmTurn] = []
    for turn_number, case in turns_of(cases, given["rounds"]):
        turns.append(run_async(_turn(case, turn_number, load, given["drain"])))
        said = turns[-1].error or f"last token after {number(turns[-1].last_token_s, '.3f')} s"
        click.echo(f"round {turn_number}, {case.name}: {said}", err=True)
    results = tuple(summarise_warm([turn for turn in turns if turn.case == case.name]) for case in cases)
    report = WarmReport(WARM_KIND, describe_machine(), load, results, tuple(turns))
    print_result(report, warm_text(report), given["as_json"])
    require_success([turn.error for turn in turns])


def warm_cases(engine: str, model: str | None, serve_args: str) -> tuple[Case, ...]:
    """Two aggregated workers under each policy."""
    times = f" {MOCK_TIMES}" if engine == "mock" else ""
    quoted = shlex.quote(model) if model else None
    base = f"--engine {engine}{times} --prefill 0 --decode 2"
    return tuple(
        Case(policy, command=serve_command(quoted, f"{base} --router {policy}", serve_args)) for policy in POLICIES
    )


async def _turn(case: Case, turn_number: int, load: WarmLoad, drain_s: float) -> WarmTurn:
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with running(case, Path(folder), CaseTimes()) as target:
                results = [await _send(target, spec, turn_number, drain_s) for spec in load.classes()]
    except BenchError as exc:
        return WarmTurn(case.name, turn_number, error=exc.message)
    return warm_turn_of(case.name, turn_number, results[-1])


async def _send(target: Target, spec: ClassSpec, seed: int, drain_s: float) -> RunResult:
    """The same seed for all classes, so that the streams have the prompts that were computed before."""
    options = RunOptions(target, (spec,), limits=RunLimits(drain_s=drain_s), seed=seed, retokenize=False, warm_up=0)
    return (await run_serve(options, ProgressBar(None))).result


def warm_turn_of(case: str, turn_number: int, result: RunResult) -> WarmTurn:
    """The figures of a turn from the records of its streams."""
    num_failed = sum(record.outcome is not Outcome.OK for record in result.records)
    good = [record for record in result.records if record.stamps_ns]
    if not good:
        return WarmTurn(case, turn_number, num_failed=num_failed, error="no request succeeded")
    began_ns = min(record.sent_ns for record in good)
    return WarmTurn(
        case,
        turn_number,
        first_token_max_s=(max(record.stamps_ns[0] for record in good) - began_ns) / 1e9,
        last_token_s=(max(record.stamps_ns[-1] for record in good) - began_ns) / 1e9,
        num_failed=num_failed,
    )


def summarise_warm(turns: Sequence[WarmTurn]) -> WarmTurn:
    """Medians over the rounds of one case; failures are added up."""
    first = [turn.first_token_max_s for turn in turns if turn.first_token_max_s is not None]
    last = [turn.last_token_s for turn in turns if turn.last_token_s is not None]
    return WarmTurn(
        turns[0].case,
        len(last),
        statistics.median(first) if first else None,
        statistics.median(last) if last else None,
        sum(turn.num_failed for turn in turns),
        next((turn.error for turn in turns if turn.error), None),
    )


def warm_text(report: WarmReport) -> str:
    """The table."""
    load = report.load
    title = (
        f"{load.warm_streams} streams of {load.warm_output} tokens at once, with one prefix of {load.warm_prefix} "
        f"tokens that one of two workers holds; seconds, medians of {max(turn.round for turn in report.turns)} rounds"
    )
    rows = [
        [row.case, number(row.first_token_max_s, ".3f"), number(row.last_token_s, ".3f"), str(row.num_failed)]
        for row in report.results
    ]
    return f"{title}\n\n{table(_COLUMNS, rows)}"
