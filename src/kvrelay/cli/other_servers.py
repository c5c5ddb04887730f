"""Flags of other servers, for an error message that names ours. None of these flags is accepted."""

from __future__ import annotations

from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Our counterpart of another server's flag: our flag or argument, if there is one, and a remark."""

    ours: str = ""
    remark: str = ""


MODEL = Counterpart("MODEL", "an argument, not an option")
KV_MEMORY = Counterpart("--kv-cache-memory", "a size, e.g. 4GiB")
STEP_TOKENS = Counterpart("--max-num-batched-tokens")
CONTEXT = Counterpart("--max-model-len")
RUNNING = Counterpart("--max-num-seqs")
TENSOR_PARALLEL = Counterpart("--tp")
PIPELINE_PARALLEL = Counterpart("--pp")
DATA_PARALLEL = Counterpart("--dp", "or --decode: engines that share nothing")
EXPERT_PARALLEL = Counterpart("--ep", "over all ranks of --dp and --tp")
GRAMMARS = Counterpart(remark="not needed: llguidance is the only one")
SPLIT = Counterpart("--prefill", "kvrelay serve --prefill N --decode N, or kvrelay worker --role")
LOG = Counterpart(remark="kvrelay --log-level LEVEL, before the command")
NO_QUANTIZATION = Counterpart(remark="not supported; GGUF checkpoints are dequantized when they are loaded")
NO_LORA = Counterpart(remark="not supported: LoRA adapters")
NO_SPECULATION = Counterpart(remark="not supported: speculative decoding")
NO_OFFLOAD = Counterpart(remark="not supported: offloading to another memory")
FROM_CHECKPOINT = Counterpart(remark="not supported: it comes from the checkpoint's directory")
ALWAYS_ON = Counterpart(remark="not needed: it is always on")

COUNTERPARTS = {
    # vLLM
    "--model": MODEL,
    "--tensor-parallel-size": TENSOR_PARALLEL,
    "--pipeline-parallel-size": PIPELINE_PARALLEL,
    "--data-parallel-size": DATA_PARALLEL,
    "--data-parallel-rank": Counterpart("--dp-rank"),
    "--data-parallel-address": Counterpart("--dp-address"),
    "--enable-expert-parallel": EXPERT_PARALLEL,
    "--enable-auto-tool-choice": ALWAYS_ON,
    "--disable-uvicorn-access-log": Counterpart("--access-log", "off is the default"),
    "--guided-decoding-backend": GRAMMARS,
    "--structured-outputs-config": GRAMMARS,
    "--kv-events-config": Counterpart(remark="not needed: workers publish them to the frontends"),
    "--load-format": FROM_CHECKPOINT,
    "--download-dir": Counterpart(remark="the environment variable HF_HOME has the cache of hub ids"),
    "--gpu-memory-utilization": KV_MEMORY,
    "--kv-cache-memory-bytes": KV_MEMORY,
    "--num-gpu-blocks-override": Counterpart("--num-blocks"),
    "--swap-space": NO_OFFLOAD,
    "--cpu-offload-gb": NO_OFFLOAD,
    "--quantization": NO_QUANTIZATION,
    "--kv-cache-dtype": Counterpart("--dtype", "KV has the type of the weights"),
    "--kv-transfer-config": SPLIT,
    "--enable-chunked-prefill": ALWAYS_ON,
    "--disable-log-requests": LOG,
    "--uvicorn-log-level": LOG,
    "--tokenizer": FROM_CHECKPOINT,
    "--chat-template": FROM_CHECKPOINT,
    "--generation-config": FROM_CHECKPOINT,
    "--hf-overrides": FROM_CHECKPOINT,
    "--trust-remote-code": Counterpart(remark="not supported: no code of a checkpoint is ever run"),
    "--enable-lora": NO_LORA,
    "--lora-modules": NO_LORA,
    "--speculative-config": NO_SPECULATION,
    "--ssl-certfile": Counterpart("--tls-cert"),
    "--ssl-keyfile": Counterpart("--tls-key"),
    "--api-server-count": Counterpart("--frontends"),
    # SGLang
    "--model-path": MODEL,
    "--tp-size": TENSOR_PARALLEL,
    "--pp-size": PIPELINE_PARALLEL,
    "--dp-size": DATA_PARALLEL,
    "--ep-size": EXPERT_PARALLEL,
    "--grammar-backend": GRAMMARS,
    "--disaggregation-bootstrap-port": Counterpart(remark="not needed: workers find each other by discovery"),
    "--enable-metrics": ALWAYS_ON,
    "--mem-fraction-static": KV_MEMORY,
    "--max-running-requests": RUNNING,
    "--max-queued-requests": Counterpart("--max-num-waiting"),
    "--max-total-tokens": Counterpart("--num-blocks", "tokens divided by --block-size"),
    "--chunked-prefill-size": STEP_TOKENS,
    "--max-prefill-tokens": STEP_TOKENS,
    "--context-length": CONTEXT,
    "--page-size": Counterpart("--block-size"),
    "--random-seed": Counterpart("--seed"),
    "--disable-radix-cache": Counterpart("--no-enable-prefix-caching"),
    "--disable-cuda-graph": Counterpart("--enforce-eager"),
    "--disaggregation-mode": SPLIT,
    "--disaggregation-transfer-backend": Counterpart("--transport"),
    "--speculative-algorithm": NO_SPECULATION,
    "--lora-paths": NO_LORA,
    # TGI
    "--model-id": MODEL,
    "--num-shard": TENSOR_PARALLEL,
    "--hostname": Counterpart("--host"),
    "--max-concurrent-requests": Counterpart("--max-waiting-requests"),
    "--max-input-tokens": CONTEXT,
    "--max-batch-prefill-tokens": STEP_TOKENS,
    "--quantize": NO_QUANTIZATION,
    # llama.cpp
    "--ctx-size": CONTEXT,
    "--threads": Counterpart("--num-threads"),
    "--parallel": RUNNING,
    "--batch-size": STEP_TOKENS,
    "--n-gpu-layers": NO_OFFLOAD,
    "--model-draft": NO_SPECULATION,
    # Dynamo
    "--router-mode": Counterpart("--router"),
    "--kv-overlap-score-weight": Counterpart("--overlap-weight"),
    "--router-temperature": Counterpart("--temperature"),
    "--is-prefill-worker": SPLIT,
}


def counterpart_of(flag: str, command: click.Command) -> str | None:
    """The replacement for another server's ``flag``, in words; None if no known server has it."""
    known = COUNTERPARTS.get(flag)
    if known is None:
        return None
    if not known.ours:
        return known.remark
    words = known.ours + (f" ({known.remark})" if known.remark else "")
    return f"here it is {words}" if known.ours in _names(command) else "not supported by this command"


def _names(command: click.Command) -> set[str]:
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return options | {
        param.name.upper() for param in command.params if isinstance(param, click.Argument) and param.name
    }
