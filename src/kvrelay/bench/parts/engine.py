"""The engine alone, offline: a batch of random prompts in, tokens out."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from kvrelay.bench.report.table import table
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.base import Executor
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.errors import FatalError


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The batch: ``num_prompts`` random prompts of ``input_len`` tokens, ``output_len`` tokens each, EOS ignored."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One timed pass over the batch; latencies in seconds, one per request, from the start of the pass."""

    duration_s: float
    first_token_s: list[float]
    finish_s: list[float]
    num_output_tokens: int
    num_steps: int


def run_engine_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """Load the model, warm up, run the batch ``num_runs`` times; returns medians and spread."""
    from kvrelay.executors.torch import build_executor

    executor = build_executor(model_path, runner, engine)
    try:
        executor.warm_up()
        _run_once(executor, engine, BatchLoad(min(8, load.num_prompts), min(32, load.input_len), 4))
        runs = [_run_once(executor, engine, load) for _ in range(num_runs)]
    finally:
        executor.shutdown()
    return _report(runs, load)


def _run_once(executor: Executor, engine: EngineConfig, load: BatchLoad) -> EngineRun:
    """A new scheduler and block pool over the same executor, so that no run sees another run's prefix cache."""
    core = EngineCore(executor, engine, MonotonicClock(), worker_id="bench")
    draw = random.Random(load.seed)
    sampling = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=True)
    low = min(16, executor.vocab_size - 1)
    for number in range(load.num_prompts):
        tokens = tuple(draw.randrange(low, executor.vocab_size) for _ in range(load.input_len))
        core.add_request(Request(str(number), tokens, sampling))
    first: dict[str, float] = {}
    finish: dict[str, float] = {}
    num_tokens = num_steps = 0
    start = time.perf_counter()
    while core.has_unfinished():
        outputs = core.step().outputs
        now = time.perf_counter() - start
        num_steps += 1
        for output in outputs:
            num_tokens += len(output.token_ids)
            first.setdefault(output.request_id, now)
            if output.finish_reason is not None:
                finish[output.request_id] = now
    duration = time.perf_counter() - start
    core.check_integrity()
    if num_tokens != load.num_prompts * load.output_len:
        raise FatalError(f"the engine returned {num_tokens} of {load.num_prompts * load.output_len} tokens")
    return EngineRun(duration, list(first.values()), list(finish.values()), num_tokens, num_steps)


def _report(runs: list[EngineRun], load: BatchLoad) -> dict[str, float]:
    rates = [run.num_output_tokens / run.duration_s for run in runs]
    median = statistics.median(rates)
    middle = min(runs, key=lambda run: abs(run.num_output_tokens / run.duration_s - median))
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
        "num_runs": len(runs),
        "num_prompts": load.num_prompts,
        "input_len": load.input_len,
        "output_len": load.output_len,
    }


def engine_text(title: str, report: dict[str, float]) -> str:
    """The figures as a table."""
    rows = ((name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}") for name, value in report.items())
    return table((title, ""), rows)
