"""The events and actions of the prefill side's ledger. Values only.

Actions are carried out in the order given. Those with an answer (Read, VerifyHits, ChecksumChunk, Write) are answered
by the event named in their docstring, exactly once, after any time.
"""

from __future__ import annotations

from kvrelay.core.handoff import HandoffId, HandoffOrder
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.handoff.base import EndReason, Value
from kvrelay.handoff.messages import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffFetched,
    HandoffGrant,
    HandoffProgress,
    HandoffReady,
    HandoffRefused,
    HandoffReleased,
)


class Blocks(Value, frozen=True):
    """Some of our blocks: ``block_ids[i]`` is ours for the request's block number ``first_block + i``. Blocks of other
    workers may hold more or fewer tokens."""

    first_block: int
    block_ids: tuple[int, ...]


class FirstToken(Value, frozen=True):
    """The token that comes with the last chunk."""

    token_id: int
    logprobs: PositionLogprobs | None = None


# -- events -----------------------------------------------------------------------------------------------------------


class Pulled(Value, frozen=True):
    """A prefill to compute, from the queue (decode-first) or from the router (prefill-first).

    ``num_blocks`` are the request's in our block size; the decode worker holds the first ``num_cached_tokens`` tokens
    already. With prefill-first its grant may name more. ``term`` is our own. ``num_tokens`` are the request's; 0: as
    many as the blocks hold. ``may_return``: it may go back to the queue if the decode worker cannot be reached from
    here.
    """

    handoff_id: HandoffId
    decode_worker_id: str
    num_blocks: int
    num_cached_tokens: int
    term: int
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    num_tokens: int = 0
    may_return: bool = False


class Declined(Value, frozen=True):
    """An entry that is not computed here. Its owner gets a release and computes it."""

    handoff_id: HandoffId
    decode_worker_id: str
    reason: EndReason


class Cancelled(Value, frozen=True):
    """Prefill-first: the frontend has aborted the request."""

    handoff_id: HandoffId


class ClaimFailed(Value, frozen=True):
    """The claim could not be sent, or the peer's memory cannot be reached."""

    handoff_id: HandoffId


class Unreachable(Value, frozen=True):
    """The decode worker, or its entry in discovery, cannot be found from here: the claim was not sent."""

    handoff_id: HandoffId


class Granted(Value, frozen=True):
    """The decode worker has granted the claim."""

    worker_id: str
    message: HandoffGrant


class Refused(Value, frozen=True):
    """The decode worker has refused the claim."""

    message: HandoffRefused


class EngineRefused(Value, frozen=True):
    """The engine refused the request (or has died)."""

    handoff_id: HandoffId


class LoadWanted(Value, frozen=True):
    """The engine requests hit blocks that the decode worker holds and we lack."""

    handoff_id: HandoffId
    blocks: Blocks


class ChunkComputed(Value, frozen=True):
    """These blocks are computed. The last chunk carries the first token, or, without blocks, the ``kv_transfer_params``
    of an engine that moves the KV itself."""

    handoff_id: HandoffId
    blocks: Blocks
    first_token: FirstToken | None = None
    kv_transfer_params: bytes | None = None

    @property
    def is_last(self) -> bool:
        return self.first_token is not None or self.kv_transfer_params is not None


class ReadEnded(Value, frozen=True):
    """The answer to Read."""

    handoff_id: HandoffId
    ok: bool


class HitsVerified(Value, frozen=True):
    """The answer to VerifyHits: whether the read blocks equal the decode worker's."""

    handoff_id: HandoffId
    ok: bool


class ChunkChecksummed(Value, frozen=True):
    """The answer to ChecksumChunk: ``core.checksums.unit_checksums`` of its blocks; None if they could not be read."""

    handoff_id: HandoffId
    checksums: tuple[int, ...] | None


class Written(Value, frozen=True):
    """The answer to Write."""

    handoff_id: HandoffId
    ok: bool


class Abandoned(Value, frozen=True):
    """The decode worker neither waits nor reads any more. It gets a release in any case."""

    worker_id: str
    message: HandoffAbandon


class Fetched(Value, frozen=True):
    """The decode worker has acknowledged HandoffDone (push), or has read everything (pull)."""

    message: HandoffFetched


class ReleaseHeard(Value, frozen=True):
    """The decode worker has received every release of this hand-off that was sent before now."""

    handoff_id: HandoffId


class ConnectionLost(Value, frozen=True):
    """The connection to a decode worker has ended."""

    worker_id: str


class Registered(Value, frozen=True):
    """A worker has a lease of ``ttl_s`` seconds, and is in this term."""

    worker_id: str
    ttl_s: float
    term: int


class LeaseEnded(Value, frozen=True):
    """A decode worker's lease has ended. It may read until it is fenced."""

    worker_id: str


