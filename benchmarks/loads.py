"""Loads of fixed lengths, their figures, and what they are measured on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import nan
from typing import Any

from kvrelay.bench.client.connection import ConnectionPool, Target
from kvrelay.bench.load.datasets import Dataset, DatasetKind
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.load.request import Length
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import LoadReport, figure
from kvrelay.bench.serving import RunOptions, ServeRun, require_success, run_serve


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


async def send(target: Target, *classes: ClassSpec, **options: Any) -> ServeRun:
    """One run without a progress bar; ``options`` as in RunOptions. Raises BenchError."""
    return await run_serve(RunOptions(target, classes, retokenize=False, **options), ProgressBar(None))


async def measure_load(target: Target, spec: ClassSpec, **options: Any) -> LoadReport:
    """The figures of one load. Raises BenchError if no request succeeded."""
    report = (await send(target, spec, **options)).report
    require_success(report)
    return report.total


def figures(load: LoadReport, names: Mapping[str, str]) -> dict[str, float]:
    """The load's figures under other names; a missing figure is 0."""
    return {name: figure(load, path) or 0.0 for name, path in names.items()}


_CPU_SECONDS = re.compile(rb"^process_cpu_seconds_total\s+(\S+)", re.MULTILINE)


async def cpu_seconds(target: Target) -> float:
    """CPU time so far of the process that answers, from its Prometheus metrics; NaN if they lack it."""
    pool = ConnectionPool(target)
    try:
        answer = await pool.send(pool.target.head("GET", "/metrics", 0))
    finally:
        await pool.close()
    found = _CPU_SECONDS.search(answer.body) if answer.status == 200 else None
    try:
        return float(found[1]) if found is not None else nan
    except ValueError:
        return nan
