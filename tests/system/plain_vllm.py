"""Greedy answers of vLLM by itself, for comparison. A line on stdin asks, as JSON: the arguments of ``answer`` by
their names. A line on stdout answers.

To import vLLM takes eight seconds of CPU. It is done once: each question is answered by a fork of this process, so that
no engine knows of another one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ANSWERS, FAILED = "answers ", "failed "
"""How lines of answers begin; vLLM writes others."""


def main() -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    import vllm.lora.request
    import vllm.v1.engine.llm_engine  # noqa: F401 - forks have it

    from kvrelay.engines.vllm.child import ask_for_tiles

    ask_for_tiles()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            try:
                answers = answer(**json.loads(line))
                print(f"\n{ANSWERS}{json.dumps(answers)}", flush=True)
                os._exit(0)
            except BaseException:  # noqa: BLE001 - the process's outermost frame
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"\n{FAILED}{os.waitstatus_to_exitcode(status)}", flush=True)


def answer(model: str, max_tokens: int, arguments: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """``arguments`` are those of vLLM's engine, but for "adapter": the directory of the adapter that answers."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    arguments = {"dtype": "float32", "block_size": 32} | arguments
    adapter = arguments.pop("adapter", None)
    lora = None if adapter is None else LoRARequest("own", 1, adapter)
    llm = LLM(
        model,
        enforce_eager=True,
        kv_cache_memory_bytes=512 * 2**20,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        enable_lora=lora is not None,
        **arguments,
    )
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    # One at a time: batches may differ in their rounding, which a model with random weights does not forgive.
    outputs = [
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False, lora_request=lora)[0]
        for prompt in prompts
    ]
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
