"""The effect of a burst on chats: many long prompts arrive at once, while chats arrive at a fixed rate.

Each turn starts a cold server, measures idle chats, then sends the burst. Cases take turns, so that a drift of the
machine affects all of them alike; within a round every case gets the same requests.
"""

from __future__ import annotations

import math
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
from kvrelay.bench.load.mix import ClassSpec, Dataset
from kvrelay.bench.load.request import Length
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.files import describe_machine, print_result
from kvrelay.bench.report.records import Distribution, Outcome, RequestRecord, RunResult, distribution
from kvrelay.bench.report.table import number, table
from kvrelay.bench.serving import RunOptions, run_serve
from kvrelay.cli.processes import run_async
from kvrelay.errors import InvalidInputError

BURST_KIND = "kvrelay-bench-burst/1"
_COLUMNS = (
    "case", "idle p50", "chat p50", "p99", "max", "client max", "chat gap p99", "long p50", "last long", "failed"
)  # fmt: skip
_VOCAB_SIZE = 512


@dataclass(frozen=True, slots=True)
class BurstLoad:
    """Lengths in tokens, ``chat_rate`` in requests per second, ``chat_s`` seconds of chats from the burst on."""

    num_prompts: int
    prompt: int
    output: int
    chat_prompt: int
    chat_output: int
    chat_rate: float
    chat_s: float

    @property
    def idle(self) -> tuple[ClassSpec, ...]:
        """Chats without a burst."""
        return (self._chats("idle", self.chat_rate * 4, 16),)

    @property
    def burst(self) -> tuple[ClassSpec, ...]:
        """The long prompts, all at once, and the chats beside them."""
        long = ClassSpec("long", _dataset(self.prompt, self.output), num_requests=self.num_prompts)
        return long, self._chats("chat", self.chat_rate, max(1, math.ceil(self.chat_rate * self.chat_s)))

    def _chats(self, name: str, rate: float, count: int) -> ClassSpec:
        return ClassSpec(name, _dataset(self.chat_prompt, self.chat_output), rate=rate, num_requests=count)


@dataclass(frozen=True, slots=True)
class BurstTurn:
    """One turn of one case: seconds to first tokens, and ``chat_gap_p99_s`` between a chat's later tokens.

    ``chat_*`` are of the chats sent before the last long prompt had its first token, from the moment when a chat was
    written to its connection. ``client_max_s`` is the longest time by which this client wrote a chat too late: it sends
    the burst from the same cores. ``error``: why the turn failed.
    """

    case: str
    round: int
    idle_p50_s: float | None = None
    chat_p50_s: float | None = None
    chat_p99_s: float | None = None
    chat_max_s: float | None = None
    client_max_s: float | None = None
    chat_gap_p99_s: float | None = None
    long_p50_s: float | None = None
    long_max_s: float | None = None
    num_chats: int = 0
    num_failed: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BurstReport:
    """The comparison. ``results``: per case the median of each figure, ``chat_max_s`` the worst of all rounds."""

    kind: str
    machine: str
    load: BurstLoad
    results: tuple[BurstTurn, ...]
    turns: tuple[BurstTurn, ...]


def measure_burst(given: dict[str, Any]) -> None:
    """``kvrelay bench burst``: all turns, and medians over the rounds. Raises BenchError if a turn has failed."""
    load = BurstLoad(**{item.name: given[item.name] for item in fields(BurstLoad)})
    cases = burst_cases(given["engine"], given["model"], given["serve_args"], given["variants"], given["only_given"])
    cases += tuple(parse_case(text) for text in given["cases"])
    check_names(cases)
    turns: list[BurstTurn] = []
    for turn_number, case in turns_of(cases, given["rounds"]):
        turns.append(run_async(_turn(case, turn_number, load, given["drain"])))
        click.echo(f"round {turn_number}, {case.name}: {_progress(turns[-1])}", err=True)
    results = tuple(summarise_case([turn for turn in turns if turn.case == case.name]) for case in cases)
    report = BurstReport(BURST_KIND, describe_machine(), load, results, tuple(turns))
    print_result(report, burst_text(report), given["as_json"])
    require_success([turn.error for turn in turns])


def burst_cases(
    engine: str, model: str | None, serve_args: str, variants: Sequence[str], only_given: bool
) -> tuple[Case, ...]:
    """One aggregated worker, one prefill and one decode worker, and the latter with each variant's arguments.

    A variant is ``NAME=ARGUMENTS``; InvalidInputError for any other.
    """
    speed = " --speedup-ratio 2" if engine == "mock" else ""
    base = f"--engine {engine}{speed}"
    quoted = shlex.quote(model) if model else None

    def case(name: str, flags: str) -> Case:
        return Case(name, command=serve_command(quoted, f"{base} {flags}", serve_args))

    own = (case("aggregated", "--prefill 0 --decode 1"), case("1P1D", "--prefill 1 --decode 1"))
    found = [] if only_given else list(own)
    for text in variants:
        name, separator, flags = text.partition("=")
        if not (separator and name.strip()) or "/" in name:
            raise InvalidInputError(f"{text!r} is not NAME=ARGUMENTS", param="variant")
        found.append(case(name.strip(), f"--prefill 1 --decode 1 {flags}"))
    return tuple(found)


