"""Events that tests of the ledgers have in common."""

from __future__ import annotations

from typing import Any

from kvrelay.core.handoff import HandoffOrder, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.handoff import prefill_events as pe


def pulled(
    num_tokens: int = 20,
    num_cached: int = 8,
    handoff_id: Any = "h",
    *,
    order: HandoffOrder = HandoffOrder.DECODE_FIRST,
    may_return: bool = False,
) -> pe.Pulled:
    """A prefill for decode worker "d", in our term 1."""
    tokens = tuple(range(num_tokens))
    request = RemotePrefillRequest(handoff_id, "d", f"r-{handoff_id}", tokens, 0, SamplingParams(), (), num_cached)
    return pe.Pulled(request, 1, order, may_return)
