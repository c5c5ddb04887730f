"""The events and actions of the prefill side's ledger. Values only.

Actions are carried out in the order given. Those with an answer (ReadHits, VerifyHits, ChecksumChunk, Write, Keep) are
answered by the event named in their docstring, exactly once, after any time.
"""

from __future__ import annotations

from kvrelay.core.handoff import HandoffOrder, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.handoff import messages as hm
from kvrelay.handoff.base import EndReason, LeaseEnded, LeaseLost, OfGrant, OfHandoff, Registered, Tick, Value


class FirstToken(Value, frozen=True):
    """The token that comes with the last chunk. None: the decode worker computes the prompt's tail, and samples it."""

    token_id: int | None
    logprobs: PositionLogprobs | None = None


# -- events -----------------------------------------------------------------------------------------------------------


class Pulled(Value, frozen=True):
    """A prefill to compute, from the queue (decode-first) or from the router (prefill-first).

    The decode worker holds the first ``num_cached_tokens`` of its tokens already; with prefill-first its grant may name
    more. ``term`` is our own. ``may_return``: it may go back to the queue if the decode worker cannot be reached from
    here.
    """

    prefill: RemotePrefillRequest
    term: int
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    may_return: bool = False


class PrefixWanted(OfHandoff, frozen=True):
    """Our engine wants ``blocks`` from the prefix cache of this worker. ReportLoaded follows exactly once: after at
    most ``timeout_s`` if there is no grant by then. ``term`` is our own."""

    decode_worker_id: str
    blocks: BlockRun
    prefix: hm.Prefix
    term: int
    timeout_s: float


class Declined(OfHandoff, frozen=True):
    """An entry that is not computed here. Its owner gets a release and computes it."""

    decode_worker_id: str
    reason: EndReason


class Cancelled(OfHandoff, frozen=True):
    """Prefill-first: the frontend has aborted the request."""


class Recalled(OfGrant, frozen=True):
    """The decode worker has asked for it back, and the engine has not begun it."""


class ClaimFailed(OfHandoff, frozen=True):
    """The claim could not be sent, or the peer's memory cannot be reached."""


class Unreachable(OfHandoff, frozen=True):
    """The decode worker, or its entry in discovery, cannot be found from here: the claim was not sent."""


class EngineRefused(OfHandoff, frozen=True):
    """The engine refused the request (or has died)."""


class LoadRequested(OfHandoff, frozen=True):
    """The engine requests hit blocks that the decode worker holds and we lack."""

    blocks: BlockRun


class ChunkComputed(OfHandoff, frozen=True):
    """These blocks are computed. The last chunk carries the first token, or, without blocks, the ``kv_transfer_params``
    of an engine that moves the KV itself."""

    blocks: BlockRun
    first_token: FirstToken | None = None
    kv_transfer_params: bytes | None = None

    @property
    def is_last(self) -> bool:
        return self.first_token is not None or self.kv_transfer_params is not None


class HitsRead(OfHandoff, frozen=True):
    """The answer to ReadHits."""

    ok: bool


class HitsVerified(OfHandoff, frozen=True):
    """The answer to VerifyHits: whether the read blocks equal the decode worker's."""

    ok: bool


class ChunkChecksummed(OfHandoff, frozen=True):
    """The answer to ChecksumChunk: ``core.checksums.unit_checksums`` of its blocks; None if they could not be read."""

    checksums: tuple[int, ...] | None


class Written(OfHandoff, frozen=True):
    """The answer to Write."""

    ok: bool


class Kept(OfHandoff, frozen=True):
    """The answer to Keep: the blocks in which the KV is now; None if it could not be moved."""

    block_ids: tuple[int, ...] | None


class ReleaseAcknowledged(OfHandoff, frozen=True):
    """The decode worker has received every release of this hand-off that was sent before now."""


class DecodeConnectionLost(Value, frozen=True):
    """The connection to a decode worker has ended."""

    worker_id: str


