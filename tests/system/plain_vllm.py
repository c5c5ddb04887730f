"""Greedy answers of vLLM by itself, for comparison: prompts come as JSON on stdin, answers leave on stdout.

Usage: python plain_vllm.py MODEL MAX_TOKENS '{"ENGINE_ARGUMENT": ...}' < prompts.json
One argument is not vLLM's: "adapter", the directory of the adapter that answers.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from kvrelay.engines.vllm.child import ask_for_tiles

    ask_for_tiles()
    prompts = json.load(sys.stdin)
    arguments = {"dtype": "float32", "block_size": 32} | json.loads(sys.argv[3])
    adapter = arguments.pop("adapter", None)
    lora = None if adapter is None else LoRARequest("own", 1, adapter)
    llm = LLM(
        sys.argv[1],
        enforce_eager=True,
        kv_cache_memory_bytes=512 * 2**20,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        enable_lora=lora is not None,
        **arguments,
    )
    sampling = SamplingParams(max_tokens=int(sys.argv[2]), temperature=0.0, ignore_eos=True, detokenize=False)
    # One at a time: batches may differ in their rounding, which a model with random weights does not forgive.
    outputs = [
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False, lora_request=lora)[0]
        for prompt in prompts
    ]
    print("answers " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
