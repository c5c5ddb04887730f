"""Engine ``openai``: a running server, for example vLLM, computes; the worker connects it to the cluster.

    frontend ──> worker (engine openai) ── HTTP, token ids ──> server
                    discovery, routing, admission, drain, migration as for every worker

Requests to the server are completions by token ids, and it returns token ids if it can (``return_token_ids``). So
nothing is tokenized twice, and an answer that migrates continues at the exact token. If a server returns only text, the
text is tokenized. Its cache is known from its cache events, or estimated from the requests that it was sent
(``engines/hosted``). Its KV stays with it, unless it exchanges KV with servers of its kind (``kv_transfer``): then
workers in front of them are prefill and decode workers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvrelay.config import WorkerConfig
from kvrelay.core.layout import paged_kv
from kvrelay.core.step_cost import CostSource
from kvrelay.engine.contract import EngineFacts
from kvrelay.engines.hosted.host import BackendHost, CacheEvents
from kvrelay.engines.openai.backend import ServerBackend
from kvrelay.engines.openai.kv_transfer import kv_transfer_for
from kvrelay.engines.openai.server import Description, UpstreamServer
from kvrelay.engines.openai.text_tokens import TextTokenizer
from kvrelay.errors import ConfigError
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.executors.host_memory import ANYWHERE, HostMemory

DEFAULT_NUM_BLOCKS = 16384


def from_settings(settings: WorkerConfig, worker_id: str, memory: HostMemory = ANYWHERE) -> BackendHost:
    """The registry's builder: waits for the server. Not from a thread with a running event loop.

    Raises ConfigError, CheckpointError, and EngineDeadError if the server does not become ready.
    """
    config, upstream = settings.engine, settings.upstream
    if not upstream.upstream:
        raise ConfigError("engine openai needs --upstream URL, the server that computes", param="upstream")
    if settings.runner.num_ranks > 1:
        raise ConfigError("engine openai has one rank; --tp and --pp are the server's", param="tp")
    kv_transfer = kv_transfer_for(upstream)
    model = checkpoint_facts(settings.model_path)
    server = asyncio.run(_describe(settings, {} if kv_transfer is None else kv_transfer.probe_fields()))
    facts = EngineFacts(
        # Only the block size is meaningful: it cuts the prefixes.
        kv_layout=paged_kv(1, 1, config.block_size, 1, "int32"),
        num_blocks=config.num_blocks or DEFAULT_NUM_BLOCKS,
        max_model_len=min(filter(None, (model.max_model_len, config.max_model_len, server.max_model_len))),
        vocab_size=model.vocab_size,
        weights_fingerprint=f"upstream {server.model} {upstream.upstream_kv_transfer}",
        hands_over_kv=kv_transfer is not None,
        moves_kv=kv_transfer is not None,
        prefills_here=kv_transfer is None or kv_transfer.prefills_here,
        step_costs=CostSource.ESTIMATED,
        adapter=server.adapter,
    )
    events = CacheEvents(upstream.upstream_kv_events, upstream.upstream_kv_replay)
    tokenizer = None if server.tells_token_ids else TextTokenizer(settings.model_path)
    return BackendHost(
        facts,
        config,
        ServerBackend(upstream, server, tokenizer, kv_transfer),
        events if events.endpoint else None,
        worker_id=worker_id,
        eos_token_ids=model.eos_token_ids,
    )


async def _describe(settings: WorkerConfig, probe_fields: dict[str, Any]) -> Description:
    server = UpstreamServer(settings.upstream)
    try:
        # Any token is suitable for a request that only shows the form of the answer.
        return await server.describe(1, probe_fields)
    finally:
        await server.close()