async def _turn(case: Case, number: int, load: BurstLoad, drain_s: float) -> BurstTurn:
    """A cold server under idle chats, then under the burst. A failure is noted, so that other cases go on."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with running(case, Path(folder), CaseTimes()) as target:
                idle = await _send(target, load.idle, 2 * number, drain_s)
                result = await _send(target, load.burst, 2 * number + 1, drain_s)
    except BenchError as exc:
        return BurstTurn(case.name, number, error=exc.message)
    return turn_of(case.name, number, idle, result)


async def _send(target: Target, classes: tuple[ClassSpec, ...], seed: int, drain_s: float) -> RunResult:
    limits = RunLimits(drain_s=drain_s)
    options = RunOptions(target, classes, limits=limits, seed=seed, retokenize=False, warm_up=2 * (len(classes) == 1))
    return (await run_serve(options, ProgressBar(None))).result


def turn_of(case: str, number: int, idle: RunResult, burst: RunResult) -> BurstTurn:
    """The figures of a turn from its records."""
    long = [record for record in burst.records if record.class_name == "long"]
    ends_ns = max((record.stamps_ns[0] for record in long if record.stamps_ns), default=burst.stop_ns)
    chats = [record for record in burst.records if record.class_name == "chat" and record.sent_ns <= ends_ns]
    chat, longs, alone = _ttft(chats), _ttft(long), _ttft(idle.records)
    gaps = distribution([gap for record in chats for gap in record.gaps_s().tolist()])
    num_failed = sum(record.outcome is not Outcome.OK for record in (*long, *chats, *idle.records))
    if chat is None or longs is None:
        return BurstTurn(case, number, num_failed=num_failed, error="no request succeeded")
    return BurstTurn(
        case,
        number,
        idle_p50_s=alone.median if alone else None,
        chat_p50_s=chat.median,
        chat_p99_s=chat.p99,
        chat_max_s=chat.max,
        client_max_s=max(record.client_delay_s for record in chats),
        chat_gap_p99_s=gaps.p99 if gaps else None,
        long_p50_s=longs.median,
        long_max_s=longs.max,
        num_chats=len(chats),
        num_failed=num_failed,
    )


def summarise_case(turns: Sequence[BurstTurn]) -> BurstTurn:
    """Medians over the rounds of one case; failures are added up, ``chat_max_s`` and ``client_max_s`` are the worst."""
    good = [turn for turn in turns if turn.error is None]

    def median(name: str) -> float | None:
        values = [value for turn in good if (value := getattr(turn, name)) is not None]
        return statistics.median(values) if values else None

    times = {item.name: median(item.name) for item in fields(BurstTurn) if item.name.endswith("_s")}
    for name in ("chat_max_s", "client_max_s"):
        times[name] = max((value for turn in good if (value := getattr(turn, name)) is not None), default=None)
    return BurstTurn(
        turns[0].case,
        len(good),
        **times,
        num_chats=sum(turn.num_chats for turn in good),
        num_failed=sum(turn.num_failed for turn in turns),
        error=next((turn.error for turn in turns if turn.error), None),
    )


def burst_text(report: BurstReport) -> str:
    """The table."""
    load = report.load
    title = (
        f"{load.num_prompts} prompts of {load.prompt} tokens at once, chats of {load.chat_prompt} tokens at "
        f"{load.chat_rate:g}/s; seconds to first tokens, medians of {max(t.round for t in report.turns)} rounds, the "
        "maxima are the worst of all; client max: how late this client itself wrote a chat, which no other column has"
    )
    rows = []
    for row in report.results:
        chat_times = (row.chat_p50_s, row.chat_p99_s, row.chat_max_s, row.client_max_s, row.chat_gap_p99_s)
        times = (row.idle_p50_s, *chat_times)
        figures = [number(value, ".3f") for value in (*times, row.long_p50_s, row.long_max_s)]
        rows.append([row.case, *figures, str(row.num_failed)])
    return f"{title}\n\n{table(_COLUMNS, rows)}"


def _progress(turn: BurstTurn) -> str:
    return turn.error or f"chats p99 {number(turn.chat_p99_s, '.3f')} s, last long {number(turn.long_max_s, '.3f')} s"


def _ttft(records: Sequence[RequestRecord]) -> Distribution | None:
    """A failed request has no first token; it is counted, not averaged."""
    return distribution([ttft for record in records if (ttft := record.written_ttft_s) is not None])


def _dataset(prompt: int, output: int) -> Dataset:
    return Dataset(prompt=Length("fixed", prompt), output=Length("fixed", output), vocab_size=_VOCAB_SIZE)
