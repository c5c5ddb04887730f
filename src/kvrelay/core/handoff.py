"""How a hand-off is named, ordered and queued: what engine, queue and frontend know of it.

The messages between its two workers are in ``handoff.messages``, the protocol in ``handoff.base``.
"""

from __future__ import annotations

import enum
import secrets

import msgspec

from kvrelay.core.activity import Seconds
from kvrelay.core.sampling import SamplingParams


class HandoffOrder(enum.StrEnum):
    """Which worker gets the request first."""

    DECODE_FIRST = "decode-first"
    """D opens the hand-off; any prefill worker pulls it from the queue."""
    PREFILL_FIRST = "prefill-first"
    """P and D are chosen up front and get the request independently, so a claim may reach D before the request does."""


class OrderPolicy(enum.StrEnum):
    """Which order an operator or a request asks for. AUTO: the cheaper one, decided for each request."""

    AUTO = "auto"
    DECODE_FIRST = "decode-first"
    PREFILL_FIRST = "prefill-first"

    @property
    def unpaired(self) -> HandoffOrder:
        """Of a request that has got no pair: its decode worker places the prefill, unless prefill-first is forced."""
        return HandoffOrder.PREFILL_FIRST if self is OrderPolicy.PREFILL_FIRST else HandoffOrder.DECODE_FIRST


class QueueClass(enum.StrEnum):
    """Classes of prefills in the queue, in order: streams that have begun, then by priority."""

    RESUMED = "resumed"
    HIGH = "high"
    """A priority below 0; a lower number is served first."""
    NORMAL = "normal"
    LOW = "low"


class KvDirection(enum.StrEnum):
    """Which worker moves the KV, and so whose memory a peer touches."""

    PUSH = "push"
    """P writes into the blocks that D has granted."""
    PULL = "pull"
    """P keeps its blocks until D has read them (GET). So it is, too, if the engines move the KV themselves: D's engine
    gets it with the ``kv_transfer_params`` of P's engine, and no block ids are exchanged."""


class Pair(msgspec.Struct, frozen=True, array_like=True):
    """The two workers of a prefill-first request: the frontend chooses both and sends the request to both.

    ``begins_within_s``: a prefill worker that has not begun by then is late, and the decode worker asks for the prompt
    back; 0: it waits for as long as it takes.
    """

    prefill_worker_id: str
    decode_worker_id: str
    begins_within_s: Seconds = 0.0


class PrefixHolder(msgspec.Struct, frozen=True, array_like=True):
    """A worker whose prefix cache has the first ``num_tokens`` tokens of a prompt, as the router knows by events."""

    worker_id: str
    num_tokens: int


FIRST_PREFIX = 2**61
"""Numbers of prefixes begin here; those of pairs (``pair_id.FIRST_NUMBER``) where they end."""


class HandoffId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One hand-off of one incarnation of a decode worker, whose id is new at every start.

    Decode-first, ``number`` counts from 1. Prefill-first, both workers derive it from the request id
    (``core/pair_id.py``), because P names the hand-off before D knows of it. The reader of a prefix draws it. Valid
    only in messages of the worker ``decode_worker_id``.
    """

    decode_worker_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.decode_worker_id}#{self.number}"

    @property
    def is_of_prefix(self) -> bool:
        """Whether ``new_prefix_id`` may have made it, and so neither a decode worker nor a pair."""
        return FIRST_PREFIX <= self.number < 2 * FIRST_PREFIX


LEAVING_LENDS_S = 10.0
"""A worker that leaves lends its cache for so long, if others serve: while it answers, or sessions wait for tools."""


def new_prefix_id(holder_id: str) -> HandoffId:
    """For the reading of a prefix: beside the numbers that workers count, below those of pairs."""
    return HandoffId(holder_id, FIRST_PREFIX | secrets.randbits(61))


class RemotePrefillRequest(msgspec.Struct, frozen=True):
    """A prefill for another worker: requested by a decode worker's engine, then pushed to the prefill queue.

    The engine leaves out the last fields, from ``decode_address`` on: the worker sets them when it pushes the request.
    ``token_ids`` is everything to be prefilled: the prompt, and for a continued request the ``num_output_tokens``
    tokens that were already generated, less the tail (``KVLayout.tail_tokens``). ``block_ids`` are D's blocks for them,
    the first ``num_cached_tokens`` tokens of which are already computed there (a multiple of the block size). Block ids
    only: memory is described in discovery. ``timeout_s`` after it was pushed, by the queue server's clock, the entry is
    void: D has prefilled locally by then (0: never). A duration, because no two machines' clocks are ever compared.
    ``tenant`` is the API key's name, and ``traceparent`` the trace's header, as in ``GenerateRequest``. ``holder``:
    whose prefix the prefill worker may read.
    """

    handoff_id: HandoffId
    decode_worker_id: str
    request_id: str
    token_ids: tuple[int, ...]
    num_output_tokens: int
    sampling: SamplingParams
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    priority: int = 0
    decode_address: str = ""
    model: str = ""
    kv_compatibility: str = ""
    timeout_s: float = 0.0
    version: int = 1
    tenant: str = ""
    traceparent: str = ""
    holder: PrefixHolder | None = None

    @property
    def queue_class(self) -> QueueClass:
        """The class in which it waits in the prefill queue. A priority orders the requests of one API key only, and the
        queue knows no keys: there all keys are equal, first come, first served."""
        if self.num_output_tokens > 0:
            return QueueClass.RESUMED
        if self.priority == 0 or self.tenant:
            return QueueClass.NORMAL
        return QueueClass.HIGH if self.priority < 0 else QueueClass.LOW


def without_tail(prefill: RemotePrefillRequest, num_tokens: int) -> RemotePrefillRequest:
    """Stop so many tokens short. The decode worker computes those and samples the first token; nothing is sampled
    before."""
    if not num_tokens:
        return prefill
    return msgspec.structs.replace(
        prefill,
        token_ids=prefill.token_ids[:-num_tokens],
        num_output_tokens=max(prefill.num_output_tokens - num_tokens, 0),
        sampling=SamplingParams(max_tokens=0, cache_salt=prefill.sampling.cache_salt, adapter=prefill.sampling.adapter),
    )
