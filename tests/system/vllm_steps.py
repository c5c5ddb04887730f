"""One run of vLLM with our scheduler in it: three short prompts are being answered when a long one comes. What each
step was leaves on stdout, with the answers.

Usage: python vllm_steps.py MODEL ITL_S SHORT LONG NUM_TOKENS
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
    model, itl_s, short, long, num_tokens = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:])
    log = StepLog.create()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    os.environ.update({SCHEDULER: "vllm.v1.core.sched.scheduler.Scheduler", STEP_LOG: log.path})
    from vllm import EngineArgs, LLMEngine, SamplingParams

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
