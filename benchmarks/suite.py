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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from kvrelay.bench.cases import CaseTimes, running
from kvrelay.bench.commands.options import FILE
from kvrelay.bench.compare import serve_case
from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.files import write_result, write_text
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.table import Row, table
from kvrelay.cli.options import model_argument
from kvrelay.cli.processes import run_async
from kvrelay.core.child_process import start_child_process
from kvrelay.errors import InvalidInputError, KvrelayError

SUITE_KIND = "kvrelay-bench-all/1"
SAMPLE = "sample-conversations.txt"
_MAX_FIGURES = 40
_REASON_CHARS = 400


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark. ``command``: arguments after ``python -m``. With ``needs_server`` one with a prefill and a decode
    worker runs meanwhile; its address replaces ``{url}``."""

    name: str
    command: str
    needs_server: bool = False
    timeout_s: float = 420.0


@click.command()
@model_argument
@click.option("--short", is_flag=True, help="Small counts and short runs: under 15 minutes on two cores.")
@click.option("--only", default="", metavar="NAME,NAME,...", help="Run only these; default: all.")
@click.option("--output-dir", type=FILE, default=Path("bench-results"))
@click.option("--start-timeout", type=float, default=120.0, help="Seconds until a server is healthy.")
def all_benchmarks(model: str | None, short: bool, only: str, output_dir: Path, start_timeout: float) -> None:
    """Run all benchmarks, each as a process of its own; write JSON, a Markdown summary and plots.

    Example: python -m benchmarks all --short
    """
    steps = all_steps(shlex.quote(model) if model else "", short, shlex.quote(str(output_dir)))
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = set(wanted) - {step.name for step in steps}
    if unknown:
        raise InvalidInputError(f"no benchmark {', '.join(sorted(unknown))}: {', '.join(s.name for s in steps)}")
    write_sample_conversations(output_dir / SAMPLE, 50_000 if short else 1_000_000)
    finished: list[Row] = []
    for row in run_steps(
        [step for step in steps if not wanted or step.name in wanted], output_dir, model, CaseTimes(start_timeout)
    ):
        finished.append(row)
        click.echo(f"{row['name']}: {row['error'] or 'ok'} ({row['seconds']:.0f} s)", err=True)
        write_suite(finished, output_dir)
    click.echo(f"results: {output_dir / 'summary.md'}")
    if failed := [row["name"] for row in finished if row["error"]]:
        raise BenchError(f"{len(failed)} of {len(finished)} benchmarks failed: {', '.join(failed)}")


def all_steps(model: str, short: bool, folder: str) -> list[Step]:
    """Those of ``kvrelay bench`` and the quick ones of ``benchmarks``, in the order in which they run. The short form
    has fewer rounds and a smaller load."""
    load = "--input-len 256 --output-len 64 --max-concurrency 16 --slo ttft=500,tpot=25"
    load += f" --num-prompts {64 if short else 512} --plot {folder}/serve.png"
    turns = "--rounds 2 --duration 12" if short else "--rounds 3 --duration 30"
    interference = f"kvrelay bench interference {model} {turns} --output-dir {folder}/interference"
    prefixes = f"{folder}/{SAMPLE} --cache-blocks 1000,10000 --plot {folder}/prefixes.png"
    return [
        Step("engine", f"kvrelay bench engine {model} {'--runs 2 --num-prompts 64' * short}"),
        Step("frontend", f"benchmarks frontend {model} {'--rounds 2 --scale 0.25' * short}"),
        Step("router", "benchmarks router"),
        Step("transfer", f"kvrelay bench transfer {'--rounds 2' * short}"),
        Step("prefixes", f"kvrelay bench prefixes {prefixes}"),
        Step("serve", f"kvrelay bench serve --base-url {{url}} {load}", needs_server=True),
        Step("interference", interference, timeout_s=420.0 if short else 1200.0),
    ]


def run_steps(
    steps: Sequence[Step], folder: Path, model: str | None, times: CaseTimes, python: str = sys.executable
) -> Iterator[Row]:
    """Run step after step with results in ``folder``."""
    for step in steps:
        begin = time.monotonic()
        row: Row = {"name": step.name, "command": f"python -m {step.command} --json", "error": None, "figures": {}}
        try:
            row["figures"] = run_async(_step(step, python, folder, model, times))
        except KvrelayError as exc:
            row["error"] = exc.message
        yield {**row, "seconds": time.monotonic() - begin}


async def _step(step: Step, python: str, folder: Path, model: str | None, times: CaseTimes) -> dict[str, float]:
    command = [python, "-m", *shlex.split(step.command), "--json"]
    if not step.needs_server:
        return _finish(step, command, folder)
    case = serve_case(step.name, model, "", "--prefill 1 --decode 1")
    async with running(case, folder / "logs", times) as target:
        return _finish(step, [part.replace("{url}", target.url) for part in command], folder)


def _finish(step: Step, command: list[str], folder: Path) -> dict[str, float]:
    """Run the process to its end, keep its output, and take the figures from its JSON."""
    log = folder / "logs" / f"{step.name}.stderr"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as errors,
        start_child_process(command, stdout=subprocess.PIPE, stderr=errors, death_signal=signal.SIGTERM) as process,
    ):
        try:
            printed, _ = process.communicate(timeout=step.timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise BenchError(f"did not end within {step.timeout_s:g} s") from exc
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text = printed.decode("utf-8", "replace")
    if text.strip():
        write_text(folder / f"{step.name}.json", text)
    if process.returncode:
        tail = log.read_text(errors="replace").strip()[-_REASON_CHARS:].splitlines()
        raise BenchError(f"exit code {process.returncode}: {tail[-1] if tail else 'it printed no reason'}")
    try:
        return top_figures(msgspec.json.decode(printed))
    except msgspec.DecodeError as exc:
        raise BenchError(f"printed something that is not JSON: {exc}") from exc


def top_figures(result: Any) -> dict[str, float]:
    """The first numbers of a JSON result, nested names joined by dots; lists are skipped."""
    found: dict[str, float] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, int | float) and not isinstance(value, bool) and len(found) < _MAX_FIGURES:
            found[name] = float(value)

    walk(result, "")
    return found


def write_suite(steps: Sequence[Row], folder: Path) -> None:
    """Write ``summary.json`` and ``summary.md``: the steps, their durations and their figures."""
    machine = describe_machine()
    rows = [(step["name"], f"{step['seconds']:.0f}", step["error"] or "ok") for step in steps]
    lines = ["# Benchmark results", "", f"Machine: {machine}", ""]
    lines.append(table(("benchmark", "seconds", "result"), rows, markdown=True))
    for step in steps:
        lines += ["", f"## {step['name']}", "", f"`{step['command']}`", ""]
        lines += [f"- {name}: {value:.6g}" for name, value in step["figures"].items()]
    write_result(folder, "summary", {"kind": SUITE_KIND, "machine": machine, "steps": steps}, "\n".join(lines))


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
