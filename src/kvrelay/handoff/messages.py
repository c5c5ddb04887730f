"""The messages between the two workers of a hand-off. The protocol and the ownership of blocks are in ``handoff.base``.

    ToDecode     HandoffClaim, HandoffProgress, HandoffDone (or HandoffReady, pull), HandoffReleased
    ToPrefill    HandoffGrant or HandoffRefused, HandoffRecall, HandoffAbandon, HandoffFetched

Checksums. A hand-off is checksummed in both directions when either end asks for it: P by ``wants_checksums`` in its
claim, D by the checksums in its grant. P then sends checksums of the blocks that it writes, and verifies the hit blocks
that it reads; D verifies received blocks before its request continues. A checksum covers ``core.checksums.unit_tokens``
tokens and does not depend on a worker's layout.
"""

from __future__ import annotations

import msgspec

from kvrelay.core.handoff import HandoffId, HandoffOrder, KvDirection
from kvrelay.core.layout import KV
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.token_ids import TokenId


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """The leading blocks of a prompt that a worker wants from the prefix cache of another. Tokens, not hashes: the
    holder compares them, so a collision gives no one KV of another text. ``cache_salt``: the request's."""

    token_ids: tuple[TokenId, ...]
    cache_salt: str | None = None


class _OfGrant(msgspec.Struct, frozen=True):
    """A message of one grant of a hand-off."""

    handoff_id: HandoffId
    generation: int


class HandoffClaim(msgspec.Struct, frozen=True, tag=True):
    """P to D: I have the request and compute it; may I touch your blocks?

    With ``prefix`` no request waits at D: P reads as much of this as D's prefix cache has, under a grant as any other,
    and releases it.

    ``wants_checksums``: P accepts no hit blocks without checksums. ``term`` is P's (``KvMetadata.term``).
    ``block_size``: tokens per block of P; 0: as many as D's. ``regions``: what it moves (``core.layout``), by name.
    ``tail_tokens``: how many tokens before the prompt's end it stops; D computes those.
    """

    handoff_id: HandoffId
    prefill_worker_id: str
    kv_compatibility: str
    wants_checksums: bool = False
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    term: int = 0
    block_size: int = 0
    regions: tuple[str, ...] = (KV,)
    tail_tokens: int = 0
    prefix: Prefix | None = None


class HandoffGrant(_OfGrant, frozen=True, tag=True):
    """D to P: yes. From here on D's ``block_ids`` are quarantined until this generation is done or released.

    The ids override those of the queue entry: a second claimant gets fresh blocks. ``checksums``: those of the hits
    (the first ``num_cached_tokens``), in order. If not None (even empty), P must checksum what it writes. ``term`` is
    D's. ``block_size``: tokens per block of D; 0: as many as P's. ``regions``: those of D's blocks, by name.
    ``tail_tokens``: how many tokens before the prompt's end D takes over.
    """

    block_ids: tuple[int, ...]
    num_cached_tokens: int
    checksums: tuple[int, ...] | None = None
    direction: KvDirection = KvDirection.PUSH
    term: int = 0
    block_size: int = 0
    secret: int = 0
    """A random number that only this claimant gets. Its messages about this grant carry it."""
    regions: tuple[str, ...] = (KV,)
    tail_tokens: int = 0


class HandoffRefused(msgspec.Struct, frozen=True, tag=True):
    """D to P: no (the request is gone, prefilled locally, claimed by a live peer, or the pools do not match)."""

    handoff_id: HandoffId
    reason: str


class HandoffRecall(_OfGrant, frozen=True, tag=True):
    """D to P, prefill-first, once: if you have not begun to compute it, give it back. P then answers HandoffReleased;
    else it says nothing, and goes on."""


class HandoffAbandon(_OfGrant, frozen=True, tag=True):
    """D to P: no request waits for it any more, and D does not read from P. P stops writing and answers
    HandoffReleased."""


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


class HandoffProgress(_OfGrant, frozen=True, tag=True):
    """P to D, every few seconds from the grant on: I am still computing it."""

    secret: int = 0


class HandoffDone(_OfGrant, frozen=True, tag=True):
    """P to D, after the last write: every block is in place; carries the first token (the "bonus" token),
    unless P has stopped short of the prompt's end.

    It comes as the notification of that write. P repeats it over the request plane until it gets HandoffFetched.
    ``num_transferred_bytes`` and ``prefill_s`` feed D's metrics. ``checksums``: of all tokens that D lacked, in order;
    computed from P's memory before they were sent. ``marks``: P's, of its phases (``kvrelay.marks``).
    """

    token_id: int | None
    logprobs: PositionLogprobs | None
    num_transferred_bytes: int
    prefill_s: float
    checksums: tuple[int, ...] | None = None
    secret: int = 0
    marks: bytes = b""


class HandoffReady(_OfGrant, frozen=True, tag=True):
    """P to D, pull only: everything is computed and lies in P's ``block_ids``, from the first that D lacks to the
    last.

    P keeps them, and repeats this message, until it gets HandoffFetched or HandoffAbandon, or D is fenced.

    ``kv_transfer_params`` is set if the engines move the KV themselves: a JSON object that P's engine made for D's, and
    that no one else reads. There are no block ids then. ``token_id`` None: D's engine samples the first token itself,
    for such an engine or because P has stopped short of the prompt's end.
    """

    block_ids: tuple[int, ...]
    token_id: int | None
    logprobs: PositionLogprobs | None
    prefill_s: float
    checksums: tuple[int, ...] | None = None
    secret: int = 0
    kv_transfer_params: bytes | None = None
    marks: bytes = b""


class HandoffFetched(_OfGrant, frozen=True, tag=True):
    """D to P. Push: D has received HandoffDone. Pull: D has read everything and reads no more."""


HandoffReport = HandoffProgress | HandoffDone | HandoffReady
"""What P says under a grant."""
ToDecode = HandoffClaim | HandoffReport | HandoffReleased
ToPrefill = HandoffGrant | HandoffRefused | HandoffRecall | HandoffAbandon | HandoffFetched
