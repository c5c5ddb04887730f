"""The hand-off's contract: two ledgers, one per side, that decide who may touch which KV blocks, and when.

A *prefill worker* P computes the KV of a prompt; a *decode worker* D continues from it. This room holds the protocol
between them and nothing else: events in, actions out, time as an argument. It knows no asyncio, no sockets, no threads,
no memory and no scheduler. A side of a worker (``worker/sides``) produces the events and carries out the actions.

    D's side ──DecodeEvent──> DecodeLedger ──actions────> D's side     one DecodeHandoff per hand-off, its grants
    P's side ──PrefillEvent─> PrefillLedger ─actions─────> P's side     one PrefillHandoff per hand-off

Order and direction are independent:

    decode-first   D opens the hand-off, pushes an entry to the prefill queue; the worker that pulls it claims it
    prefill-first  P and D are chosen up front; both hear of the request; P claims, perhaps before D has heard
    push           P writes into the blocks that D has granted
    pull           P keeps its blocks; D (or its engine) reads them and says so

The way of a hand-off (push; pull differs from "computed" on):

    decode worker D                                      prefill worker P
      Opened: the engine lends the blocks
      entry ──queue (decode-first), or the router────────> Pulled: the engine begins to compute at once
      Claimed   <────────────── HandoffClaim ───────────── the claim is under way meanwhile
      generation += 1
                ─────────────── HandoffGrant ────────────> granted: only now are hit blocks read from D,
                                                           and computed blocks written into it
      Progress  <────────────── HandoffProgress ────────── every few seconds
      Done      <── HandoffDone, behind the last write ─── its blocks are free; said again over the request plane
                ─────────────── HandoffFetched ──────────> until this is heard
      verify checksums, if asked for; the loan ends; Resume

    pull:       <────────────── HandoffReady ───────────── computed: the blocks stay P's, unchanged
      read them into our own blocks, verify, Resume
                ─────────────── HandoffFetched ──────────> its blocks are free

A prefix that only another worker has comes by the same way, without a request at D and without a computation at P. P is
the worker that lacks it; it claims a hand-off that it names itself, and reads D's cached blocks as any hit blocks:

    reader P                                             holder D
      Wanted   ──── HandoffClaim, with the prefix ───────> the engine lends what its prefix cache has
               <─────────── HandoffGrant ───────────────── closed from the start: only the loan and its grant exist
      read, verify; count it only if nothing has ended meanwhile: lease, grant, connection
               ──────────── HandoffReleased ─────────────> the loan ends (or when P is fenced)

A refused claim costs P a prefill, which stays in P's prefix cache. If P cannot connect to D, no claim is sent and P has
nothing to release: the entry goes back to the queue, for a P that can. That is bounded (``Pulled.may_return``), because
D waits meanwhile.

Who owns blocks, when. D's engine *lends* blocks to the hand-off when it opens it, and gets each loan back exactly once
(``EndLoan``). Until then it may neither free nor reuse them, even if the request ends.

    D's blocks    engine ── Opened ──> loan 1 ── EndLoan ──> engine
                                         │         ^  when nothing needs the loan any more:
                                         │         │    - the hand-off is open and this is its current loan
                                         │         │    - a grant of it is out: P may write (push) or read hit blocks
                                         │         └    - D itself reads into the blocks, or checksums them
                                         └─ a later claimant gets loan 2: other blocks, since the first may still write

    a grant is out from SendGrant until P has said Done or Released, or P is fenced. Nothing else ends it.

    P's blocks    engine ── Compute ──> in use ── FreeBlocks ──> engine
                                         ^  when all reads, writes and checksums of them have ended, and (pull)
                                         └  D has said Fetched or Abandon, or D is fenced

The rules, and the place that keeps each (docs/architecture.md, "What may never happen"):

    1  a message of another generation than the current one changes nothing    DecodeHandoff.done, .ready
    2  what a peer may write is not free; a release is said until it is heard  DecodeHandoff.settle, PrefillHandoff
    3  P writes nothing that others may think impossible: a lost lease stops   PrefillHandoff.stop, transfer's fence
       it, and D frees only a lease's time to live after the lease has ended   PeerLeases
    4  P's blocks stay in use until its own transfers have ended               PrefillHandoff.settle
    5  who cannot exchange KV with D is refused                                DecodeLedger
    6  a message to an earlier incarnation names a hand-off that is unknown    both ledgers
    7  KV that was damaged is computed again; its blocks stay lent meanwhile   DecodeHandoff.verified
    8  only a claimant whose term discovery has told of gets a grant           DecodeLedger._claim

The numbers that fence stale work. Each answers one question; none is used for another.

    generation     whose grant of this hand-off is current?      raised by each grant; it also counts attempts, which
                                                                 ``max_attempts`` bounds
    hand-off id    which hand-off of which incarnation of D?     names D's worker id, which is new at every start
    term           was it begun under the registration that we   each worker counts its own: how often it has lost its
                   know?                                         lease, or withdrawn everything, and registered anew.
                                                                 Claim and grant carry it; a ledger acts only in terms
                                                                 that it has seen in discovery, so what it sees end
                                                                 fences everything that was begun before
    loan           which blocks of this hand-off?                between D's ledger and D's engine, never sent
    epoch          which role does this worker advertise?        in discovery and KV events; no part of this room

Failures are told apart by type (``EndReason``), never by their text.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable

import msgspec

from kvrelay.core.checksums import unit_tokens
from kvrelay.core.handoff import HandoffId
from kvrelay.core.layout import KV
from kvrelay.core.window import RemoteKey

Connection = Hashable
"""The side's object for a live connection to a peer. Only compared."""


