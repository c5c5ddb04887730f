"""One hand-off at the prefill worker: compute; after the grant read, write or keep; then report the end.

    CLAIMING ──granted──> SENDING ──push: last write done──> CONFIRMING ──Fetched──> ENDED
       │                     │    └─pull: all computed──> [KEEPING ──>] HOLDING ──Fetched──> ENDED
       └── refused ──────────┴── lost, abandoned, failed ────┴──> STOPPING

    STOPPING ──nothing in flight──> RELEASING ──acknowledged──> ENDED   (at once if the claim was refused or not sent)

In CLAIMING the engine already computes. Its reads and its computed blocks wait for the grant: before it no block of D
is touched. In KEEPING the engine moves the KV out of its pool, so that D may read it for as long as it likes: only
then is D told where it is. What is computed and not granted yet it moves too: its pool does not wait for D's room. In
STOPPING nothing is submitted; blocks stay in use until submitted transfers have ended, and ``late_s`` more if one has
failed.

CONFIRMING and RELEASING hold no blocks. They repeat HandoffDone, or the release, until D acknowledges it or has been
gone for long: the last write's notification may be lost, and only P can connect to D. An abandon turns CONFIRMING into
RELEASING.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs

from kvrelay.core.handoff import HandoffId, HandoffOrder, KvDirection
from kvrelay.core.layout import BlockRun
from kvrelay.errors import IllegalTransitionError
from kvrelay.handoff import messages as hm
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, count_end
from kvrelay.handoff.prefill_state import TRANSITIONS, PrefillContext, PrefillRules, PrefillState

MAX_BLOCK_ID = 2**31 - 1
MAX_BLOCK_SIZE = 2**20
MAX_DOUBLINGS = 16
_STOPPABLE = (PrefillState.CLAIMING, PrefillState.SENDING, PrefillState.KEEPING, PrefillState.HOLDING)


@dataclass(slots=True)
class PrefillHandoff:
    """The state machine. Methods are events. Every field holds an immutable value."""

    handoff_id: HandoffId
    decode_worker_id: str
    num_tokens: int
    num_cached_tokens: int
    started_s: float
    due_s: float
    """When ``tick`` acts: the claim's deadline, or the next repetition."""
    state: PrefillState = PrefillState.CLAIMING
    grant: hm.HandoffGrant | None = field(default=None, repr=False)
    """Like ``done`` and ``ready`` it holds a secret, which no log may show."""
    load: BlockRun | None = None
    """CLAIMING: the engine's requested read."""
    chunks: tuple[pe.ChunkComputed, ...] = ()
    """Chunks computed and not yet submitted, in order; with pull all of them."""
    checksums: tuple[int, ...] = ()
    """Checksums of the blocks in the order of the request, as far as known."""
    num_in_flight: int = 0
    """Reads, writes and checksums that touch our blocks."""
    late_until_s: float = 0.0
    """Bytes of a write that has failed may land until then."""
    is_computed: bool = False
    prefill_s: float = 0.0
    """For how long the engine computed it: from its beginning, or from the end of what it computed before."""
    is_sent: bool = False
    """Push: the last write was submitted."""
    done: hm.HandoffDone | None = field(default=None, repr=False)
    """Push: the message after the last write."""
    is_acknowledged: bool = False
    """Push: D has acknowledged it."""
    keep_s: float | None = None
    """CLAIMING: all is computed; when the engine is asked to move it out of its pool."""
    is_moving: bool = False
    """The engine moves ``chunks`` since before the grant: they are not sent meanwhile."""
    is_kept: bool = False
    """They have left the pool."""
    held: tuple[int, ...] = ()
    """Pull: our blocks that D lacks, in the order of the request."""
    ready: hm.HandoffReady | None = field(default=None, repr=False)
    kv_transfer_params: bytes | None = None
    """Of an engine that moves KV itself: it has computed KV that D has not reported as fetched."""
    has_blocks: bool = True
    reason: EndReason | None = None
    num_said: int = 0
    over_s: float = 0.0
    """CONFIRMING, RELEASING: since when."""
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    may_return: bool = False
    """Its entry may go back to the queue if D cannot be reached."""
    is_prefix: bool = False
    """We compute nothing: D's cached blocks are all that is wanted. Our blocks are the engine's load."""

    @property
    def may_be_read(self) -> bool:
        """Pull: D may read our blocks."""
        return self.has_blocks and self.grant is not None and self.grant.direction is KvDirection.PULL

    # -- the claim ----------------------------------------------------------------------------------------------------

    def begin(self, event: pe.Pulled, context: PrefillContext) -> None:
        """Compute and claim at once."""
        context.out += [pe.Compute(self.handoff_id), self._claim(event.term, context, order=event.order)]

    def begin_prefix(self, event: pe.PrefixWanted, context: PrefillContext) -> None:
        """Claim only."""
        context.out.append(self._claim(event.term, context, prefix=event.prefix))

    def _claim(
        self,
        term: int,
        context: PrefillContext,
        *,
        order: HandoffOrder = HandoffOrder.DECODE_FIRST,
        prefix: hm.Prefix | None = None,
    ) -> pe.SendClaim:
        rules = context.rules
        claim = hm.HandoffClaim(
            self.handoff_id,
            rules.worker_id,
            rules.kv_compatibility,
            rules.checksums,
            order,
            term,
            rules.block_size,
            rules.regions,
            rules.tail_tokens,
            prefix,
        )
        return pe.SendClaim(self.decode_worker_id, claim)

    def decline(self, reason: EndReason, context: PrefillContext) -> None:
        """Compute nothing; only tell its owner."""
        self.has_blocks = False
        self._computed(context)
        context.out.append(pe.Settle(self.handoff_id, reason))
        self._move(PrefillState.STOPPING)
        self.reason = reason
        self._count(reason, context)
        self.settle(context)

    def granted(self, grant: hm.HandoffGrant, is_known: bool, context: PrefillContext) -> None:
        """From here on D's blocks may be touched. A grant that arrives after we gave up is answered by the release.

        ``is_known``: D is in the term that we know. Pull needs that: the end of the term shows that D reads no more.
        """
        if self.state is not PrefillState.CLAIMING:
            return
        if not self._fits(grant, context.rules) or (grant.direction is KvDirection.PULL and not is_known):
            self.stop(EndReason.BAD_GRANT, context)
            return
        self.grant = grant
        self.num_cached_tokens = grant.num_cached_tokens
        self.due_s = context.now_s + context.rules.progress_s
        self._move(PrefillState.SENDING)
        load, self.load = self.load, None
        if load is not None:
            self._read(self._covered(load, context.rules), context)
        if not self.is_moving:
            self._send_waiting(context)

    def _send_waiting(self, context: PrefillContext) -> None:
        chunks, self.chunks = self.chunks, ()
        for chunk in chunks:
            self._send(chunk, context)

    def unreachable(self, is_gone: bool, context: PrefillContext) -> None:
        """The claim was not sent. ``is_gone``: D's lease has ended, so no other worker will reach it either."""
        if self.state is PrefillState.CLAIMING:
            is_returned = self.is_prefix or (self.may_return and not is_gone)
            self.stop(EndReason.UNREACHABLE if is_returned else EndReason.CLAIM_FAILED, context)

    def refused(self, context: PrefillContext) -> None:
        """Stop; the computed blocks stay in the prefix cache."""
        if self.state is PrefillState.CLAIMING:
            self.stop(EndReason.REFUSED, context)

    def _fits(self, grant: hm.HandoffGrant, rules: PrefillRules) -> bool:
        """Check the grant's blocks now: when they are paired with ours it is too late to refuse."""
        size = grant.block_size or rules.block_size
        if not 1 <= size <= MAX_BLOCK_SIZE:
            return False
        num_held = self.num_tokens if grant.direction is KvDirection.PUSH else grant.num_cached_tokens
        num_granted = -(-num_held // size)
        return (
            (grant.regions, grant.tail_tokens) == (rules.regions, rules.tail_tokens)
            and grant.num_cached_tokens % size == 0
            and self._fits_hits(grant.num_cached_tokens, rules)
            and len(grant.block_ids) == num_granted
            and len(set(grant.block_ids)) == num_granted
            and min(grant.block_ids, default=0) >= 0
            and max(grant.block_ids, default=0) <= MAX_BLOCK_ID
        )

    def _fits_hits(self, num_cached_tokens: int, rules: PrefillRules) -> bool:
        """With decode-first the entry has this number. With prefill-first D may hold more than was known; of a prefix
        less, but more than we have."""
        if self.is_prefix:
            first = 0 if self.load is None else self.load.first_block
            return first * rules.block_size + rules.block_size <= num_cached_tokens <= self.num_tokens
        if self.order is HandoffOrder.DECODE_FIRST:
            return num_cached_tokens == self.num_cached_tokens
        return self.num_cached_tokens <= num_cached_tokens < self.num_tokens

    # -- the engine ---------------------------------------------------------------------------------------------------

    def load_wanted(self, load: BlockRun, context: PrefillContext) -> None:
        """The engine requests hit blocks of D."""
        if self.state is PrefillState.CLAIMING:
            self.load = load
        elif self.state is PrefillState.SENDING:
            self._read(load, context)
        else:
            context.out.append(pe.ReportLoaded(self.handoff_id, False))

    def chunk_computed(self, chunk: pe.ChunkComputed, context: PrefillContext) -> None:
        """Another chunk is computed."""
        self.kv_transfer_params = chunk.kv_transfer_params
        if chunk.is_last:
            self.prefill_s = context.now_s - max(self.started_s, context.free_since_s)
            context.free_since_s = context.now_s
            self._computed(context)
        if self.state is PrefillState.CLAIMING:
            self.chunks = (*self.chunks, chunk)
            if chunk.is_last and context.rules.can_keep and chunk.kv_transfer_params is None:
                self.keep_s = context.now_s + context.rules.keep_after_s
        elif self.state is PrefillState.SENDING:
            self._send(chunk, context)
        elif self.state is PrefillState.RELEASING and chunk.kv_transfer_params is not None:
            # It was computed when we had stopped already.
            self._say_released(context)

    # -- hits are read ------------------------------------------------------------------------------------------------

    def _read(self, load: BlockRun, context: PrefillContext) -> None:
        assert self.grant is not None, "nothing is read before the grant"
        self.num_in_flight += 1
        first, end = self._of_decode(load, context.rules)
        self.load = load
        there = BlockRun(first, self.grant.block_ids[first:end])
        context.out.append(pe.ReadHits(self.handoff_id, self.grant.generation, load, there))

    def _covered(self, load: BlockRun, rules: PrefillRules) -> BlockRun:
        """Those of the blocks that D has whole: of a prefix it may have less by now."""
        num_held = self.num_cached_tokens // rules.block_size - load.first_block
        return BlockRun(load.first_block, load.block_ids[:num_held]) if self.is_prefix else load

    def read_ended(self, ok: bool, context: PrefillContext) -> None:
        """After a failed read the engine computes those blocks: that is no reason to give up. What was read after we
        have stopped is not trusted: D may have reused its blocks before the read has ended."""
        ok = ok and self.state is PrefillState.SENDING
        if ok and self._with_checksums(context.rules) and self.load is not None and self.grant is not None:
            sent = None if self.grant.checksums is None else self.grant.checksums[_units(self.load, context.rules)]
            context.out.append(pe.VerifyHits(self.handoff_id, self.load, sent))
            return
        self._loaded(ok, context)

    def hits_verified(self, ok: bool, context: PrefillContext) -> None:
        """The read blocks were compared with D's checksums. They are ours: what ends now does not change them."""
        num_blocks = 0 if self.load is None else len(self.load.block_ids)
        context.counters.num_verified_blocks += num_blocks if ok else 0
        context.counters.num_kv_checksum_mismatches += not ok
        self._loaded(ok, context)

    def _loaded(self, ok: bool, context: PrefillContext) -> None:
        self.num_in_flight -= 1
        self._report_loaded(ok, None if ok else self.reason or EndReason.READ_FAILED, context)
        if self.is_prefix and self.state is PrefillState.SENDING:
            self._move(PrefillState.STOPPING)
        self.settle(context)

    def _report_loaded(self, ok: bool, reason: EndReason | None, context: PrefillContext) -> None:
        num_blocks = len(self.load.block_ids) if ok and self.load is not None else 0
        self.load = None
        context.out.append(pe.ReportLoaded(self.handoff_id, ok, num_blocks, reason if self.is_prefix else None))

    # -- chunks are sent, or kept -------------------------------------------------------------------------------------

    def _send(self, chunk: pe.ChunkComputed, context: PrefillContext) -> None:
        """Write the blocks that D lacks, after their checksums if required. Pull: keep them until the last chunk."""
        chunk = self._lacking(chunk, context.rules)
        if not chunk.blocks.block_ids and not chunk.is_last:
            return
        if self._with_checksums(context.rules) and chunk.kv_transfer_params is None:
            self.num_in_flight += 1
            self.chunks = (*self.chunks, chunk)
            context.out.append(pe.ChecksumChunk(self.handoff_id, chunk.blocks.block_ids))
        else:
            self._submit(chunk, context)

    def _lacking(self, chunk: pe.ChunkComputed, rules: PrefillRules) -> pe.ChunkComputed:
        """Exclude D's hits: other requests may share those blocks, and they are read only."""
        blocks, num_hit_blocks = chunk.blocks, self.num_cached_tokens // rules.block_size
        num_held = num_hit_blocks - blocks.first_block
        if num_held <= 0:
            return chunk
        return structs.replace(chunk, blocks=BlockRun(num_hit_blocks, blocks.block_ids[num_held:]))

    def chunk_checksummed(self, checksums: tuple[int, ...] | None, context: PrefillContext) -> None:
        """The first chunk that waits for its checksum."""
        self.num_in_flight -= 1
        if checksums is None and self.state is PrefillState.SENDING:
            self.stop(EndReason.CHECKSUM_FAILED, context)
        elif self.state is PrefillState.SENDING and checksums is not None:
            chunk, self.chunks = self.chunks[0], self.chunks[1:]
            self.checksums += self._needed(chunk.blocks, checksums, context.rules)
            self._submit(chunk, context)
        self.settle(context)

    def _submit(self, chunk: pe.ChunkComputed, context: PrefillContext) -> None:
        assert self.grant is not None, "nothing is written before the grant"
        if self.grant.direction is KvDirection.PULL:
            self.held += chunk.blocks.block_ids
            if chunk.is_last and context.rules.can_keep and not self.is_kept and chunk.kv_transfer_params is None:
                self._keep(chunk, context)
            elif chunk.is_last:
                self._hold(chunk, context)
            return
        if chunk.kv_transfer_params is not None:
            # D's engine wants blocks, and ours gives none.
            self.stop(EndReason.BAD_GRANT, context)
            return
        first, end = self._of_decode(chunk.blocks, context.rules)
        if chunk.blocks.first_block == self.num_cached_tokens // context.rules.block_size:
            # D's hits, which other requests share, may end within one of our blocks.
            first = self.num_cached_tokens // self.decode_block_size(context.rules)
        there = BlockRun(first, self.grant.block_ids[first : max(first, end)])
        self.num_in_flight += 1
        self.is_sent = chunk.first_token is not None
        self.done = self._done(chunk, context)
        context.out.append(pe.Write(self.handoff_id, self.grant.generation, chunk.blocks, there, self.done))

    def _done(self, chunk: pe.ChunkComputed, context: PrefillContext) -> hm.HandoffDone | None:
        if chunk.first_token is None or self.grant is None:
            return None
        return hm.HandoffDone(
            handoff_id=self.handoff_id,
            generation=self.grant.generation,
            token_id=chunk.first_token.token_id,
            logprobs=chunk.first_token.logprobs,
            num_transferred_bytes=0,
            prefill_s=self.prefill_s,
            checksums=self.checksums if self._with_checksums(context.rules) else None,
            secret=self.grant.secret,
        )

    def written(self, ok: bool, context: PrefillContext) -> None:
        """A write has ended."""
        self.num_in_flight -= 1
        if not ok and context.rules.late_s:
            self.late_until_s = context.now_s + context.rules.late_s
        if not ok and self.state is PrefillState.SENDING:
            self.stop(EndReason.TRANSFER_FAILED, context)
        else:
            self.settle(context)

    def _keep(self, chunk: pe.ChunkComputed, context: PrefillContext) -> None:
        self._move(PrefillState.KEEPING)
        self.chunks = (chunk,)
        self.num_in_flight += 1
        context.out.append(pe.Keep(self.handoff_id, self.held))

    def kept(self, block_ids: tuple[int, ...] | None, context: PrefillContext) -> None:
        """The engine has moved the KV, or has not."""
        self.num_in_flight -= 1
        if self.is_moving:
            self._moved(block_ids, context)  # it may ask the engine again, and wait in KEEPING
        else:
            self.held = self.held if block_ids is None else block_ids
            if self.state is PrefillState.KEEPING:
                (chunk,), self.chunks = self.chunks, ()
                self._hold(chunk, context)
        self.settle(context)

    def _move_out(self, context: PrefillContext) -> None:
        """D has no room for what is computed: our pool need not wait for it."""
        self.keep_s, self.is_moving = None, True
        self.num_in_flight += 1
        block_ids = tuple(block for chunk in self.chunks for block in chunk.blocks.block_ids)
        context.out.append(pe.Keep(self.handoff_id, block_ids))

    def _moved(self, block_ids: tuple[int, ...] | None, context: PrefillContext) -> None:
        """None: there was no room there either; it stays in the pool."""
        self.is_moving, self.is_kept = False, block_ids is not None
        if block_ids is not None:
            left = iter(block_ids)
            self.chunks = tuple(structs.replace(chunk, blocks=_moved_to(chunk.blocks, left)) for chunk in self.chunks)
        if self.state is PrefillState.SENDING:
            self._send_waiting(context)

    def _hold(self, chunk: pe.ChunkComputed, context: PrefillContext) -> None:
        assert self.grant is not None
        self._move(PrefillState.HOLDING)
        has_checksums = self._with_checksums(context.rules) and chunk.kv_transfer_params is None
        self.ready = hm.HandoffReady(
            handoff_id=self.handoff_id,
            generation=self.grant.generation,
            block_ids=self.held,
            token_id=None if chunk.first_token is None else chunk.first_token.token_id,
            logprobs=None if chunk.first_token is None else chunk.first_token.logprobs,
            prefill_s=self.prefill_s,
            checksums=self.checksums if has_checksums else None,
            secret=self.grant.secret,
            kv_transfer_params=chunk.kv_transfer_params,
        )
        self._say_ready(context)

    # -- arithmetic of blocks -----------------------------------------------------------------------------------------

    def decode_block_size(self, rules: PrefillRules) -> int:
        """Tokens per block of D, as its grant says."""
        return (0 if self.grant is None else self.grant.block_size) or rules.block_size

    def _of_decode(self, blocks: BlockRun, rules: PrefillRules) -> tuple[int, int]:
        """First and end of D's blocks that hold any of these tokens."""
        ours, theirs = rules.block_size, self.decode_block_size(rules)
        return blocks.first_block * ours // theirs, -(-(blocks.first_block + len(blocks.block_ids)) * ours // theirs)

    def _needed(self, blocks: BlockRun, checksums: tuple[int, ...], rules: PrefillRules) -> tuple[int, ...]:
        """Our blocks of tokens that D lacks."""
        unit, first = rules.unit_tokens, _units(blocks, rules).start
        return checksums[max(0, self.num_cached_tokens // unit - first) : max(0, -(-self.num_tokens // unit) - first)]

    def _with_checksums(self, rules: PrefillRules) -> bool:
        return rules.checksums or (self.grant is not None and self.grant.checksums is not None)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def stop(self, reason: EndReason, context: PrefillContext) -> None:
        """Compute, read and write nothing more."""
        if self.state not in _STOPPABLE:
            return
        self._move(PrefillState.STOPPING)
        self.reason = reason
        if not self.is_prefix:
            self._count(reason, context)
            context.out.append(pe.StopComputing(self.handoff_id))
        if self.load is not None and self.num_in_flight == 0:
            # The engine waits for this load; without an answer its request would not end.
            self._report_loaded(False, reason, context)
        self._computed(context)
        self.settle(context)

    def abandoned(self, generation: int, context: PrefillContext) -> None:
        """D neither waits nor reads any more. A grant that was sent before is void too."""
        if self.state is PrefillState.RELEASING:
            self._say_released(context)
        elif self.state is PrefillState.CONFIRMING:
            self.reason = EndReason.ABANDONED
            self._move(PrefillState.RELEASING)
            self._say_released(context)
        elif self.state is PrefillState.CLAIMING or (self.grant is not None and self.grant.generation == generation):
            self.stop(EndReason.ABANDONED, context)

    def recalled(self, generation: int, context: PrefillContext) -> None:
        """D does without us. What was computed meanwhile is not thrown away."""
        if self.state is PrefillState.SENDING and self.grant is not None and self.grant.generation == generation:
            self.stop(EndReason.RECALLED, context)

    def lost(self, reason: EndReason, context: PrefillContext) -> None:
        """Stop: D does not need it, or it is no longer allowed. Blocks that D may be reading are kept until D says so
        or is fenced."""
        if self.state is not PrefillState.HOLDING:
            self.stop(reason, context)

    def fenced(self, context: PrefillContext) -> None:
        """D is fenced: it reads no more, alive or not."""
        self.stop(EndReason.DECODE_WORKER_LOST, context)

    def fetched(self, generation: int, context: PrefillContext) -> None:
        """D has read everything, or knows that everything is written, perhaps before we know it ourselves."""
        if self.grant is None or self.grant.generation != generation:
            return
        if self.state is PrefillState.HOLDING:
            self._end(context)
        elif self.state is PrefillState.CONFIRMING:
            self._move(PrefillState.ENDED)
        elif self.state is PrefillState.SENDING:
            self.is_acknowledged = self.is_sent

    def release_acknowledged(self) -> None:
        """D has acknowledged that we have stopped."""
        if self.state is PrefillState.RELEASING:
            self._move(PrefillState.ENDED)

    def settle(self, context: PrefillContext) -> None:
        """End the hand-off once nothing touches our blocks any more, nor, when it has failed, those of D."""
        if self.num_in_flight:
            return
        if self.state is PrefillState.STOPPING and context.now_s < self.late_until_s:
            self.due_s = self.late_until_s
            return
        if self.state is PrefillState.SENDING and self.is_sent:
            self._end(context)
        elif self.state is PrefillState.STOPPING:
            self._free(context)
            is_kept = self.kv_transfer_params is not None
            if self.reason is EndReason.UNREACHABLE or (self.reason is EndReason.REFUSED and not is_kept):
                self._move(PrefillState.ENDED)
            else:
                self.over_s = context.now_s
                self._move(PrefillState.RELEASING)
                self._say_released(context)

    def _end(self, context: PrefillContext) -> None:
        context.counters.num_prefills += 1
        must_confirm = self.state is PrefillState.SENDING and not self.is_acknowledged
        self.over_s = context.now_s
        self.due_s = context.now_s + context.rules.ready_repeat_s
        self._move(PrefillState.CONFIRMING if must_confirm else PrefillState.ENDED)
        self._free(context)

    def _free(self, context: PrefillContext) -> None:
        if self.has_blocks:
            self.has_blocks = False
            is_returned = self.reason is EndReason.UNREACHABLE
            end = pe.Return(self.handoff_id) if is_returned else pe.Settle(self.handoff_id, self.reason)
            context.out += [pe.FreeBlocks(self.handoff_id), end]

    def _computed(self, context: PrefillContext) -> None:
        if not self.is_computed:
            self.is_computed = True
            context.out.append(pe.Computed(self.handoff_id))

    @staticmethod
    def _count(reason: EndReason, context: PrefillContext) -> None:
        count_end(context.counters.ends, reason)
        if reason is EndReason.REFUSED:
            context.counters.num_refused += 1
        elif reason in (EndReason.ABANDONED, EndReason.RECALLED):
            context.counters.num_abandoned += 1
        elif reason is EndReason.UNREACHABLE:
            context.counters.num_returned += 1
        else:
            context.counters.num_failed += 1

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, gone_s: float | None, context: PrefillContext) -> None:
        """``gone_s``: since when D has had no lease; None if it has one."""
        if self.state is PrefillState.CLAIMING and self.keep_s is not None and context.now_s >= self.keep_s:
            self._move_out(context)
        if context.now_s < self.due_s:
            return
        if self.state is PrefillState.CLAIMING:
            self.stop(EndReason.CLAIM_TIMEOUT, context)
        elif self.state is PrefillState.STOPPING:
            self.settle(context)
        elif self.state in (PrefillState.SENDING, PrefillState.KEEPING):
            self._say_progress(context)
        elif self.state is PrefillState.HOLDING:
            self._say_ready(context)
        elif self.state in (PrefillState.CONFIRMING, PrefillState.RELEASING):
            if gone_s is not None and gone_s + context.rules.gone_for_s <= context.now_s:
                self._move(PrefillState.ENDED)
            elif self.state is PrefillState.CONFIRMING:
                self._say_done(context)
            else:
                self._say_released(context)

    @property
    def next_s(self) -> float | None:
        """When ``tick`` acts next."""
        if self.state is PrefillState.CLAIMING and self.keep_s is not None:
            return min(self.keep_s, self.due_s)
        if self.state is PrefillState.STOPPING and self.late_until_s and not self.num_in_flight:
            return self.due_s
        return None if self.state in (PrefillState.STOPPING, PrefillState.ENDED) else self.due_s

    # -- what is said, and repeated -----------------------------------------------------------------------------------

    def _say_progress(self, context: PrefillContext) -> None:
        assert self.grant is not None
        self.due_s = context.now_s + context.rules.progress_s
        if self.is_prefix:
            return  # no request waits at D
        progress = hm.HandoffProgress(self.handoff_id, self.grant.generation, self.grant.secret)
        context.out.append(pe.SendToDecode(self.decode_worker_id, progress))

    def _say_done(self, context: PrefillContext) -> None:
        assert self.done is not None, "the last write has ended"
        self.due_s = context.now_s + context.rules.ready_repeat_s
        context.out.append(pe.SendToDecode(self.decode_worker_id, self.done))

    def _say_ready(self, context: PrefillContext) -> None:
        if self.ready is not None:
            self.due_s = context.now_s + context.rules.ready_repeat_s
            context.out.append(pe.SendToDecode(self.decode_worker_id, self.ready))

    def _say_released(self, context: PrefillContext) -> None:
        rules = context.rules
        self.due_s = context.now_s + min(rules.release_repeat_s * 2.0**self.num_said, rules.max_release_repeat_s)
        self.num_said = min(self.num_said + 1, MAX_DOUBLINGS)
        error = None if self.reason is None else self.reason.value
        release = hm.HandoffReleased(self.handoff_id, rules.worker_id, error, self.kv_transfer_params)
        context.out.append(pe.SendRelease(self.decode_worker_id, release))

    def _move(self, state: PrefillState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"hand-off {self.handoff_id} cannot go from {self.state} to {state}")
        self.state = state


def _moved_to(blocks: BlockRun, left: Iterator[int]) -> BlockRun:
    """The same blocks of the request in the next ones of ours."""
    return BlockRun(blocks.first_block, tuple(islice(left, len(blocks.block_ids))))


def _units(blocks: BlockRun, rules: PrefillRules) -> slice:
    """Which checksums of the whole request are those of these blocks of ours."""
    per_block = rules.block_size // rules.unit_tokens
    return slice(blocks.first_block * per_block, (blocks.first_block + len(blocks.block_ids)) * per_block)