PrefillEvent = (
    Pulled
    | PrefixWanted
    | Declined
    | Cancelled
    | Recalled
    | ClaimFailed
    | Unreachable
    | hm.HandoffGrant
    | hm.HandoffRefused
    | EngineRefused
    | LoadRequested
    | ChunkComputed
    | HitsRead
    | HitsVerified
    | ChunkChecksummed
    | Written
    | Kept
    | hm.HandoffAbandon
    | hm.HandoffFetched
    | ReleaseAcknowledged
    | DecodeConnectionLost
    | Registered
    | LeaseEnded
    | LeaseLost
    | Tick
)

# -- actions ----------------------------------------------------------------------------------------------------------


class Compute(OfHandoff, frozen=True):
    """Give the request to the engine. Of the tokens that D holds, it asks for those that we lack (LoadRequested)."""


class SendClaim(Value, frozen=True):
    """Connect if need be, then claim. Unreachable if another prefill worker may reach it, ClaimFailed if that would be
    as impossible there, or if the claim may have arrived."""

    worker_id: str
    message: hm.HandoffClaim


class ReadHits(OfGrant, frozen=True):
    """Read hit blocks of D (``there``) into ours: the tokens that both hold. Answered by HitsRead.

    Blocks of the two workers may differ in size.
    """

    here: BlockRun
    there: BlockRun


class VerifyHits(OfHandoff, frozen=True):
    """Compare what was read with ``checksums`` (None: none were sent). Answered by HitsVerified."""

    blocks: BlockRun
    checksums: tuple[int, ...] | None


class ReportLoaded(OfHandoff, frozen=True):
    """The engine's load has ended: with its first ``num_blocks``. If it failed, the engine computes them. ``reason``:
    why a prefix has not come."""

    ok: bool
    num_blocks: int = 0
    reason: EndReason | None = None


class ChecksumChunk(OfHandoff, frozen=True):
    """Checksum our blocks, in the order of these actions. Answered by ChunkChecksummed."""

    block_ids: tuple[int, ...]


class Write(OfGrant, frozen=True):
    """Write our blocks into D's, after every earlier Write of this hand-off, then deliver ``done`` after the bytes.

    The tokens that both hold: those of D (``there``) begin after its hits, so there may be none. Blocks of the two
    workers may differ in size. Never posted after our fence, nor after an earlier Write of this hand-off has failed.
    Answered by Written.
    """

    here: BlockRun
    there: BlockRun
    done: hm.HandoffDone | None


class Keep(OfHandoff, frozen=True):
    """Move the KV of these blocks out of the engine's pool, if there is room for it elsewhere. Answered by Kept.
    FreeBlocks frees it wherever it is."""

    block_ids: tuple[int, ...]


class SendToDecode(Value, frozen=True):
    """Send a message to the decode worker, over a new connection if necessary. A failure has no consequence: whatever
    needs an answer (HandoffDone, HandoffReady) is repeated until there is one."""

    worker_id: str
    message: hm.HandoffReport


class StopComputing(OfHandoff, frozen=True):
    """Stop computing it. Its blocks stay in use until FreeBlocks."""


class FreeBlocks(OfHandoff, frozen=True):
    """No transfer touches its blocks any more. Occurs once for each Compute."""


class Computed(OfHandoff, frozen=True):
    """Nothing is left to compute: another prefill may be pulled. Occurs once for each hand-off, before Settle."""


class Settle(OfHandoff, frozen=True):
    """Acknowledge the queue entry: nothing of it is left to do here. Occurs once for each Pulled and each Declined,
    unless Return does."""

    reason: EndReason | None


class Return(OfHandoff, frozen=True):
    """Give the queue entry back, for a prefill worker that can reach its decode worker. This worker may pull it again:
    the ledger has forgotten it."""


class SendRelease(Value, frozen=True):
    """Send a release to the decode worker, over a new connection if necessary. ReleaseAcknowledged follows when it has
    arrived; otherwise this action is repeated."""

    worker_id: str
    message: hm.HandoffReleased
