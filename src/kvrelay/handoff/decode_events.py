"""The events and actions of the decode side's ledger. Values only.

Actions are carried out in the order given. Those with an answer (AllocateLoan, LendPrefix, ChecksumHits, Verify, Fetch)
are answered by the event named in their docstring, exactly once, after any time.
"""

from __future__ import annotations

from kvrelay.core.handoff import HandoffOrder, KvDirection
from kvrelay.core.layout import BlockRun
from kvrelay.handoff import messages as hm
from kvrelay.handoff.base import (
    Connection,
    EndReason,
    LeaseEnded,
    LeaseLost,
    OfGrant,
    OfHandoff,
    Registered,
    Tick,
    Value,
)

# -- events -----------------------------------------------------------------------------------------------------------


class Opened(OfHandoff, frozen=True):
    """A request waits for a remote prefill, and the engine has lent ``block_ids`` as loan 1.

    The first ``num_hit_blocks`` are computed already. Pull may open without blocks: they are allocated when P is ready.
    ``num_tokens`` is the number to be prefilled. ``claimant``: the one prefill worker
    that may claim it (prefill-first); None: any (decode-first). ``term`` is our own; pull needs it.
    """

    request_id: str
    block_ids: tuple[int, ...]
    num_hit_blocks: int
    num_tokens: int
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    direction: KvDirection = KvDirection.PUSH
    claimant: str | None = None
    term: int = 0


class Expected(OfHandoff, frozen=True):
    """Prefill-first: the request has arrived and waits for blocks; ``claimant`` may claim before they are allocated.

    Followed by Opened, or by Closed if the request ends first.
    """

    claimant: str
    begins_within_s: float = 0.0
    """As in ``Pair``."""


class ClaimantGone(OfHandoff, frozen=True):
    """Prefill-first: the frontend reports that the claimant has refused the request or is lost."""


class Closed(OfHandoff, frozen=True):
    """The request has ended by itself (cancelled, failed)."""


class PushFailed(OfHandoff, frozen=True):
    """The entry could not be queued."""


class Claimed(Value, frozen=True):
    """A claim has arrived over ``connection``. ``term`` is our own; a claim of a prefix needs it."""

    claim: hm.HandoffClaim
    connection: Connection
    term: int = 0


class LoanAllocated(OfHandoff, frozen=True):
    """The engine's answer to AllocateLoan: blocks for the whole request, fresh after its hits; None if no blocks are
    free. To LendPrefix: the cached blocks."""

    loan: int
    block_ids: tuple[int, ...] | None


class HitsChecksummed(OfGrant, frozen=True):
    """The answer to ChecksumHits; None if the blocks could not be read."""

    checksums: tuple[int, ...] | None


class GrantNotSent(OfGrant, frozen=True):
    """SendGrant found no connection: its claimant will never get the grant."""


class Done(Value, frozen=True):
    """Push: every write of a generation has arrived. ``connection``: where it was said; None: as a notification."""

    message: hm.HandoffDone
    connection: Connection | None = None


class Offered(Value, frozen=True):
    """Pull: P has computed everything and keeps it for us. ``connection`` is the message's connection."""

    message: hm.HandoffReady
    connection: Connection


class FetchEnded(OfGrant, frozen=True):
    """Pull: the answer to Fetch. No read of ours touches either side's blocks any more. With ``kv_transfer_params`` and
    without ``ok`` D's engine has perhaps not asked P's, which must free the blocks by itself."""

    ok: bool


class Verified(OfGrant, frozen=True):
    """The answer to Verify: whether the blocks equal those that were sent."""

    ok: bool


class ClaimantConnectionLost(Value, frozen=True):
    """A connection has ended. Its peer may still live and write."""

    connection: Connection


class NoPrefillWorker(Value, frozen=True):
    """The last prefill worker takes no more work."""


DecodeEvent = (
    Opened
    | Expected
    | ClaimantGone
    | Closed
    | PushFailed
    | Claimed
    | LoanAllocated
    | HitsChecksummed
    | GrantNotSent
    | hm.HandoffProgress
    | Done
    | Offered
    | FetchEnded
    | Verified
    | hm.HandoffReleased
    | ClaimantConnectionLost
    | Registered
    | LeaseEnded
    | LeaseLost
    | NoPrefillWorker
    | Tick
)

# -- actions ----------------------------------------------------------------------------------------------------------


class Push(OfHandoff, frozen=True):
    """Put a hand-off's entry into the prefill queue. PushFailed follows if that is impossible."""


class AllocateLoan(OfHandoff, frozen=True):
    """Lend blocks as loan ``loan`` to a hand-off: fresh ones after its hits. Answered by LoanAllocated.

    The request keeps its blocks until Resume names a loan.
    """

    loan: int


class LendPrefix(OfHandoff, frozen=True):
    """Lend what the prefix cache has of ``prefix`` as loan 1. Answered by LoanAllocated: None, if there is nothing."""

    prefix: hm.Prefix


class ChecksumHits(OfGrant, frozen=True):
    """Checksum these hit blocks. Answered by HitsChecksummed."""

    block_ids: tuple[int, ...]


class SendGrant(Value, frozen=True):
    """From here on ``worker_id`` may write to the blocks of ``loan``; 0: there are none. GrantNotSent follows if it
    cannot be sent."""

    worker_id: str
    connection: Connection
    message: hm.HandoffGrant
    loan: int


class SendToPrefill(Value, frozen=True):
    """Send a message to a prefill worker. A failure to send has no consequence."""

    connection: Connection
    message: hm.HandoffRefused | hm.HandoffRecall | hm.HandoffAbandon | hm.HandoffFetched


class Fetch(OfGrant, frozen=True):
    """Pull: read P's blocks (``there``), of ``remote_block_size`` tokens each, into ours: the tokens that both hold.

    With ``kv_transfer_params`` there are no blocks: the engine reads, as they say. Answered by FetchEnded, when no part
    of it moves any more.
    """

    worker_id: str
    here: BlockRun = BlockRun(0, ())
    there: BlockRun = BlockRun(0, ())
    remote_block_size: int = 0
    kv_transfer_params: bytes | None = None


class Verify(OfGrant, frozen=True):
    """Compare the blocks ``block_ids`` with ``checksums`` (None: none were sent). Answered by Verified.

    ``num_units``: the number of units of tokens (``core.checksums``) of these blocks, from the first, with content.
    """

    worker_id: str
    block_ids: tuple[int, ...]
    checksums: tuple[int, ...] | None
    num_units: int


class EndLoan(OfHandoff, frozen=True):
    """No peer touches the blocks of this loan any more: give them back to the engine."""

    loan: int


class Resume(OfHandoff, frozen=True):
    """The blocks of ``loan`` hold the request's KV: they are its blocks from now on. The message has its first
    token. With ``kv_transfer_params`` the engine continues already.

    Occurs at most once for a hand-off, before the loan's end.
    """

    request_id: str
    loan: int
    message: hm.HandoffDone | hm.HandoffReady


class Discard(OfHandoff, frozen=True):
    """P's engine keeps KV that our engine has not fetched and will not: let it be freed. May come twice."""

    kv_transfer_params: bytes


class Avoid(Value, frozen=True):
    """The worker has failed hand-offs in a row: for a while its claims are refused. The ledger has done it."""

    worker_id: str


class ComputeHere(OfHandoff, frozen=True):
    """No KV will arrive. A loan that is still out keeps its blocks: use others."""

    request_id: str
    reason: EndReason
