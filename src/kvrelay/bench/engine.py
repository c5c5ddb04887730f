"""The engine alone, offline: a batch of random prompts in, tokens out."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from pathlib import Path

import msgspec

from kvrelay.bench.report.table import table
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.grammar import Grammar
from kvrelay.errors import FatalError
from kvrelay.llm import LLM, SamplingParams


class BatchLoad(msgspec.Struct, frozen=True):
    """The batch: ``num_prompts`` random prompts of ``input_len`` tokens, ``output_len`` tokens each, EOS ignored."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0


class EngineRun(msgspec.Struct, frozen=True):
    """One timed pass over the batch; latencies in seconds, one per request, from its submission."""

    duration_s: float
    first_token_s: list[float]
    finish_s: list[float]
    num_output_tokens: int
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s


def run_engine_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """Load the model, warm up, run the batch ``num_runs`` times; returns medians and spread."""
    with open_llm(model_path, runner, engine) as llm:
        run_once(llm, warm_up_load(load))
        runs = [run_once(llm, load) for _ in range(num_runs)]
    return _report(runs, load)


def open_llm(model_path: Path, runner: RunnerConfig, engine: EngineConfig) -> LLM:
    return LLM(model_path, **dataclasses.asdict(runner), **dataclasses.asdict(engine))


def warm_up_load(load: BatchLoad) -> BatchLoad:
    return BatchLoad(min(8, load.num_prompts), min(32, load.input_len), 4)


def prompts_of(load: BatchLoad, vocab_size: int) -> list[list[int]]:
    """Random tokens, without the first few of the vocabulary, which often have a meaning of their own."""
    draw = random.Random(load.seed)
    low = min(16, vocab_size - 1)
    return [[draw.randrange(low, vocab_size) for _ in range(load.input_len)] for _ in range(load.num_prompts)]


def run_once(llm: LLM, load: BatchLoad, grammar: Grammar | None = None) -> EngineRun:
    """One pass. No pass sees another one's prefix cache."""
    llm.clear_prefix_cache()
    prompts = prompts_of(load, llm.vocab_size)
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
    firsts, ends = [output.first_token_s for output in outputs], [output.duration_s for output in outputs]
    return EngineRun(duration, firsts, ends, num_tokens, _num_steps(llm) - num_steps)


def _num_steps(llm: LLM) -> int:
    return sum(stats.tokens.num_steps for stats in llm.engine_stats())


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
        **conditions(load, len(runs)),
    }


def conditions(load: BatchLoad, num_runs: int) -> dict[str, float]:
    """For the report: the load, and how often it ran."""
    sizes = {"num_prompts": load.num_prompts, "input_len": load.input_len, "output_len": load.output_len}
    return {"num_runs": num_runs, **sizes}


def engine_text(title: str, report: dict[str, float]) -> str:
    """The figures as a table."""
    rows = ((name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}") for name, value in report.items())
    return table((title, ""), rows)
