"""The events and actions of the prefill side's ledger. Values only.

Actions are carried out in the order given. Those with an answer (Read, VerifyHits, ChecksumChunk, Write) are answered
by the event named in their docstring, exactly once, after any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.handoff import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffFetched,
    HandoffGrant,
    HandoffId,
    HandoffOrder,
    HandoffProgress,
    HandoffReady,
    HandoffRefused,
    HandoffReleased,
    PositionLogprobs,
)
from kvrelay.handoff.base import EndReason


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some of our blocks: ``block_ids[i]`` is ours for the request's block number ``first_block + i``. Blocks of other
    workers may hold more or fewer tokens."""

    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that comes with the last chunk."""

    token_id: int
    logprobs: PositionLogprobs | None = None


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pulled:
    """A prefill to compute, from the queue (decode-first) or from the router (prefill-first).

    ``num_blocks`` are the request's in our block size; the decode worker holds the first ``num_cached_tokens`` tokens
    already. With prefill-first its grant may name more. ``term`` is our own. ``num_tokens`` are the request's; 0: as
    many as the blocks hold.
    """

    handoff_id: HandoffId
    decode_worker_id: str
    num_blocks: int
    num_cached_tokens: int
    term: int
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Declined:
    """An entry that is not computed here. Its owner gets a release and computes it."""

    handoff_id: HandoffId
    decode_worker_id: str
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Prefill-first: the frontend has aborted the request."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The claim could not be sent, or the peer's memory cannot be reached."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode worker has granted the claim."""

    worker_id: str
    message: HandoffGrant


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode worker has refused the claim."""

    message: HandoffRefused


@dataclass(frozen=True, slots=True)
class EngineRefused:
    """The engine refused the request (or has died)."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """The engine requests hit blocks that the decode worker holds and we lack."""

    handoff_id: HandoffId
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """These blocks are computed. The last chunk carries the first token, or, without blocks, the ``kv_transfer_params``
    of an engine that moves the KV itself."""

    handoff_id: HandoffId
    blocks: Blocks
    first_token: FirstToken | None = None
    kv_transfer_params: bytes | None = None

    @property
    def is_last(self) -> bool:
        return self.first_token is not None or self.kv_transfer_params is not None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The answer to Read."""

    handoff_id: HandoffId
    ok: bool


@dataclass(frozen=True, slots=True)
class HitsVerified:
    """The answer to VerifyHits: whether the read blocks equal the decode worker's."""

    handoff_id: HandoffId
    ok: bool


@dataclass(frozen=True, slots=True)
class ChunkChecksummed:
    """The answer to ChecksumChunk: ``core.checksums.unit_checksums`` of its blocks; None if they could not be read."""

    handoff_id: HandoffId
    checksums: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Written:
    """The answer to Write."""

    handoff_id: HandoffId
    ok: bool


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The decode worker neither waits nor reads any more. It gets a release in any case."""

    worker_id: str
    message: HandoffAbandon


@dataclass(frozen=True, slots=True)
class Fetched:
    """The decode worker has acknowledged HandoffDone (push), or has read everything (pull)."""

    message: HandoffFetched


@dataclass(frozen=True, slots=True)
class ReleaseHeard:
    """The decode worker has received every release of this hand-off that was sent before now."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection to a decode worker has ended."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker has a lease of ``ttl_s`` seconds, and is in this term."""

    worker_id: str
    ttl_s: float
    term: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A decode worker's lease has ended. It may read until it is fenced."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Our own lease has ended: others may reuse what we were allowed to write."""

    reason: EndReason = EndReason.LEASE_LOST


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


PrefillEvent = (
    Pulled
    | Declined
    | Cancelled
    | ClaimFailed
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


@dataclass(frozen=True, slots=True)
class Compute:
    """Give the request to the engine. Of the tokens that D holds, it asks for those that we lack (LoadWanted)."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Connect if need be, then claim. ClaimFailed if that is impossible."""

    worker_id: str
    message: HandoffClaim


@dataclass(frozen=True, slots=True)
class Read:
    """Read hit blocks of D, of which ``remote_first_block`` is the first, into ours: the tokens that both hold.

    Blocks of the two workers may differ in size. Answered by ReadEnded.
    """

    handoff_id: HandoffId
    blocks: Blocks
    remote_block_ids: tuple[int, ...]
    remote_first_block: int


@dataclass(frozen=True, slots=True)
class VerifyHits:
    """Compare what was read with ``checksums`` (None: none were sent). Answered by HitsVerified."""

    handoff_id: HandoffId
    blocks: Blocks
    checksums: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class TellLoaded:
    """The engine's load has ended; if it failed, the engine computes those blocks."""

    handoff_id: HandoffId
    ok: bool


@dataclass(frozen=True, slots=True)
class ChecksumChunk:
    """Checksum our blocks, in the order of these actions. Answered by ChunkChecksummed."""

    handoff_id: HandoffId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Write:
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


@dataclass(frozen=True, slots=True)
class SendProgress:
    """Tell the decode worker that its prefill is being computed. A failure to send has no consequence."""

    worker_id: str
    message: HandoffProgress


@dataclass(frozen=True, slots=True)
class SendDone:
    """Push: repeat the last write's notification over the request plane, over a new connection if necessary, until the
    decode worker answers."""

    worker_id: str
    message: HandoffDone


@dataclass(frozen=True, slots=True)
class SendReady:
    """Pull: tell the decode worker what to read. Repeated until it answers."""

    worker_id: str
    message: HandoffReady


@dataclass(frozen=True, slots=True)
class StopComputing:
    """Stop computing it. Its blocks stay in use until FreeBlocks."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """No transfer touches its blocks any more. Occurs once for each Compute."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class Computed:
    """Nothing is left to compute: another prefill may be pulled. Occurs once for each hand-off, before Settle."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class Settle:
    """Acknowledge the queue entry: nothing of it is left to do here. Occurs once for each Pulled and each Declined."""

    handoff_id: HandoffId
    reason: EndReason | None


@dataclass(frozen=True, slots=True)
class SayReleased:
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
    | SayReleased
)