class Value(msgspec.Struct, frozen=True):
    """An event or an action: immutable, equal by type and fields. A struct: 70 dataclasses would cost a process 0.1 s
    of its start."""


class HandoffRules(msgspec.Struct, frozen=True):
    """What the settings of both ledgers have: of this worker's pool (``KVLayout``), and ``checksums``: it accepts no KV
    without them. ``regions``: by name."""

    block_size: int
    kv_compatibility: str
    regions: tuple[str, ...] = (KV,)
    entry_tokens: int = 1
    tail_tokens: int = 0
    checksums: bool = False

    @property
    def unit_tokens(self) -> int:
        """Tokens that one checksum covers."""
        return unit_tokens(self.block_size, self.entry_tokens)


class OfHandoff(Value, frozen=True):
    """An event or an action of one hand-off."""

    handoff_id: HandoffId


class OfGrant(OfHandoff, frozen=True):
    """An event or an action of one grant of a hand-off."""

    generation: int

    @property
    def key(self) -> RemoteKey:
        """By which transfers under this grant are known at the other end."""
        return RemoteKey(str(self.handoff_id), self.generation)


class Registered(Value, frozen=True):
    """A worker has a lease of ``ttl_s`` seconds, and is in this term."""

    worker_id: str
    ttl_s: float
    term: int


class LeaseEnded(Value, frozen=True):
    """A worker's lease has ended. It may read and write until it is fenced."""

    worker_id: str


class Tick(Value, frozen=True):
    """Time has passed."""


class EndReason(enum.StrEnum):
    """Why a hand-off ended without success. Values are for logs and metric labels."""

    REQUEST_ENDED = "the request has ended"
    NOT_QUEUED = "it could not be queued"
    NO_PREFILL_WORKER = "no prefill worker is left"
    DEADLINE = "its deadline has passed"
    OVERTAKEN = "a later one has been claimed, and it has not"
    CLAIMS_EXHAUSTED = "it was claimed too often"
    CLAIMANT_REFUSED = "its claimant was refused"
    CLAIMANT_SILENT = "its claimant has not been heard for too long"
    CLAIMANT_LOST = "the connection to its claimant has ended"
    CLAIMANT_LEASE_ENDED = "the lease of its claimant has ended"
    CLAIMANT_AVOIDED = "its claimant has failed other hand-offs"
    RELEASED = "its claimant has given it up"
    RECALLED = "the prefill worker had not begun it in time"
    GRANT_NOT_SENT = "the grant could not be sent"
    KV_DAMAGED = "its KV is not what was sent"
    READ_FAILED = "its KV could not be read"
    NO_BLOCKS = "there are no blocks to read it into"

    REFUSED = "the decode worker refused the claim"
    CLAIM_TIMEOUT = "the decode worker did not answer the claim"
    CLAIM_FAILED = "it could not be claimed"
    UNREACHABLE = "the decode worker could not be reached; another prefill worker may reach it"
    BAD_GRANT = "the grant does not fit the request"
    ENGINE_REFUSED = "the engine did not take it"
    ABANDONED = "the decode worker abandoned it"
    DECODE_WORKER_LOST = "the connection to the decode worker has ended"
    LEASE_LOST = "this worker's lease was lost"
    LEAVING = "this worker leaves"
    TRANSFER_FAILED = "a transfer failed"
    EXPIRED = "it waited in the queue for too long"
    WRONG_MODEL = "it is for another model"
    CHECKSUM_FAILED = "computed KV could not be checksummed"


class LeaseLost(Value, frozen=True):
    """Our own lease has ended: others may reuse what we were allowed to write or, with pull, to read."""

    reason: EndReason = EndReason.LEASE_LOST


class RefusalReason(enum.StrEnum):
    """Why a claim is refused."""

    INCOMPATIBLE = "KV is not compatible"
    LEASE_ENDED = "the claimant's lease has ended"
    TERM_UNKNOWN = "the claimant is not registered in this term"
    UNKNOWN = "no request waits for this hand-off"
    GIVEN_UP = "the claimant has given it up"
    ANOTHER_CLAIMANT = "it is meant for another worker"
    EXHAUSTED = "it was claimed too often"
    NO_BLOCKS = "no free blocks for another claimant"
    BUSY = "another claimant is being served"
    AVOIDED = "the claimant has failed other hand-offs"
    NO_PREFIX = "the prefix is not in the cache, or no blocks can be spared"


def count_end(ends: dict[EndReason, int], reason: EndReason) -> None:
    """Count one more hand-off that ended for this reason."""
    ends[reason] = ends.get(reason, 0) + 1
