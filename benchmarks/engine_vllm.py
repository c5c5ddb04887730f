"""The engine beside vLLM's, offline: the same batches of random prompts through both ``LLM`` classes, in turn.

    .venv-vllm/bin/python -m benchmarks.engine_vllm MODEL [--at-once 1 16 128] [--rounds 5] [--dtype float32]

Each engine is loaded once, in a process of its own on all cores, and runs one pass when told to; meanwhile the other
sleeps. No pass sees another one's prefix cache. The ratio is that of neighbouring passes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.table import table
from kvrelay.engines.vllm.library import preloaded_libraries

SIDES = ("kvrelay", "vllm")
PAUSE_S = 1.5
"""vLLM's worker spins on its queue for 1 s after its last message, on a core that the other side's pass would need.
(Intel's OpenMP, which vLLM computes with, spins for 0.2 s.)"""
Pass = Callable[[list[list[int]], int], object]
"""Prompts and tokens per answer in; returns when all answers are complete."""


class Engine:
    """One side's process."""

    def __init__(self, side: str, given: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "benchmarks.engine_vllm", given.model, "--side", side, "--dtype", given.dtype]
        environment = dict(os.environ)
        if side == "vllm":
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment |= {
                "LD_PRELOAD": ":".join(preloaded_libraries()),
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "HF_HUB_OFFLINE": "1",
            }
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        )
        self._answer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def run(self, num_prompts: int, num_input: int, num_output: int, seed: int) -> float:
        """Seconds of one pass, after a pause in which the other side's threads go to sleep."""
        assert self._process.stdin is not None
        time.sleep(PAUSE_S)
        self._process.stdin.write(json.dumps([num_prompts, num_input, num_output, seed]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["seconds"])
        raise SystemExit("an engine has ended; what it said is above")


def measure(given: argparse.Namespace) -> list[list[str]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(side, given)) for side in SIDES]
        rows = []
        for at_once in given.at_once:
            size = (at_once, given.input_tokens, given.output_tokens)
            seconds: list[list[float]] = [[], []]
            for number in range(-1, given.rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    took_s = engines[which].run(*size, seed=number)
                    if number >= 0:
                        seconds[which].append(took_s)
            rows.append([str(at_once), *_figures(seconds, size[0] * size[2])])
        return rows


def _figures(seconds: Sequence[Sequence[float]], num_tokens: int) -> list[str]:
    ratios = sorted(vllm / ours for ours, vllm in zip(*seconds, strict=True))
    rates = [num_tokens / statistics.median(each) for each in seconds]
    return [
        *(f"{rate:,.0f}" for rate in rates),
        f"{statistics.median(ratios):.2f}",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
    ]


def serve_side(given: argparse.Namespace) -> None:
    """A pass for each line of standard input, until it ends."""
    vocab_size, run = {"kvrelay": _kvrelay, "vllm": _vllm}[given.side](given)
    print(json.dumps({"seconds": 0.0}), flush=True)
    for line in sys.stdin:
        num_prompts, num_input, num_output, seed = json.loads(line)
        draw = random.Random(seed)
        prompts = [[draw.randrange(16, vocab_size) for _ in range(num_input)] for _ in range(num_prompts)]
        start_s = time.perf_counter()
        run(prompts, num_output)
        print(json.dumps({"seconds": time.perf_counter() - start_s}), flush=True)


def _kvrelay(given: argparse.Namespace) -> tuple[int, Pass]:
    from kvrelay.llm import LLM, SamplingParams

    llm = LLM(given.model, dtype=given.dtype, max_num_seqs=256, enable_prefix_caching=False)

    def run(prompts: list[list[int]], num_output: int) -> object:
        return llm.generate(
            prompts, SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False)
        )

    return llm.vocab_size, run


def _vllm(given: argparse.Namespace) -> tuple[int, Pass]:
    from vllm import LLM, SamplingParams

    llm: Any = LLM(given.model, dtype=given.dtype, enforce_eager=True, max_model_len=2048, enable_prefix_caching=False)

    def run(prompts: list[list[int]], num_output: int) -> object:
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    return int(llm.llm_engine.model_config.get_vocab_size()), run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 128], help="Prompts in a batch.")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        serve_side(given)
        return
    rows = measure(given)
    print(f"{given.model}, {given.dtype}, {given.input_tokens}/{given.output_tokens}; {describe_machine()}")
    print(table(("at once", "kvrelay tok/s", "vLLM tok/s", "ratio", "from, to"), rows))


if __name__ == "__main__":
    main()
