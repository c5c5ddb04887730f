"""What an engine and a queue say, in the words of the hand-off ledgers, and back. Pure. The workers' sides use it."""

from __future__ import annotations

from kvrelay.core.handoff import HandoffId, HandoffOrder, KvDirection, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.engine.request import MoveListener, PrefillMode, Request
from kvrelay.engine.step import HandoffChunk
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.decode_ledger import DecodeLedger


def opened(prefill: RemotePrefillRequest, ledger: DecodeLedger, direction: KvDirection, term: int) -> de.Opened:
    """Decode side: a request whose prefill the engine wants from elsewhere. The frontend names a claimant before
    (prefill-first), or nobody does."""
    expected = ledger.expected.get(prefill.handoff_id)
    return de.Opened(
        prefill.handoff_id,
        prefill.request_id,
        prefill.block_ids,
        prefill.num_cached_tokens // ledger.rules.block_size,
        len(prefill.token_ids),
        order=HandoffOrder.DECODE_FIRST if expected is None else HandoffOrder.PREFILL_FIRST,
        direction=direction,
        claimant=None if expected is None else expected.claimant,
        term=term,
    )


def engine_request(prefill: RemotePrefillRequest, block_size: int, listener: MoveListener | None = None) -> Request:
    """Prefill side: what the engine computes. Its name is the hand-off's."""
    num_prompt = len(prefill.token_ids) - prefill.num_output_tokens
    return Request(
        str(prefill.handoff_id),
        prefill.token_ids[:num_prompt],
        prefill.sampling,
        output_token_ids=prefill.token_ids[num_prompt:],
        mode=PrefillMode.HANDOFF,
        # A block of ours that D holds only in part is computed.
        num_load_tokens=prefill.num_cached_tokens // block_size * block_size,
        priority=prefill.priority,
        tenant=prefill.tenant,
        traceparent=prefill.traceparent,
        holder=prefill.holder,
        listener=listener,
    )


def chunk_computed(handoff_id: HandoffId, chunk: HandoffChunk) -> pe.ChunkComputed:
    """Prefill side: blocks that a step has filled, with the first token after the last ones."""
    token, params = None, chunk.kv_transfer_params
    if chunk.last and params is None:
        # An engine that gets the KV by itself also samples the first token.
        token = pe.FirstToken(chunk.token_id, chunk.logprobs)
    return pe.ChunkComputed(handoff_id, BlockRun(chunk.first_block, chunk.block_ids), token, params)
