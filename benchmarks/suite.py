"""All benchmarks in one run: each is the command that a user would type, run in its own process.

A benchmark that fails is reported and the others continue; a process's output is kept beside its result.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from kvrelay.bench.cases import Case, CaseTimes, running
from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.files import describe_machine, write_result, write_text
from kvrelay.bench.report.table import table
from kvrelay.cli.processes import run_async
from kvrelay.core.child_process import start_child_process
from kvrelay.errors import InvalidInputError, KvrelayError

SUITE_KIND = "kvrelay-bench-all/1"
SAMPLE = "sample-conversations.txt"
_MAX_FIGURES = 40
_REASON_CHARS = 400


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark: arguments after ``kvrelay bench``. ``server`` is a command that runs meanwhile; its address
    replaces ``{url}``."""

    name: str
    arguments: tuple[str, ...]
    server: str | None = None
    timeout_s: float = 420.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. ``error`` None: it succeeded; its JSON is in ``<name>.json``."""

    name: str
    command: str
    seconds: float
    error: str | None = None
    figures: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """All steps, and the machine they ran on."""

    kind: str
    machine: str
    started_at: str
    steps: tuple[StepResult, ...]


def run_all(model_dir: str | None, short: bool, only: str, folder: Path, start_timeout_s: float) -> None:
    """``kvrelay bench all``. ``only``: names joined by commas, empty for all. Raises BenchError when a step failed."""
    steps = all_steps(model_dir, short, folder)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = set(wanted) - {step.name for step in steps}
    if unknown:
        raise InvalidInputError(f"no benchmark {', '.join(sorted(unknown))}: {', '.join(s.name for s in steps)}")
    write_sample_conversations(folder / SAMPLE, 50_000 if short else 1_000_000)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    finished: list[StepResult] = []

    def done(result: StepResult) -> None:
        finished.append(result)
        click.echo(f"{result.name}: {result.error or 'ok'} ({result.seconds:.0f} s)", err=True)
        write_suite(SuiteReport(SUITE_KIND, describe_machine(), started_at, tuple(finished)), folder)

    run_steps(
        [step for step in steps if not wanted or step.name in wanted],
        sys.executable,
        folder,
        CaseTimes(start_timeout_s),
        done,
    )
    click.echo(f"results: {folder / 'summary.md'}")
    failed = [result.name for result in finished if result.error]
    if failed:
        raise BenchError(f"{len(failed)} of {len(finished)} benchmarks failed: {', '.join(failed)}")


def all_steps(model_dir: str | None, short: bool, folder: Path) -> list[Step]:
    """Every benchmark, in the order in which they run. The short form has fewer rounds and a smaller load."""
    model = (model_dir,) if model_dir else ()
    steps = [
        Step("engine", ("engine", *model, *(("--runs", "2", "--num-prompts", "64") * short), "--json")),
        Step("frontend", ("frontend", *model, *(("--rounds", "2", "--scale", "0.25") * short), "--json")),
        Step("router", ("router", "--json")),
        Step("transfer", ("transfer", *(("--rounds", "2") * short), "--json")),
    ]
    plot = ("--plot", str(folder / "prefixes.png"))
    steps.append(Step("prefixes", ("prefixes", str(folder / SAMPLE), "--cache-blocks", "1000,10000", *plot, "--json")))
    load = ["--input-len", "256", "--output-len", "64", "--max-concurrency", "16", "--slo", "ttft=500,tpot=25"]
    load += ["--num-prompts", "64" if short else "512", "--plot", str(folder / "serve.png"), "--json"]
    serve = f"{shlex.quote(sys.executable)} -m kvrelay serve {shlex.quote(model_dir) if model_dir else ''}"
    server = f"{serve} --prefill 1 --decode 1 --port {{port}}"
    steps.append(Step("serve", ("serve", "--base-url", "{url}", *load), server))
    turns = ("--rounds", "2", "--duration", "12") if short else ("--rounds", "3", "--duration", "30")
    place = ("--output-dir", str(folder / "interference"), "--json")
    steps.append(Step("interference", ("interference", *model, *turns, *place), timeout_s=420.0 if short else 1200.0))
    return steps


def run_steps(
    steps: Sequence[Step], python: str, folder: Path, times: CaseTimes, done: Callable[[StepResult], None]
) -> tuple[StepResult, ...]:
    """Run step after step with results in ``folder``; ``done`` is called after each."""
    results = []
    for step in steps:
        begin = time.monotonic()
        command = [python, "-m", "kvrelay", "bench", *step.arguments]
        figures: tuple[tuple[str, float], ...] = ()
        error = None
        try:
            figures = run_async(_step(step, command, folder, times))
        except KvrelayError as exc:
            error = exc.message
        shown = shlex.join(["kvrelay", *command[3:]])
        results.append(StepResult(step.name, shown, time.monotonic() - begin, error, figures))
        done(results[-1])
    return tuple(results)


async def _step(step: Step, command: list[str], folder: Path, times: CaseTimes) -> tuple[tuple[str, float], ...]:
    if step.server is None:
        return _finish(step, command, folder)
    async with running(Case(step.name, command=step.server), folder / "logs", times) as target:
        return _finish(step, [part.replace("{url}", target.url) for part in command], folder)


def _finish(step: Step, command: list[str], folder: Path) -> tuple[tuple[str, float], ...]:
    """Run the process to its end, keep its output, and take the figures from its JSON."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with (
        (folder / "logs" / f"{step.name}.stderr").open("wb") as errors,
        start_child_process(command, stdout=subprocess.PIPE, stderr=errors, death_signal=signal.SIGTERM) as process,
    ):
        try:
            printed, _ = process.communicate(timeout=step.timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise BenchError(f"did not end within {step.timeout_s:g} s") from exc
        finally:
            _end_group(process)
    text = printed.decode("utf-8", "replace")
    if text.strip():
        write_text(folder / f"{step.name}.json", text)
    if process.returncode:
        tail = (folder / "logs" / f"{step.name}.stderr").read_text(errors="replace").strip()[-_REASON_CHARS:]
        last = tail.splitlines()[-1] if tail else "it printed no reason"
        raise BenchError(f"exit code {process.returncode}: {last}")
    try:
        return top_figures(msgspec.json.decode(printed))
    except msgspec.DecodeError as exc:
        raise BenchError(f"printed something that is not JSON: {exc}") from exc


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def top_figures(result: Any) -> tuple[tuple[str, float], ...]:
    """The first numbers of a JSON result, nested names joined by dots; lists are skipped."""
    found: list[tuple[str, float]] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((name, float(value)))

    walk(result, "")
    return tuple(found[:_MAX_FIGURES])


def write_suite(report: SuiteReport, folder: Path) -> None:
    """Write ``summary.json`` and ``summary.md``: the steps, their durations and their figures."""
    rows = [(step.name, f"{step.seconds:.0f}", step.error or "ok") for step in report.steps]
    lines = [f"# Benchmark results, {report.started_at}", "", f"Machine: {report.machine}", ""]
    lines.append(table(("benchmark", "seconds", "result"), rows, markdown=True))
    for step in report.steps:
        lines += ["", f"## {step.name}", "", f"`{step.command}`", ""]
        lines += [f"- {name}: {value:.6g}" for name, value in step.figures]
    write_result(folder, "summary", report, "\n".join(lines))


def write_sample_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Conversations for the prefix benchmark: 300 characters, every second one after one of many system prompts."""
    rng = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    systems = [letters[rng.integers(0, len(letters), 150)].tobytes() for _ in range(max(1, count // 50))]
    rows = letters[rng.integers(0, len(letters), (count, 300), dtype=np.uint8)]
    lines = []
    for row, shared in zip(rows, rng.integers(0, 2 * len(systems), count).tolist()):
        text = row.tobytes()
        lines.append((systems[shared] + text[150:] if shared < len(systems) else text).decode())
    write_text(path, "\n".join(lines))
