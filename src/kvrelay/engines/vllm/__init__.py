"""Engine ``vllm``: vLLM computes, in this worker's own process group, without its HTTP server.

    frontend ──> worker (BackendHost) ── VllmBackend ── AsyncLLM ── ZMQ ──> EngineCore (a child process of the worker)

Tokens go in and come out: vLLM neither tokenizes nor detokenizes. vLLM schedules and holds the KV; its cache events
feed kvrelay's prefix index. ``arguments`` decides what vLLM is started with, ``translation`` puts a request into its
terms; both are pure. ``library`` is the only module that imports vLLM. In the engine process ``scheduling`` tells the
worker of each step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay.config import GroupConfig, WorkerConfig
from kvrelay.control.scratch import ScratchDirectory
from kvrelay.core.layout import paged_kv
from kvrelay.core.step_cost import CostSource
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.rendezvous import store_port
from kvrelay.engine.contract import EngineFacts
from kvrelay.engines.hosted.host import BackendHost, CacheEvents
from kvrelay.engines.vllm.adapters import LoadedAdapters, adapter_arguments, read_adapters
from kvrelay.engines.vllm.arguments import engine_arguments, rank_events
from kvrelay.engines.vllm.backend import VllmBackend
from kvrelay.engines.vllm.library import Started, fingerprint, free_port, start_vllm
from kvrelay.errors import ConfigError
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.executors.host_memory import ANYWHERE, HostMemory

MEETING_TIMEOUT_S = 60.0


def from_settings(settings: WorkerConfig, worker_id: str, memory: HostMemory = ANYWHERE) -> BackendHost:
    """The registry's builder: loads the model. Takes half a minute.

    Raises ConfigError (also if vLLM is not installed), CheckpointError, UnsupportedModelError, and EngineDeadError if
    vLLM ends while it starts.
    """
    model = checkpoint_facts(settings.model_path)
    adapters = read_adapters(settings.vllm.lora_dir, settings.model_path, settings.model)
    reserved = adapter_arguments(adapters, settings.vllm)
    # Sockets of the cache events: within this host, and for this user only.
    directory = ScratchDirectory("kvrelay-vllm-")
    try:
        events = _events(directory.path) if settings.engine.enable_prefix_caching else None
        reserved |= _meet(settings.group) if settings.group.dp > 1 else {}
        started = start_vllm(reserved | engine_arguments(settings, events), settings, memory)
        try:
            max_adapters = reserved["max_cpu_loras"] if settings.vllm.max_loras else 0
            facts = _facts(settings, started, model.vocab_size, tuple(each.id for each in adapters), max_adapters)
        except BaseException:
            started.engine.shutdown()
            raise
    except BaseException:
        directory.remove()
        raise
    staging = started.staging
    loaded = LoadedAdapters(
        started.engine,
        started.terms.adapter,
        adapters,
        model_path=settings.model_path,
        max_adapters=facts.max_adapters,
        max_rank=reserved.get("max_lora_rank", 0),
    )
    backend = VllmBackend(
        started.engine,
        started.terms,
        settings.engine.step_timeout_s,
        on_close=directory.remove,
        reports=None if staging is None else staging.reports,
        adapters=loaded,
    )
    return BackendHost(
        facts,
        settings.engine,
        backend,
        events and rank_events(events, settings.group.rank),
        worker_id=worker_id,
        eos_token_ids=model.eos_token_ids,
        staging=None if staging is None else staging.memory,
        teller=started.steps,
        sets_pace=settings.vllm.vllm_chunks_by_objective,
        drafts=started.drafts,
        adapters=loaded,
    )


def _events(directory: Path) -> CacheEvents:
    return CacheEvents(f"ipc://{directory}/inproc-events", f"ipc://{directory}/inproc-replay")


def _meet(group: GroupConfig) -> dict[str, Any]:
    """vLLM's arguments for this rank, in its mode for load balancers of others. Rank 0 takes a port, at which its vLLM
    will wait for theirs, and tells the other ranks. Raises PeerLostError, ConfigError."""
    address = GroupAddress.parse(group.dp_address)
    host = address.host or "127.0.0.1"
    return {
        "data_parallel_size": group.dp,
        "data_parallel_rank": group.dp_rank,
        "data_parallel_external_lb": True,
        "data_parallel_address": host,
        "data_parallel_rpc_port": store_port(address, 0 if group.dp_rank else free_port(host), MEETING_TIMEOUT_S),
    }


def _facts(
    settings: WorkerConfig, started: Started, vocab_size: int, adapters: tuple[str, ...], max_adapters: int
) -> EngineFacts:
    """vLLM's pool in blocks of ours. Raises ConfigError unless its blocks are whole numbers of ours."""
    block_size = settings.engine.block_size
    if started.block_size % block_size:
        raise ConfigError(
            f"vLLM's blocks have {started.block_size} tokens, which is no multiple of --block-size {block_size}",
            param="block_size",
        )
    staging = started.staging
    return EngineFacts(
        # Without staging only the block size is meaningful: it cuts the prefixes.
        kv_layout=paged_kv(1, 1, block_size, 1, "int32") if staging is None else staging.place.layout,
        num_blocks=started.num_blocks * (started.block_size // block_size),
        max_model_len=started.max_model_len,
        vocab_size=vocab_size,
        # What is inside a block is vLLM's own: only equal vLLMs with equal blocks can read it.
        weights_fingerprint=fingerprint(settings.model_path, staging.kind if staging is not None else ""),
        hands_over_kv=settings.exchanges_kv,
        moves_kv=settings.exchanges_kv and staging is None,
        adapters=adapters,
        max_adapters=max_adapters,
        moved=started.moved,
        step_costs=CostSource.NONE if started.steps is None else CostSource.MEASURED,
    )
