"""Runs of vLLM with our scheduler in it, one for each objective: three short prompts are being answered when a long one
comes. What each step was leaves on stdout, with the answers, a line for each run.

To import vLLM takes nine seconds of CPU. It is done once: each run is a fork, so that no engine knows of another one.

Usage: python vllm_steps.py MODEL SHORT LONG NUM_TOKENS ITL_S ...
"""

from __future__ import annotations

import json
import os
import sys

import msgspec

from kvrelay.core.step_cost import StepCost, StepPace
from kvrelay.engines.hosted.step_log import StepLog
from kvrelay.engines.vllm.scheduling import NAME, SCHEDULER, STEP_LOG


def main() -> None:
    model, *counts = sys.argv[1:5]
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    import vllm.v1.engine.llm_engine  # noqa: F401 - forks have it

    for itl_s in map(float, sys.argv[5:]):
        if (child := os.fork()) == 0:
            try:
                run(model, itl_s, *map(int, counts))
                sys.stdout.flush()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - the process's outermost frame
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


def run(model: str, itl_s: float, short: int, long: int, num_tokens: int) -> None:
    from vllm import EngineArgs, LLMEngine, SamplingParams

    log = StepLog.create()
    os.environ.update({SCHEDULER: "vllm.v1.core.sched.scheduler.Scheduler", STEP_LOG: log.path})

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model,
            dtype="float32",
            block_size=32,
            enforce_eager=True,
            kv_cache_memory_bytes=512 * 2**20,
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            max_num_batched_tokens=2048,
            scheduler_cls=NAME,
        )
    )
    # A step takes 1 ms, and 10 us more for each prefill token: whatever it takes here.
    log.write_pace(StepPace.keeping(StepCost(0.001, 0.001, 1e-5, 0.0, 0.0, 0.0), 0.0, itl_s))
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    answers: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)

    for number in range(3):
        prompt = [(31 * number + at) % 500 + 20 for at in range(short)]
        engine.add_request(f"short-{number}", {"prompt_token_ids": prompt}, sampling)
    for _ in range(3):
        step()
    engine.add_request("long", {"prompt_token_ids": [(at * 7) % 500 + 20 for at in range(long)]}, sampling)
    while engine.has_unfinished_requests():
        step()
    steps = [(msgspec.structs.astuple(work), seconds) for work, seconds in log.read_steps().taken]
    print("found " + json.dumps({"steps": steps, "answers": answers, "is_on": log.read_state().is_on}))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
