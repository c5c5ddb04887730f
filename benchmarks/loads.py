"""Loads of fixed lengths, the servers that get them, and the figures of both; and how scripts print what they found."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import nan
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.bench.cases import Case, CaseTimes, running, turns_of
from kvrelay.bench.client.connection import ConnectionPool, Target
from kvrelay.bench.load.datasets import Dataset, DatasetKind
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.load.request import Length
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.metrics import FIGURES, LoadReport, figure
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.serving import RunOptions, ServeRun, require_success, run_serve

_S = TypeVar("_S")
_T = TypeVar("_T")


def fixed_load(
    name: str,
    prompt: int,
    output: int,
    *,
    vocab_size: int = 512,
    prefix: tuple[int, int, int] | None = None,
    **arrivals: Any,
) -> ClassSpec:
    """Random prompts and answers of fixed lengths in tokens. ``prefix``: groups, prompts of each, and the tokens that
    they share before ``prompt`` own ones. ``arrivals``: as in ClassSpec."""
    groups, per_group, system = prefix or (1, 1, 1)
    dataset = Dataset(
        DatasetKind.SHARED_PREFIX if prefix else DatasetKind.RANDOM,
        prompt=Length("fixed", prompt),
        output=Length("fixed", output),
        groups=groups,
        per_group=per_group,
        system=Length("fixed", system),
        vocab_size=vocab_size,
    )
    return ClassSpec(name, dataset, **arrivals)


class ClosedLoop(NamedTuple):
    """Tokens of a prompt and of an answer, requests at once, and requests of a turn."""

    input: int
    output: int
    at_once: int
    num_requests: int = 0

    @property
    def shown(self) -> str:
        return f"{self.input}/{self.output}, {self.at_once} at once"

    def spec(self, name: str, scale: float = 1.0) -> ClassSpec:
        """``scale``: of the number of requests."""
        count = max(self.at_once, round(self.num_requests * scale))
        sizes: dict[str, Any] = {"max_concurrency": self.at_once, "num_requests": count}
        return fixed_load(name.replace(" ", "_"), self.input, self.output, vocab_size=400, **sizes)


async def send(target: Target, *classes: ClassSpec, **options: Any) -> ServeRun:
    """One run without a progress bar; ``options`` as in RunOptions. Raises BenchError."""
    return await run_serve(RunOptions(target, classes, retokenize=False, **options), ProgressBar(None))


async def measure_load(target: Target, spec: ClassSpec, **options: Any) -> LoadReport:
    """The figures of one load. Raises BenchError if no request succeeded."""
    report = (await send(target, spec, **options)).report
    require_success(report)
    return report.total


def figures(load: LoadReport, names: Sequence[str]) -> dict[str, float]:
    """The load's figures of these names; a missing figure is 0."""
    return {name: figure(load, FIGURES[name]) or 0.0 for name in names}


FIRST = "{first}"


@asynccontextmanager
async def all_running(cases: Sequence[Case], start_s: float = CaseTimes().start_s) -> AsyncIterator[list[Target]]:
    """The servers of all cases, one started after the other; their logs are not kept. In a command FIRST stands for the
    first one's URL. Raises BenchError."""
    async with AsyncExitStack() as stack:
        logs, targets = Path(stack.enter_context(tempfile.TemporaryDirectory())), list[Target]()
        for case in cases:
            command = case.command.replace(FIRST, targets[0].url) if case.command and targets else case.command
            server = running(replace(case, command=command), logs, CaseTimes(start_s))
            targets.append(await stack.enter_async_context(server))
        yield targets


async def in_turns(sides: Sequence[_S], num_rounds: int, turn: Callable[[_S, int], Awaitable[_T]]) -> list[list[_T]]:
    """By side, such as a server, what it gives in each turn. One more, number 0, warms up and does not count."""
    for side in sides:
        await turn(side, 0)
    found: list[list[_T]] = [[] for _ in sides]
    for number, (at, side) in turns_of([*enumerate(sides)], num_rounds):
        found[at].append(await turn(side, number))
    return found


async def metrics_of(target: Target) -> dict[tuple[str, str], float]:
    """A server's Prometheus metrics, as ``metrics_in``; none if it has no such page. Raises BenchError."""
    async with ConnectionPool(target) as pool:
        answer = await pool.send(target.head("GET", "/metrics", 0))
    try:
        return metrics_in(answer.body.decode()) if answer.status == 200 else {}
    except ValueError:
        return {}


def metrics_in(page: str) -> dict[tuple[str, str], float]:
    """By name and, of a histogram's bucket, upper bound. Raises ValueError."""
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {(sample.name, sample.labels.get("le", "")): sample.value for sample in samples}


async def cpu_seconds(target: Target) -> float:
    """CPU time so far of the process that answers; NaN if its metrics lack it."""
    return (await metrics_of(target)).get(("process_cpu_seconds_total", ""), nan)


def print_rows(
    rows: Sequence[Row],
    columns: Mapping[str, str],
    as_json: bool,
    *,
    title: str = "",
    left: int = 1,
    after: str = "",
    **about: Any,
) -> None:
    """A table below the machine, or one JSON object, which has ``about``, too. ``title`` and ``after``: lines of text
    above the table and below it."""
    machine = describe_machine()
    text = "\n\n".join(filter(None, (machine, title, results_table(rows, columns, left=left), after)))
    print_result({"machine": machine, **about, "rows": rows}, text, as_json)
