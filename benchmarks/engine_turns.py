"""The engine's batch on two sides in turns: free beside bound by a grammar, several ranks beside one process, ``LLM``
beside the engine core that it drives, decode steps of one sequence beside a plain read of the weights' bytes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from safetensors import safe_open

from kvrelay.bench.commands.parts import batch_options, run_batch
from kvrelay.bench.engine import BatchLoad, EngineRun, conditions, open_llm, prompts_of, run_once, warm_up_load
from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.cores import usable_cores
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.errors import ConfigError
from kvrelay.executors.torch import build_executor
from kvrelay.executors.torch.shards import shard_files

ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    """{"type":"array","minItems":100000,"items":{"type":"object","additionalProperties":false,
    "properties":{"name":{"type":"string","minLength":1,"maxLength":20},"age":{"type":"integer","minimum":0},
    "tags":{"type":"array","items":{"enum":["red","green","blue"]}}},"required":["name","age","tags"]}}""",
)
"""No answer ends before its limit, so that free and bound answers have the same length."""
ANY_TEXT = Grammar(GrammarKind.REGEX, r"(.|\n){4096,}")
"""What a model says by itself obeys it, but for the ends that it asks for."""

Run = Callable[[BatchLoad], EngineRun]


@click.command()
@click.option("--structured", "measure", flag_value="structured", help="Free, and bound by a grammar.")
@click.option("--obeying", "measure", flag_value="obeying", help="The same, bound to any text; the core alone.")
@click.option("--beside-one-process", "measure", flag_value="ranks", help="Ranks, and one process.")
@click.option("--beside-core", "measure", flag_value="core", help="LLM, and the engine core alone.")
@click.option("--beside-read", "measure", flag_value="read", help="Steps of one sequence, and a read of the weights.")
@batch_options
def engine_turns(measure: str | None, **given: Any) -> None:
    """What a grammar costs the engine (default), several ranks beside one process, LLM beside the engine core, or
    decode steps of one sequence beside a plain read of the weights.

    Example: python -m benchmarks engine-turns --beside-one-process --tp 2 --num-threads 2
    """
    measures = {
        "obeying": run_obeying_benchmark,
        "ranks": run_ranks_benchmark,
        "core": run_core_benchmark,
        "read": run_read_benchmark,
    }
    run_batch(measures.get(measure or "", run_structured_benchmark), "engine in turns", given)


def run_structured_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """The batch in turns: free, and with every answer bound by a grammar; ``num_runs`` passes of each. Returns the
    medians, and of each pair of passes what the grammar costs, as a part of the free throughput."""
    with open_llm(model_path, runner, engine) as llm:
        free, bound = (partial(run_once, llm, grammar=grammar) for grammar in (None, ENDLESS))
        pairs = _in_turns(free, bound, load, num_runs)
    costs = [1 - free.duration_s / bound.duration_s for free, bound in pairs]
    return _compared(pairs, ("free", "bound"), "cost", costs, load)


def run_obeying_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """As ``run_structured_benchmark``, by the engine core alone, with a grammar that allows any text but its end."""
    with _core(model_path, runner, engine) as core:
        core.executor.prepare(SamplingParams(grammar=ANY_TEXT))
        free, bound = (partial(_step_through, core, grammar=grammar) for grammar in (None, ANY_TEXT))
        pairs = _in_turns(free, bound, load, num_runs)
    costs = [bound.duration_s / free.duration_s - 1 for free, bound in pairs]
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
    with open_llm(model_path, runner, engine) as ranks_llm, open_llm(model_path, one, engine) as one_llm:
        pairs = _in_turns(partial(run_once, ranks_llm), partial(run_once, one_llm), load, num_runs)
    ratios = [single.duration_s / spread.duration_s for spread, single in pairs]
    return {**_compared(pairs, ("ranks", "one_process"), "ratio", ratios, load), "num_ranks": runner.num_ranks}


def run_core_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """The batch in turns: through ``LLM``, and through the engine core, which the caller steps; ``num_runs`` passes of
    each. Returns the medians, and of each pair of passes LLM's throughput over that of the core."""
    with open_llm(model_path, runner, engine) as llm, _core(model_path, runner, engine) as core:
        pairs = _in_turns(partial(run_once, llm), partial(_step_through, core), load, num_runs)
    ratios = [alone.duration_s / through.duration_s for through, alone in pairs]
    return _compared(pairs, ("llm", "core"), "ratio", ratios, load)


