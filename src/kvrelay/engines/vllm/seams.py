"""What is used of vLLM, by shape: names, and the parameters that they are called with. Pure.

vLLM changes from minor version to minor version, and says nothing of what stays. So a version is not accepted by its
number: each seam is looked at when the worker starts, and one that is missing is named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple


class Seam(NamedTuple):
    """``name`` in ``module``, with dots for what is inside a class. ``parameters``: of a call, or the fields of a
    class."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


_ENGINE, _SAMPLING = "vllm.v1.engine.async_llm", "vllm.sampling_params"
_TRANSFER, _CONNECTOR = "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector.v1.base"

COMMON = (
    Seam("vllm.platforms", "current_platform.is_cpu"),
    Seam("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config"),
    Seam(
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        ("worker_extension_cls", "skip_tokenizer_init", "scheduling_policy", "kv_events_config", "kv_transfer_config"),
    ),
    Seam("vllm.config", "KVEventsConfig", ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint")),
    Seam(_ENGINE, "AsyncLLM.from_vllm_config", ("vllm_config", "disable_log_stats", "stat_loggers")),
    Seam("vllm.v1.metrics.loggers", "StatLoggerBase", ("vllm_config", "engine_index")),
    Seam("vllm.v1.metrics.loggers", "StatLoggerBase.record", ("scheduler_stats",)),
    Seam(_ENGINE, "AsyncLLM.generate", ("prompt", "sampling_params", "request_id", "lora_request", "priority")),
    Seam(_ENGINE, "AsyncLLM.add_lora", ("lora_request",)),
    Seam(_ENGINE, "AsyncLLM.remove_lora", ("lora_id",)),
    Seam("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    Seam(_ENGINE, "AsyncLLM.abort", ("request_id",)),
    Seam(_ENGINE, "AsyncLLM.check_health"),
    Seam(_ENGINE, "AsyncLLM.is_paused"),
    Seam(_ENGINE, "AsyncLLM.reset_prefix_cache"),
    Seam(_ENGINE, "AsyncLLM.collective_rpc", ("method", "timeout")),
    Seam(_ENGINE, "AsyncLLM.shutdown", ("timeout",)),
    Seam("vllm.v1.engine.exceptions", "EngineDeadError"),
    Seam("vllm.exceptions", "GracefulHTTPError"),
    Seam("vllm.exceptions", "VLLMClientError"),
    Seam("vllm.inputs", "TokensPrompt"),
    Seam(_SAMPLING, "RequestOutputKind.DELTA"),
    Seam(_SAMPLING, "StructuredOutputsParams", ("json", "regex", "grammar")),
    Seam(
        _SAMPLING,
        "SamplingParams",
        ("output_kind", "structured_outputs", "extra_args", "ignore_eos", "min_tokens", "detokenize", "logit_bias"),
    ),
)
NIXL = (
    Seam("vllm.config", "KVTransferConfig", ("kv_connector", "kv_role", "kv_load_failure_policy")),
    Seam(_ENGINE, "AsyncLLM.notify_kv_transfer_request_rejected", ("request_id", "kv_transfer_params")),
)
KVRELAY = (
    Seam("vllm.config", "KVTransferConfig", ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")),
    Seam(_CONNECTOR, "KVConnectorMetadata"),
    Seam(_CONNECTOR, "KVConnectorRole.SCHEDULER"),
    Seam(_CONNECTOR, "KVConnectorBase_V1", ("vllm_config", "role", "kv_cache_config")),
    Seam(_CONNECTOR, "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    Seam(_CONNECTOR, "KVConnectorBase_V1.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    Seam(_CONNECTOR, "KVConnectorBase_V1.build_connector_meta", ("scheduler_output",)),
    Seam(_CONNECTOR, "SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    Seam(_CONNECTOR, "KVConnectorBase_V1.register_kv_caches", ("kv_caches",)),
    Seam(_CONNECTOR, "KVConnectorBase_V1.handle_preemptions", ("kv_connector_metadata",)),
    Seam(_CONNECTOR, "KVConnectorBase_V1.start_load_kv", ("forward_context",)),
    Seam(_CONNECTOR, "KVConnectorBase_V1.wait_for_save"),
    Seam(_CONNECTOR, "KVConnectorBase_V1.get_finished", ("finished_req_ids",)),
    Seam(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("num_scheduled_tokens", "kv_connector_block_state", "preempted_req_ids"),
    ),
    Seam("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank"),
    Seam(_TRANSFER, "get_kv_transfer_group"),
)


def seams_of(connector: str | None) -> tuple[Seam, ...]:
    """Those of a worker with this ``--vllm-connector``; None: without a connector."""
    if connector is None:
        return COMMON
    return COMMON + (KVRELAY if connector == "kvrelay" else NIXL)


def first_missing(seams: Iterable[Seam], load: Callable[[str], ModuleType]) -> str | None:
    """What vLLM lacks, for a message; None: nothing. ``load`` imports a module, or raises ImportError."""
    for seam in seams:
        try:
            found: object = load(seam.module)
        except ImportError as exc:
            return f"the module {seam.module} ({exc})"
        for part in seam.name.split("."):
            if not hasattr(found, part):
                return f"{seam.name} in {seam.module}"
            found = getattr(found, part)
        for name in seam.parameters:
            if not _takes(found, name):
                return f"the parameter {name} of {seam.name} in {seam.module}"
    return None


def _takes(found: object, name: str) -> bool:
    if not callable(found):
        return False
    try:
        parameters = inspect.signature(found).parameters
    except ValueError:
        return True  # compiled: it does not tell
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
