"""All benchmarks in one go: each is the command that a user would type, run as a process of its own.

A benchmark that fails is reported and the others go on; what a process printed is kept beside its result.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvrelay.bench.cases import Case, CaseTimes, running
from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.files import to_json, write_text
from kvrelay.bench.serving import run_on_loop
from kvrelay.errors import KvrelayError

_MAX_FIGURES = 40
_REASON_CHARS = 400


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark: arguments after ``kvrelay bench``; ``server`` is a command to have running meanwhile, whose
    address replaces ``{url}``."""

    name: str
    arguments: tuple[str, ...]
    server: str | None = None
    timeout_s: float = 420.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """How a step ended. ``error`` None: well; its JSON is in ``<name>.json``."""

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


def run_steps(
    steps: Sequence[Step], python: str, folder: Path, times: CaseTimes, done: Callable[[StepResult], None]
) -> tuple[StepResult, ...]:
    """Run step after step with results in ``folder``; ``done`` is told of each."""
    results = []
    for step in steps:
        begin = time.monotonic()
        command = [python, "-m", "kvrelay", "bench", *step.arguments]
        figures: tuple[tuple[str, float], ...] = ()
        error = None
        try:
            figures = run_on_loop(_step(step, command, folder, times))
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
    """Run the process to its end, keep what it printed, take the figures out of its JSON."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with (
        (folder / "logs" / f"{step.name}.stderr").open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as process,
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
    """The first numbers of a JSON result, nested names joined by dots; lists are passed over."""
    found: list[tuple[str, float]] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((name, float(value)))

    walk(result, "")
    return tuple(found[:_MAX_FIGURES])


def suite_markdown(report: SuiteReport) -> str:
    """The summary: what ran, how long, what it found."""
    lines = [f"# Benchmark results, {report.started_at}", "", f"Machine: {report.machine}", ""]
    lines += ["| benchmark | seconds | result |", "|---|---|---|"]
    lines += [f"| {step.name} | {step.seconds:.0f} | {step.error or 'ok'} |" for step in report.steps]
    for step in report.steps:
        lines += ["", f"## {step.name}", "", f"`{step.command}`", ""]
        lines += [f"- {name}: {value:.6g}" for name, value in step.figures]
    return "\n".join(lines)


def write_sample_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Conversations for the prefix benchmark: 300 characters, every second one behind one of many system prompts."""
    rng = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    systems = [letters[rng.integers(0, len(letters), 150)].tobytes() for _ in range(max(1, count // 50))]
    rows = letters[rng.integers(0, len(letters), (count, 300), dtype=np.uint8)]
    lines = []
    for row, shared in zip(rows, rng.integers(0, 2 * len(systems), count).tolist()):
        text = row.tobytes()
        lines.append((systems[shared] + text[150:] if shared < len(systems) else text).decode())
    write_text(path, "\n".join(lines))


def write_suite(report: SuiteReport, folder: Path) -> None:
    """``summary.json`` and ``summary.md``."""
    write_text(folder / "summary.json", to_json(report))
    write_text(folder / "summary.md", suite_markdown(report))
