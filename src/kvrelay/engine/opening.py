"""How a decode worker opens a hand-off in any engine: its id, and the prefill that it asks for."""

from __future__ import annotations

from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.request import Request


class HandoffIds:
    """``worker_id``: the decode worker's, which names its hand-offs."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._num_opened = 0

    def of(self, request: Request) -> HandoffId:
        """The id that the request came with, as half of a pair, or else a new one."""
        if request.handoff_number:
            return HandoffId(self._worker_id, request.handoff_number)
        self._num_opened += 1
        return HandoffId(self._worker_id, self._num_opened)


def remote_prefill(
    request: Request,
    handoff_id: HandoffId,
    sampling: SamplingParams,
    block_ids: tuple[int, ...] = (),
    num_cached_tokens: int = 0,
) -> RemotePrefillRequest:
    """The prefill of ``request`` into ``block_ids``, whose first ``num_cached_tokens`` tokens are there already."""
    return RemotePrefillRequest(
        handoff_id=handoff_id,
        decode_worker_id=handoff_id.decode_worker_id,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_output_tokens=request.num_output_tokens,
        sampling=sampling,
        block_ids=block_ids,
        num_cached_tokens=num_cached_tokens,
        priority=request.priority,
        tenant=request.tenant,
    )