class LeaseLost(Value, frozen=True):
    """Our own lease has ended: others may reuse what we were allowed to write."""

    reason: EndReason = EndReason.LEASE_LOST


class Tick(Value, frozen=True):
    """Time has passed."""


PrefillEvent = (
    Pulled
    | Declined
    | Cancelled
    | ClaimFailed
    | Unreachable
    | Granted
    | Refused
    | EngineRefused
    | LoadWanted
    | ChunkComputed
    | ReadEnded
    | HitsVerified
    | ChunkChecksummed
    | Written
    | Abandoned
    | Fetched
    | ReleaseHeard
    | ConnectionLost
    | Registered
    | LeaseEnded
    | LeaseLost
    | Tick
)

# -- actions ----------------------------------------------------------------------------------------------------------


class Compute(Value, frozen=True):
    """Give the request to the engine. Of the tokens that D holds, it asks for those that we lack (LoadWanted)."""

    handoff_id: HandoffId


class SendClaim(Value, frozen=True):
    """Connect if need be, then claim. Unreachable if another prefill worker may reach it, ClaimFailed if that would be
    as impossible there, or if the claim may have arrived."""

    worker_id: str
    message: HandoffClaim


class Read(Value, frozen=True):
    """Read hit blocks of D, of which ``remote_first_block`` is the first, into ours: the tokens that both hold.

    Blocks of the two workers may differ in size. Answered by ReadEnded.
    """

    handoff_id: HandoffId
    blocks: Blocks
    remote_block_ids: tuple[int, ...]
    remote_first_block: int


class VerifyHits(Value, frozen=True):
    """Compare what was read with ``checksums`` (None: none were sent). Answered by HitsVerified."""

    handoff_id: HandoffId
    blocks: Blocks
    checksums: tuple[int, ...] | None


class TellLoaded(Value, frozen=True):
    """The engine's load has ended; if it failed, the engine computes those blocks."""

    handoff_id: HandoffId
    ok: bool


class ChecksumChunk(Value, frozen=True):
    """Checksum our blocks, in the order of these actions. Answered by ChunkChecksummed."""

    handoff_id: HandoffId
    block_ids: tuple[int, ...]


class Write(Value, frozen=True):
    """Write our blocks into D's, after every earlier Write of this hand-off, then deliver ``done`` after the bytes.

    The tokens that both hold: those of D, of which ``remote_first_block`` is the first, begin after its hits, so there
    may be none. Blocks of the two workers may differ in size. Never posted after our fence, nor after an earlier Write
    of this hand-off has failed. Answered by Written.
    """

    handoff_id: HandoffId
    generation: int
    blocks: Blocks
    remote_block_ids: tuple[int, ...]
    done: HandoffDone | None
    remote_first_block: int


class SendProgress(Value, frozen=True):
    """Tell the decode worker that its prefill is being computed. A failure to send has no consequence."""

    worker_id: str
    message: HandoffProgress


class SendDone(Value, frozen=True):
    """Push: repeat the last write's notification over the request plane, over a new connection if necessary, until the
    decode worker answers."""

    worker_id: str
    message: HandoffDone


class SendReady(Value, frozen=True):
    """Pull: tell the decode worker what to read. Repeated until it answers."""

    worker_id: str
    message: HandoffReady


class StopComputing(Value, frozen=True):
    """Stop computing it. Its blocks stay in use until FreeBlocks."""

    handoff_id: HandoffId


class FreeBlocks(Value, frozen=True):
    """No transfer touches its blocks any more. Occurs once for each Compute."""

    handoff_id: HandoffId


class Computed(Value, frozen=True):
    """Nothing is left to compute: another prefill may be pulled. Occurs once for each hand-off, before Settle."""

    handoff_id: HandoffId


class Settle(Value, frozen=True):
    """Acknowledge the queue entry: nothing of it is left to do here. Occurs once for each Pulled and each Declined,
    unless Return does."""

    handoff_id: HandoffId
    reason: EndReason | None


class Return(Value, frozen=True):
    """Give the queue entry back, for a prefill worker that can reach its decode worker. This worker may pull it again:
    the ledger has forgotten it."""

    handoff_id: HandoffId


class SayReleased(Value, frozen=True):
    """Send a release to the decode worker, over a new connection if necessary. ReleaseHeard follows when it has
    arrived; otherwise this action is repeated."""

    worker_id: str
    message: HandoffReleased


PrefillAction = (
    Compute
    | SendClaim
    | Read
    | VerifyHits
    | TellLoaded
    | ChecksumChunk
    | Write
    | SendProgress
    | SendDone
    | SendReady
    | StopComputing
    | FreeBlocks
    | Computed
    | Settle
    | Return
    | SayReleased
)
