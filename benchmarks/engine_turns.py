"""The engine's batch on two sides in turns: free beside bound by a grammar, several ranks beside one process."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.parts import batch_options, run_batch
from kvrelay.bench.engine import BatchLoad, EngineRun, conditions, run_once, warm_up_load
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.errors import ConfigError
from kvrelay.llm import LLM

ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    """{"type":"array","minItems":100000,"items":{"type":"object","additionalProperties":false,
    "properties":{"name":{"type":"string","minLength":1,"maxLength":20},"age":{"type":"integer","minimum":0},
    "tags":{"type":"array","items":{"enum":["red","green","blue"]}}},"required":["name","age","tags"]}}""",
)
"""No answer ends before its limit, so that free and bound answers have the same length."""

Run = Callable[[BatchLoad], EngineRun]


@click.command()
@click.option("--structured", "measure", flag_value="structured", help="Free, and bound by a grammar.")
@click.option("--beside-one-process", "measure", flag_value="ranks", help="Ranks, and one process.")
@batch_options
def engine_turns(measure: str | None, **given: Any) -> None:
    """What a grammar costs the engine (default), or several ranks beside one process.

    Example: python -m benchmarks engine-turns --beside-one-process --tp 2 --num-threads 2
    """
    run_batch(run_ranks_benchmark if measure == "ranks" else run_structured_benchmark, "engine in turns", given)


def run_structured_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """The batch in turns: free, and with every answer bound by a grammar; ``num_runs`` passes of each. Returns the
    medians, and of each pair of passes what the grammar costs, as a part of the free throughput."""
    with LLM(model_path, **dataclasses.asdict(runner), **dataclasses.asdict(engine)) as llm:
        free, bound = (partial(run_once, llm, grammar=grammar) for grammar in (None, ENDLESS))
        pairs = _in_turns(free, bound, load, num_runs)
    costs = [1 - free.duration_s / bound.duration_s for free, bound in pairs]
    return _compared(pairs, ("free", "bound"), "cost", costs, load)


def run_ranks_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """The batch in turns: with the ranks of ``runner``, and in one process with as many threads; ``num_runs`` passes of
    each. Returns the medians, and of each pair of passes the ranks' throughput over that of the one process.

    Raises ConfigError if ``runner`` has one rank.
    """
    if runner.num_ranks == 1:
        raise ConfigError("--beside-one-process compares several ranks with one process: give --tp or --pp", param="tp")
    one = dataclasses.replace(runner, tp=1, pp=1)
    ranks_llm, one_llm = (
        LLM(model_path, **dataclasses.asdict(each), **dataclasses.asdict(engine)) for each in (runner, one)
    )
    with ranks_llm, one_llm:
        pairs = _in_turns(partial(run_once, ranks_llm), partial(run_once, one_llm), load, num_runs)
    ratios = [single.duration_s / spread.duration_s for spread, single in pairs]
    return {**_compared(pairs, ("ranks", "one_process"), "ratio", ratios, load), "num_ranks": runner.num_ranks}


def _in_turns(one: Run, other: Run, load: BatchLoad, num_runs: int) -> list[tuple[EngineRun, EngineRun]]:
    """Both warmed up, then one pass of each in turn."""
    for run in (one, other):
        run(warm_up_load(load))
    return [(one(load), other(load)) for _ in range(num_runs)]


def _compared(
    pairs: list[tuple[EngineRun, EngineRun]], names: tuple[str, str], what: str, values: list[float], load: BatchLoad
) -> dict[str, float]:
    """The throughput of both sides, the spread of ``values``, and the load."""
    rates = zip(*((one.tokens_per_s, other.tokens_per_s) for one, other in pairs))
    return {
        **{f"{name}_tokens_per_s": statistics.median(each) for name, each in zip(names, rates)},
        what: statistics.median(values),
        f"{what}_min": min(values),
        f"{what}_max": max(values),
        **conditions(load, len(pairs)),
    }
