"""The engine alone, offline: a batch of random prompts in, tokens out."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvrelay.bench.report.table import table
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.errors import ConfigError, FatalError
from kvrelay.llm import LLM, SamplingParams

ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    """{"type":"array","minItems":100000,"items":{"type":"object","additionalProperties":false,
    "properties":{"name":{"type":"string","minLength":1,"maxLength":20},"age":{"type":"integer","minimum":0},
    "tags":{"type":"array","items":{"enum":["red","green","blue"]}}},"required":["name","age","tags"]}}""",
)
"""No answer ends before its limit, so that free and bound answers have the same length."""


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The batch: ``num_prompts`` random prompts of ``input_len`` tokens, ``output_len`` tokens each, EOS ignored."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One timed pass over the batch; latencies in seconds, one per request, from its submission."""

    duration_s: float
    first_token_s: list[float]
    finish_s: list[float]
    num_output_tokens: int
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s


Run = Callable[[BatchLoad], EngineRun]


def run_engine_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """Load the model, warm up, run the batch ``num_runs`` times; returns medians and spread."""
    with LLM(model_path, **dataclasses.asdict(runner), **dataclasses.asdict(engine)) as llm:
        _run_once(llm, _warm_up(load))
        runs = [_run_once(llm, load) for _ in range(num_runs)]
    return _report(runs, load)


def run_structured_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """The batch in turns: free, and with every answer bound by a grammar; ``num_runs`` passes of each. Returns the
    medians, and of each pair of passes what the grammar costs, as a part of the free throughput."""
    with LLM(model_path, **dataclasses.asdict(runner), **dataclasses.asdict(engine)) as llm:
        free, bound = (partial(_run_once, llm, grammar=grammar) for grammar in (None, ENDLESS))
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
        pairs = _in_turns(partial(_run_once, ranks_llm), partial(_run_once, one_llm), load, num_runs)
    ratios = [single.duration_s / spread.duration_s for spread, single in pairs]
    return {**_compared(pairs, ("ranks", "one_process"), "ratio", ratios, load), "num_ranks": runner.num_ranks}


def _in_turns(one: Run, other: Run, load: BatchLoad, num_runs: int) -> list[tuple[EngineRun, EngineRun]]:
    """Both warmed up, then one pass of each in turn."""
    for run in (one, other):
        run(_warm_up(load))
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
        **_conditions(load, len(pairs)),
    }


def _conditions(load: BatchLoad, num_runs: int) -> dict[str, float]:
    sizes = {"num_prompts": load.num_prompts, "input_len": load.input_len, "output_len": load.output_len}
    return {"num_runs": num_runs, **sizes}


def _warm_up(load: BatchLoad) -> BatchLoad:
    return BatchLoad(min(8, load.num_prompts), min(32, load.input_len), 4)


def _run_once(llm: LLM, load: BatchLoad, grammar: Grammar | None = None) -> EngineRun:
    """One pass. No pass sees another one's prefix cache."""
    llm.clear_prefix_cache()
    draw = random.Random(load.seed)
    low = min(16, llm.vocab_size - 1)
    prompts = [[draw.randrange(low, llm.vocab_size) for _ in range(load.input_len)] for _ in range(load.num_prompts)]
    sampling = SamplingParams(
        max_tokens=load.output_len, temperature=0.0, ignore_eos=grammar is None, detokenize=False, grammar=grammar
    )
    num_steps = _num_steps(llm)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    duration = time.perf_counter() - start
    num_tokens = sum(len(output.token_ids) for output in outputs)
    if num_tokens != load.num_prompts * load.output_len:
        raise FatalError(f"{num_tokens} tokens came out, {load.num_prompts * load.output_len} were asked for")
    return EngineRun(
        duration,
        [output.first_token_s for output in outputs],
        [output.duration_s for output in outputs],
        num_tokens,
        _num_steps(llm) - num_steps,
    )


def _num_steps(llm: LLM) -> int:
    return sum(stats.num_steps for stats in llm.engine_stats())


def _report(runs: list[EngineRun], load: BatchLoad) -> dict[str, float]:
    rates = [run.tokens_per_s for run in runs]
    median = statistics.median(rates)
    middle = min(runs, key=lambda run: abs(run.tokens_per_s - median))
    num_total = load.num_prompts * (load.input_len + load.output_len)
    return {
        "output_tokens_per_s": median,
        "output_tokens_per_s_min": min(rates),
        "output_tokens_per_s_max": max(rates),
        "total_tokens_per_s": num_total / middle.duration_s,
        "requests_per_s": load.num_prompts / middle.duration_s,
        "duration_s": middle.duration_s,
        "first_token_p50_s": statistics.median(middle.first_token_s),
        "first_token_max_s": max(middle.first_token_s),
        "latency_p50_s": statistics.median(middle.finish_s),
        "latency_max_s": max(middle.finish_s),
        "num_steps": middle.num_steps,
        **_conditions(load, len(runs)),
    }


def engine_text(title: str, report: dict[str, float]) -> str:
    """The figures as a table."""
    rows = ((name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}") for name, value in report.items())
    return table((title, ""), rows)
