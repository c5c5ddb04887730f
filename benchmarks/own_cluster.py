"""Shared by benchmarks that start their own ``kvrelay serve`` several times: its command line, a run against it, and
medians over the turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.bench.client.connection import Target
from kvrelay.bench.load.mix import ClassSpec, Dataset
from kvrelay.bench.load.request import Length
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import LoadReport, figure
from kvrelay.bench.serving import RunOptions, require_success, run_serve


def serve_command(model: str | None, flags: str, more: str) -> str:
    """The command line of ``kvrelay serve``; ``{port}`` stands for the port. ``more`` wins over ``flags``."""
    return f"{sys.executable} -m kvrelay serve {model or ''} {flags} --port {{port}} {more}"


def random_load(name: str, prompt: int, output: int, at_once: int, count: int, vocab_size: int = 512) -> ClassSpec:
    """``count`` random prompts of fixed lengths in tokens, ``at_once`` of them in flight."""
    dataset = Dataset(prompt=Length("fixed", prompt), output=Length("fixed", output), vocab_size=vocab_size)
    return ClassSpec(name, dataset, max_concurrency=at_once, num_requests=max(at_once, count))


async def measure_load(target: Target, spec: ClassSpec, **options: Any) -> LoadReport:
    """The figures of one load. Raises BenchError if no request succeeded."""
    run = await run_serve(RunOptions(target, (spec,), retokenize=False, **options), ProgressBar(None))
    require_success(run.report)
    return run.report.total


def figures(load: LoadReport, names: Mapping[str, str]) -> dict[str, float]:
    """The load's figures under other names; a missing figure is 0."""
    return {name: figure(load, path) or 0.0 for name, path in names.items()}


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the turns; ``failed`` is the sum."""
    return {name: (sum if name == "failed" else statistics.median)([turn[name] for turn in turns]) for name in turns[0]}
