"""The messages between workers about a hand-off, and the entries of the prefill queue.

The protocol, the order of these messages, and the ownership of blocks are in ``kvrelay/handoff/base.py``. This module
has only the values, because the request plane and the prefill queue carry them.

    P to D    HandoffClaim, HandoffProgress, HandoffDone (or HandoffReady, pull), HandoffReleased
    D to P    HandoffGrant or HandoffRefused, HandoffAbandon, HandoffFetched

Checksums. A hand-off is checksummed in both directions when either end asks for it: P by ``wants_checksums`` in its
claim, D by the checksums in its grant. P then sends checksums of the blocks that it writes, and verifies the hit blocks
that it reads; D verifies received blocks before its request continues. A checksum covers ``core.checksums.unit_tokens``
tokens and does not depend on a worker's layout.
"""

from __future__ import annotations

import enum

import msgspec

from kvrelay.core.sampling import SamplingParams


class HandoffOrder(enum.StrEnum):
    """Which worker gets the request first."""

    DECODE_FIRST = "decode-first"
    """D opens the hand-off; any prefill worker pulls it from the queue."""
    PREFILL_FIRST = "prefill-first"
    """P and D are chosen up front and get the request independently, so a claim may reach D before the request does."""


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
    """The two workers of a prefill-first request: the frontend chooses both and sends the request to both."""

    prefill_worker_id: str
    decode_worker_id: str


class HandoffId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One hand-off of one incarnation of a decode worker, whose id is new at every start.

    Decode-first, ``number`` counts from 1. Prefill-first, both workers derive it from the request id
    (``core/pair_id.py``), because P names the hand-off before D knows of it. Valid only in messages of the worker
    ``decode_worker_id``.
    """

    decode_worker_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.decode_worker_id}#{self.number}"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token; ``rank`` is 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token at one position and its likeliest alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class RemotePrefillRequest(msgspec.Struct, frozen=True):
    """A prefill for another worker: requested by a decode worker's engine, then pushed to the prefill queue.

    The engine leaves out the last fields, from ``decode_address`` on: the worker sets them when it pushes the request.
    ``token_ids`` is everything to be prefilled: the prompt, and for a continued request the ``num_output_tokens``
    tokens that were already generated. ``block_ids`` are D's blocks for them, the first ``num_cached_tokens`` tokens of
    which are already computed there (a multiple of the block size). Block ids only: memory is described in discovery.
    ``timeout_s`` after it was pushed, by the queue server's clock, the entry is void: D has prefilled locally by then
    (0: never). A duration, because no two machines' clocks are ever compared. ``tenant`` is the API key's name, as in
    ``GenerateRequest``.
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

    @property
    def queue_class(self) -> QueueClass:
        """The class in which it waits in the prefill queue. A priority orders the requests of one API key only, and the
        queue knows no keys: there all keys are equal, first come, first served."""
        if self.num_output_tokens > 0:
            return QueueClass.RESUMED
        if self.priority == 0 or self.tenant:
            return QueueClass.NORMAL
        return QueueClass.HIGH if self.priority < 0 else QueueClass.LOW


class HandoffClaim(msgspec.Struct, frozen=True, tag=True):
    """P to D: I have the request and compute it; may I touch your blocks?

    ``wants_checksums``: P accepts no hit blocks without checksums. ``term`` is P's (``KvMetadata.term``).
    ``block_size``: tokens per block of P; 0: as many as D's.
    """

    handoff_id: HandoffId
    prefill_worker_id: str
    kv_compatibility: str
    wants_checksums: bool = False
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    term: int = 0
    block_size: int = 0


class HandoffGrant(msgspec.Struct, frozen=True, tag=True):
    """D to P: yes. From here on D's ``block_ids`` are quarantined until this generation is done or released.

    The ids override those of the queue entry: a second claimant gets fresh blocks. ``checksums``: those of the hits
    (the first ``num_cached_tokens``), in order. If not None (even empty), P must checksum what it writes. ``term`` is
    D's. ``block_size``: tokens per block of D; 0: as many as P's.
    """

    handoff_id: HandoffId
    generation: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    checksums: tuple[int, ...] | None = None
    direction: KvDirection = KvDirection.PUSH
    term: int = 0
    block_size: int = 0
    secret: int = 0
    """A random number that only this claimant gets. Its messages about this grant carry it."""


class HandoffRefused(msgspec.Struct, frozen=True, tag=True):
    """D to P: no (the request is gone, prefilled locally, claimed by a live peer, or the pools do not match)."""

    handoff_id: HandoffId
    reason: str


class HandoffAbandon(msgspec.Struct, frozen=True, tag=True):
    """D to P: no request waits for it any more, and D does not read from P. P stops writing and answers
    HandoffReleased."""

    handoff_id: HandoffId
    generation: int


class HandoffReleased(msgspec.Struct, frozen=True, tag=True):
    """P to D: P touches no block of this hand-off any more, under any past or future grant, and never claims it
    again.

    ``error`` is the reason, for the log. ``kv_transfer_params``: P's engine has computed KV that D's engine has not
    fetched; only D's can tell it to free that.
    """

    handoff_id: HandoffId
    prefill_worker_id: str
    error: str | None = None
    kv_transfer_params: bytes | None = None


class HandoffProgress(msgspec.Struct, frozen=True, tag=True):
    """P to D, every few seconds from the grant on: I am still computing it."""

    handoff_id: HandoffId
    generation: int
    secret: int = 0


class HandoffDone(msgspec.Struct, frozen=True, tag=True):
    """P to D, after the last write: every block is in place; carries the first token (the "bonus" token).

    It comes as the notification of that write. P repeats it over the request plane until it gets HandoffFetched.
    ``num_transferred_bytes`` and ``prefill_s`` feed D's metrics. ``checksums``: of all tokens that D lacked, in order;
    computed from P's memory before they were sent.
    """

    handoff_id: HandoffId
    generation: int
    token_id: int
    logprobs: PositionLogprobs | None
    num_transferred_bytes: int
    prefill_s: float
    checksums: tuple[int, ...] | None = None
    secret: int = 0


class HandoffReady(msgspec.Struct, frozen=True, tag=True):
    """P to D, pull only: everything is computed and lies in P's ``block_ids``, from the first that D lacks to the
    last.

    P keeps them, and repeats this message, until it gets HandoffFetched or HandoffAbandon, or D is fenced.

    ``kv_transfer_params`` is set if the engines move the KV themselves: a JSON object that P's engine made for D's, and
    that no one else reads. There are no block ids then, and D's engine samples the first token itself (``token_id``
    None).
    """

    handoff_id: HandoffId
    generation: int
    block_ids: tuple[int, ...]
    token_id: int | None
    logprobs: PositionLogprobs | None
    prefill_s: float
    checksums: tuple[int, ...] | None = None
    secret: int = 0
    kv_transfer_params: bytes | None = None


class HandoffFetched(msgspec.Struct, frozen=True, tag=True):
    """D to P. Push: D has received HandoffDone. Pull: D has read everything and reads no more."""

    handoff_id: HandoffId
    generation: int