def run_read_benchmark(
    model_path: Path, runner: RunnerConfig, engine: EngineConfig, load: BatchLoad, num_runs: int
) -> dict[str, float]:
    """In turn: one sequence of ``load``, and reads of as many bytes as a step reads of weights, by as many threads.

    Returns the medians in bytes per second, and of each pair the step's rate over that of the read. A step also reads
    KV, so a short prompt shows what the weights alone take. Raises ConfigError for answers of one token, and for a
    checkpoint of which a step does not read every weight.
    """
    if load.output_len < 2:
        raise ConfigError("--beside-read times the steps after the first token", param="output_len")
    num_bytes = _weight_bytes(model_path)
    memory = torch.zeros(num_bytes // 4).fill_(1)
    one = msgspec.structs.replace(load, num_prompts=1)
    rates: list[tuple[float, float]] = []
    with _core(model_path, runner, engine) as core:
        torch.set_num_threads(runner.num_threads or len(usable_cores()))
        _step_through(core, warm_up_load(one))
        for _ in range(num_runs):
            run = _step_through(core, one)
            step_s = (run.finish_s[0] - run.first_token_s[0]) / (one.output_len - 1)
            rates.append((num_bytes / step_s, num_bytes / min(_read_s(memory) for _ in range(3))))
    ratios = [step / read for step, read in rates]
    return {
        "weights_bytes": num_bytes,
        **{f"{name}_bytes_per_s": statistics.median(each) for name, each in zip(("step", "read"), zip(*rates))},
        **{"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)},
        **conditions(one, num_runs),
    }


def _read_s(memory: torch.Tensor) -> float:
    start_s = time.perf_counter()
    memory.sum()
    return time.perf_counter() - start_s


def _weight_bytes(model_path: Path) -> int:
    """The bytes, as the checkpoint stores them, of the weights that a step of one sequence reads."""
    sizes: dict[str, int] = {}
    for file in shard_files(model_path):
        with safe_open(str(file), framework="pt") as handle:
            sizes |= {name: handle.get_tensor(name).nbytes for name in handle.keys()}  # noqa: SIM118 - no mapping
    if any(".experts." in name for name in sizes):
        raise ConfigError("--beside-read needs a model without experts: a step reads only some of them", param="model")
    if "lm_head.weight" in sizes:  # else the embedding is the head, too
        del sizes["model.embed_tokens.weight"]
    return sum(sizes.values())


@contextmanager
def _core(model_path: Path, runner: RunnerConfig, engine: EngineConfig) -> Iterator[EngineCore]:
    executor = build_executor(model_path, runner, engine)
    executor.warm_up()
    try:
        yield EngineCore(executor, engine, MonotonicClock(), worker_id="core")
    finally:
        executor.shutdown()


def _step_through(core: EngineCore, load: BatchLoad, grammar: Grammar | None = None) -> EngineRun:
    """One pass of the batch, without anything around the core."""
    core.clear_cache()
    prompts = prompts_of(load, core.executor.vocab_size)
    sampling = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=grammar is None, grammar=grammar)
    num_steps = core.scheduler.num_steps
    first_s: dict[str, float] = {}
    finish_s: list[float] = []
    start_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        core.add_request(Request(f"r{number}", prompt, sampling))
    while len(finish_s) < len(prompts):
        outputs = core.step().outputs
        now_s = time.perf_counter() - start_s
        for output in outputs:
            first_s.setdefault(output.request_id, now_s)
            if output.finish_reason is not None:
                finish_s.append(now_s)
    duration_s = time.perf_counter() - start_s
    num_tokens = load.num_prompts * load.output_len
    return EngineRun(duration_s, list(first_s.values()), finish_s, num_tokens, core.scheduler.num_steps - num_steps)


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
