"""One hand-off at the prefill worker: compute; after the grant read, write or keep; then report the end.

    CLAIMING ──Granted──> SENDING ──push: last write done──> CONFIRMING ──Fetched──> ENDED
       │                     │    └─pull: all computed──> HOLDING ──Fetched──> ENDED
       └── refused ──────────┴── lost, abandoned, failed ────┴──> STOPPING

    STOPPING ──nothing in flight──> RELEASING ──heard──> ENDED     (ENDED at once if the claim was refused or not sent)

In CLAIMING the engine already computes. Its reads and its computed blocks wait for the grant: before it no block of D
is touched. In STOPPING nothing is submitted; blocks stay in use until submitted transfers have ended.

CONFIRMING and RELEASING hold no blocks. They repeat HandoffDone, or the release, until D acknowledges it or has been
gone for long: the last write's notification may be lost, and only P can connect to D. An abandon turns CONFIRMING into
RELEASING.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from kvrelay.core.checksums import unit_tokens
from kvrelay.core.handoff import HandoffOrder, KvDirection
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.messages import HandoffClaim, HandoffDone, HandoffGrant, HandoffReady
from kvrelay.handoff.prefill_ends import PrefillEnds
from kvrelay.handoff.prefill_events import (
    Blocks,
    ChecksumChunk,
    ChunkComputed,
    Compute,
    Pulled,
    Read,
    SendClaim,
    Settle,
    TellLoaded,
    VerifyHits,
    Write,
)
from kvrelay.handoff.prefill_state import PrefillRules, PrefillState, Turn

MAX_BLOCK_ID = 2**31 - 1
MAX_BLOCK_SIZE = 2**20


@dataclass(slots=True)
class PrefillHandoff(PrefillEnds):
    """The state machine. Methods are events. The record and its ends are in ``PrefillEnds``."""

    # -- the claim ----------------------------------------------------------------------------------------------------

    def begin(self, event: Pulled, turn: Turn) -> None:
        """Compute and claim at once."""
        rules = turn.rules
        claim = HandoffClaim(
            self.handoff_id,
            rules.worker_id,
            rules.kv_compatibility,
            rules.checksums,
            event.order,
            event.term,
            rules.block_size,
        )
        turn.out += [Compute(self.handoff_id), SendClaim(self.decode_worker_id, claim)]

    def decline(self, reason: EndReason, turn: Turn) -> None:
        """Compute nothing; only tell its owner."""
        self.has_blocks = False
        self._computed(turn)
        turn.out.append(Settle(self.handoff_id, reason))
        self._move(PrefillState.STOPPING)
        self.reason = reason
        self._count(reason, turn)
        self.settle(turn)

    def granted(self, grant: HandoffGrant, is_known: bool, turn: Turn) -> None:
        """From here on D's blocks may be touched. A grant that arrives after we gave up is answered by the release.

        ``is_known``: D is in the term that we know. Pull needs that: the end of the term shows that D reads no more.
        """
        if self.state is not PrefillState.CLAIMING:
            return
        if not self._fits(grant, turn.rules) or (grant.direction is KvDirection.PULL and not is_known):
            self.stop(EndReason.BAD_GRANT, turn)
            return
        self.grant = grant
        self.num_cached_tokens = grant.num_cached_tokens
        self.due_s = turn.now_s + turn.rules.progress_s
        self._move(PrefillState.SENDING)
        load, self.load = self.load, None
        if load is not None:
            self._read(load, turn)
        chunks, self.chunks = self.chunks, ()
        for chunk in chunks:
            self._send(chunk, turn)

    def unreachable(self, is_gone: bool, turn: Turn) -> None:
        """The claim was not sent. ``is_gone``: D's lease has ended, so no other worker will reach it either."""
        if self.state is PrefillState.CLAIMING:
            is_returned = self.may_return and not is_gone
            self.stop(EndReason.UNREACHABLE if is_returned else EndReason.CLAIM_FAILED, turn)

    def refused(self, turn: Turn) -> None:
        """Stop; the computed blocks stay in the prefix cache."""
        if self.state is PrefillState.CLAIMING:
            self.stop(EndReason.REFUSED, turn)

    def _fits(self, grant: HandoffGrant, rules: PrefillRules) -> bool:
        """Check the grant's blocks now: when they are paired with ours it is too late to refuse."""
        size = grant.block_size or rules.block_size
        if not 1 <= size <= MAX_BLOCK_SIZE:
            return False
        num_tokens = self.num_tokens or self.num_blocks * rules.block_size
        num_held = num_tokens if grant.direction is KvDirection.PUSH else grant.num_cached_tokens
        num_granted = -(-num_held // size)
        return (
            grant.num_cached_tokens % size == 0
            and self._fits_hits(grant.num_cached_tokens, num_tokens)
            and len(grant.block_ids) == num_granted
            and len(set(grant.block_ids)) == num_granted
            and min(grant.block_ids, default=0) >= 0
            and max(grant.block_ids, default=0) <= MAX_BLOCK_ID
        )

    def _fits_hits(self, num_cached_tokens: int, num_tokens: int) -> bool:
        """With decode-first the entry has this number. With prefill-first D may hold more than was known."""
        if self.order is HandoffOrder.DECODE_FIRST:
            return num_cached_tokens == self.num_cached_tokens
        return self.num_cached_tokens <= num_cached_tokens < num_tokens

    # -- the engine ---------------------------------------------------------------------------------------------------

    def load_wanted(self, load: Blocks, turn: Turn) -> None:
        """The engine requests hit blocks of D."""
        if self.state is PrefillState.CLAIMING:
            self.load = load
        elif self.state is PrefillState.SENDING:
            self._read(load, turn)
        else:
            turn.out.append(TellLoaded(self.handoff_id, False))

    def chunk_computed(self, chunk: ChunkComputed, turn: Turn) -> None:
        """Another chunk is computed."""
        self.kv_transfer_params = chunk.kv_transfer_params
        if chunk.is_last:
            self._computed(turn)
        if self.state is PrefillState.CLAIMING:
            self.chunks = (*self.chunks, chunk)
        elif self.state is PrefillState.SENDING:
            self._send(chunk, turn)
        elif self.state is PrefillState.RELEASING and chunk.kv_transfer_params is not None:
            # It was computed when we had stopped already.
            self._say_released(turn)

    # -- hits are read ------------------------------------------------------------------------------------------------

    def _read(self, load: Blocks, turn: Turn) -> None:
        assert self.grant is not None, "nothing is read before the grant"
        self.num_in_flight += 1
        first, end = self._of_decode(load, turn.rules)
        self.load = load
        turn.out.append(Read(self.handoff_id, load, self.grant.block_ids[first:end], first))

    def read_ended(self, ok: bool, turn: Turn) -> None:
        """After a failed read the engine computes those blocks: that is no reason to give up."""
        if ok and self._with_checksums(turn.rules) and self.load is not None and self.grant is not None:
            sent = None if self.grant.checksums is None else self.grant.checksums[_units(self.load, turn.rules)]
            turn.out.append(VerifyHits(self.handoff_id, self.load, sent))
            return
        self._loaded(ok, turn)

    def hits_verified(self, ok: bool, turn: Turn) -> None:
        """The read blocks were compared with D's checksums."""
        num_blocks = 0 if self.load is None else len(self.load.block_ids)
        turn.counters.num_verified_blocks += num_blocks if ok else 0
        turn.counters.num_damaged += not ok
        self._loaded(ok, turn)

    def _loaded(self, ok: bool, turn: Turn) -> None:
        self.load = None
        self.num_in_flight -= 1
        turn.out.append(TellLoaded(self.handoff_id, ok))
        self.settle(turn)

    # -- chunks are sent, or kept -------------------------------------------------------------------------------------

    def _send(self, chunk: ChunkComputed, turn: Turn) -> None:
        """Write the blocks that D lacks, after their checksums if required. Pull: keep them until the last chunk."""
        chunk = self._lacking(chunk, turn.rules)
        if not chunk.blocks.block_ids and not chunk.is_last:
            return
        if self._with_checksums(turn.rules) and chunk.kv_transfer_params is None:
            self.num_in_flight += 1
            self.chunks = (*self.chunks, chunk)
            turn.out.append(ChecksumChunk(self.handoff_id, chunk.blocks.block_ids))
        else:
            self._submit(chunk, turn)

    def _lacking(self, chunk: ChunkComputed, rules: PrefillRules) -> ChunkComputed:
        """Exclude D's hits: other requests may share those blocks, and they are read only."""
        blocks, num_hit_blocks = chunk.blocks, self.num_cached_tokens // rules.block_size
        num_held = num_hit_blocks - blocks.first_block
        if num_held <= 0:
            return chunk
        return structs.replace(chunk, blocks=Blocks(num_hit_blocks, blocks.block_ids[num_held:]))

    def chunk_checksummed(self, checksums: tuple[int, ...] | None, turn: Turn) -> None:
        """The first chunk that waits for its checksum."""
        self.num_in_flight -= 1
        if checksums is None and self.state is PrefillState.SENDING:
            self.stop(EndReason.CHECKSUM_FAILED, turn)
        elif self.state is PrefillState.SENDING and checksums is not None:
            chunk, self.chunks = self.chunks[0], self.chunks[1:]
            self.checksums += self._needed(chunk.blocks, checksums, turn.rules)
            self._submit(chunk, turn)
        self.settle(turn)

    def _submit(self, chunk: ChunkComputed, turn: Turn) -> None:
        assert self.grant is not None, "nothing is written before the grant"
        if self.grant.direction is KvDirection.PULL:
            self.held += chunk.blocks.block_ids
            if chunk.is_last:
                self._hold(chunk, turn)
            return
        if chunk.kv_transfer_params is not None:
            # D's engine wants blocks, and ours gives none.
            self.stop(EndReason.BAD_GRANT, turn)
            return
        first, end = self._of_decode(chunk.blocks, turn.rules)
        if chunk.blocks.first_block == self.num_cached_tokens // turn.rules.block_size:
            # D's hits, which other requests share, may end within one of our blocks.
            first = self.num_cached_tokens // self.decode_block_size(turn.rules)
        remote = self.grant.block_ids[first : max(first, end)]
        self.num_in_flight += 1
        self.is_sent = chunk.first_token is not None
        self.done = self._done(chunk, turn)
        turn.out.append(Write(self.handoff_id, self.grant.generation, chunk.blocks, remote, self.done, first))

    def _done(self, chunk: ChunkComputed, turn: Turn) -> HandoffDone | None:
        if chunk.first_token is None or self.grant is None:
            return None
        return HandoffDone(
            handoff_id=self.handoff_id,
            generation=self.grant.generation,
            token_id=chunk.first_token.token_id,
            logprobs=chunk.first_token.logprobs,
            num_transferred_bytes=0,
            prefill_s=turn.now_s - self.started_s,
            checksums=self.checksums if self._with_checksums(turn.rules) else None,
            secret=self.grant.secret,
        )

    def written(self, ok: bool, turn: Turn) -> None:
        """A write has ended."""
        self.num_in_flight -= 1
        if not ok and self.state is PrefillState.SENDING:
            self.stop(EndReason.TRANSFER_FAILED, turn)
        else:
            self.settle(turn)

    def _hold(self, chunk: ChunkComputed, turn: Turn) -> None:
        assert self.grant is not None
        self._move(PrefillState.HOLDING)
        has_checksums = self._with_checksums(turn.rules) and chunk.kv_transfer_params is None
        self.ready = HandoffReady(
            handoff_id=self.handoff_id,
            generation=self.grant.generation,
            block_ids=self.held,
            token_id=None if chunk.first_token is None else chunk.first_token.token_id,
            logprobs=None if chunk.first_token is None else chunk.first_token.logprobs,
            prefill_s=turn.now_s - self.started_s,
            checksums=self.checksums if has_checksums else None,
            secret=self.grant.secret,
            kv_transfer_params=chunk.kv_transfer_params,
        )
        self._say_ready(turn)

    # -- arithmetic of blocks -----------------------------------------------------------------------------------------

    def decode_block_size(self, rules: PrefillRules) -> int:
        """Tokens per block of D, as its grant says."""
        return (0 if self.grant is None else self.grant.block_size) or rules.block_size

    def _of_decode(self, blocks: Blocks, rules: PrefillRules) -> tuple[int, int]:
        """First and end of D's blocks that hold any of these tokens."""
        ours, theirs = rules.block_size, self.decode_block_size(rules)
        return blocks.first_block * ours // theirs, -(-(blocks.first_block + len(blocks.block_ids)) * ours // theirs)

    def _needed(self, blocks: Blocks, checksums: tuple[int, ...], rules: PrefillRules) -> tuple[int, ...]:
        """Our blocks of tokens that D lacks."""
        unit, first = unit_tokens(rules.block_size), _units(blocks, rules).start
        num_tokens = self.num_tokens or self.num_blocks * rules.block_size
        return checksums[max(0, self.num_cached_tokens // unit - first) : max(0, -(-num_tokens // unit) - first)]

    def _with_checksums(self, rules: PrefillRules) -> bool:
        return rules.checksums or (self.grant is not None and self.grant.checksums is not None)


def _units(blocks: Blocks, rules: PrefillRules) -> slice:
    """Which checksums of the whole request are those of these blocks of ours."""
    per_block = rules.block_size // unit_tokens(rules.block_size)
    return slice(blocks.first_block * per_block, (blocks.first_block + len(blocks.block_ids)) * per_block)
