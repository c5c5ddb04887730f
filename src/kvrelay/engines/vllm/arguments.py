"""What vLLM is started with: kvrelay's settings under vLLM's names, and the arguments that the operator adds. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from typing import Any

from kvrelay.config import WorkerConfig
from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.engines.hosted.host import CacheEvents
from kvrelay.errors import ConfigError

DATA_PARALLEL = "data_parallel_"
"""The beginning of several names."""
OURS = {
    "model": "the model is the command's argument",
    "served_model_name": "use --served-model-name",
    "tokenizer": "the frontend tokenizes",
    "skip_tokenizer_init": "the frontend tokenizes",
    "dtype": "use --dtype",
    "seed": "use --seed",
    "max_model_len": "use --max-model-len",
    "max_num_seqs": "use --max-num-seqs",
    "max_num_batched_tokens": "use --max-num-batched-tokens",
    "enable_prefix_caching": "use --no-enable-prefix-caching",
    "num_gpu_blocks_override": "use --num-blocks",
    "kv_cache_memory_bytes": "use --kv-cache-memory",
    "tensor_parallel_size": "use --tp",
    "pipeline_parallel_size": "use --pp",
    DATA_PARALLEL: "use --dp",
    "enable_expert_parallel": "use --ep",
    "enable_lora": "use --lora-dir or --max-loras",
    "lora_modules": "use --lora-dir",
    "max_loras": "use --max-loras",
    "max_lora_rank": "use --max-lora-rank",
    "max_cpu_loras": "use --max-cpu-loras",
    "distributed_executor_backend": "it follows from --tp and --pp",
    "kv_transfer_config": "the worker connects prefill and decode itself",
    "kv_events_config": "the worker publishes cache events itself",
    "scheduling_policy": "requests have priorities",
    "generation_config": "the frontend fills in defaults",
    "disable_log_stats": "the worker has metrics of its own",
    "enable_log_requests": "the frontend has --access-log",
    "worker_extension_cls": "the worker watches its processes itself",
    "shutdown_timeout": "the worker drains itself",
    "tokens_only": "the worker sets it",
    "enforce_eager": "use --enforce-eager",
}
"""Engine arguments that the worker sets, and how the operator gets what he wants."""


def engine_arguments(settings: WorkerConfig, events: CacheEvents | None) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. ``kv_events_config`` is a dictionary of its fields.

    Raises ConfigError for ``engine_args`` that are no JSON object, or that the worker sets itself.
    """
    engine, runner = settings.engine, settings.runner
    arguments: dict[str, Any] = {
        "model": str(settings.model_path),
        "dtype": runner.dtype,
        "seed": runner.seed,
        "enforce_eager": runner.enforce_eager,
        "tensor_parallel_size": runner.tp,
        "pipeline_parallel_size": runner.pp,
        # The executor within vLLM's engine process: no further process, and none that spins.
        "distributed_executor_backend": "uni" if runner.num_ranks == 1 else "mp",
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "disable_log_stats": True,
        # Only grammars need the tokenizer.
        "skip_tokenizer_init": not (settings.model_path / "tokenizer.json").is_file(),
        "worker_extension_cls": "kvrelay.engines.vllm.quiet_child.WorkerExtension",
    }
    if settings.group.ep:
        arguments["enable_expert_parallel"] = True
    if engine.max_model_len:
        arguments["max_model_len"] = engine.max_model_len
    if engine.kv_cache_memory != "auto":
        arguments["kv_cache_memory_bytes"] = parse_bytes(engine.kv_cache_memory)
    if events is not None:
        arguments["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events.endpoint,
            "replay_endpoint": events.replay,
        }
    if settings.exchanges_kv:
        is_ours = settings.vllm.vllm_connector == "kvrelay"
        connector = {"kv_connector": "KvrelayConnector", "kv_connector_module_path": "kvrelay.engines.connector.vllm"}
        arguments["kv_transfer_config"] = {
            **(connector if is_ours else {"kv_connector": "NixlConnector"}),
            "kv_role": "kv_both",
            # If a transfer fails, the decode worker computes the prompt.
            "kv_load_failure_policy": "recompute",
        }
        if is_ours:
            arguments["block_size"] = engine.block_size
        else:
            arguments["worker_extension_cls"] = "kvrelay.engines.vllm.nixl_child.NixlWorkerExtension"
    return {**arguments, **_added(settings.vllm.engine_args)}


def rank_events(events: CacheEvents, rank: int) -> CacheEvents:
    """Where vLLM's data-parallel ``rank`` publishes if it was started with ``events``: it puts its number behind the
    names of all ranks but the first, and takes only names with ``inproc`` for names."""
    return CacheEvents(*(f"{each}_dp{rank}" if rank else each for each in events))


def _added(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        added = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--engine-args is no JSON: {exc}", param="engine_args") from exc
    if not isinstance(added, dict):
        raise ConfigError('--engine-args must be a JSON object, e.g. \'{"quantization": "fp8"}\'', param="engine_args")
    for name in added:
        if reason := OURS.get(DATA_PARALLEL if name.startswith(DATA_PARALLEL) else name):
            raise ConfigError(f"--engine-args cannot set {name}: {reason}", param="engine_args")
    return added


def require_known(names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError, naming the nearest known argument, for one that vLLM does not have."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"vLLM has no engine argument {name}{hint}", param="engine_args")
