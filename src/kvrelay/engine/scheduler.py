"""The policy of a step: which requests compute how many tokens, in which blocks, and how the result changes them.

It owns the requests of an engine from arrival to end. It neither computes nor communicates: work and reports for the
worker (tokens, remote prefills, KV loads, hand-off chunks) are collected in ``output``.

A step:  grow      blocks for decodes that fill their last one; if the pool is empty, preempt (``allocation.py``)
         admit     waiting requests get all blocks of their known tokens; where they go depends on their mode:
                       LOCAL    slot, perhaps after a KvLoad; prefilled chunk by chunk
                       REMOTE   no slot yet; RemotePrefillRequest, joins with its first token (``remote_done``), or
                                waits again with its KV held (``remote_held``)
                       HANDOFF  as LOCAL; each chunk goes to the sender, the last with the token
         plan      every decode, then prefill chunks under the token budget (``scheduled_batch.py``)
         update    (after execution) tokens, ends, blocks that became full
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FINISH_STATUS, FinishReason, RequestStatus
from kvrelay.core.step_cost import StepWork
from kvrelay.engine.admission.queue import AdmissionQueue, Backlog, EngineLoad
from kvrelay.engine.allocation import DecodeAllocator, Holdings, cache_full_blocks, free_blocks, transfer_may_run
from kvrelay.engine.batch import Batch
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.holding import Holding
from kvrelay.engine.kv_source import Arriving, HeldByPeer, KvStorage, SourceBeyond, Sources
from kvrelay.engine.pauses import Pause, Pauses, Session
from kvrelay.engine.reports import finish_reason, report_blocks, report_last_blocks, report_token
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.scheduled_batch import BatchPlanner, ScheduledBatch, TokenBudget
from kvrelay.engine.stats import EngineTimes
from kvrelay.engine.steady import SteadyDecodes
from kvrelay.engine.step import NO_TOKEN, NOT_NUMBERS, KeptBlocks, KvLoad, ModelOutput, SchedulerOutput, StepOutput

_MAY_CONTINUE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_ABORTED)
"""Stop strings are matched by the frontend, which aborts the request."""

PREFETCHED_WITHIN_S = 2.0
"""The promise of a client that asks for a prefetch; how far it is kept is learned."""

StartRemote = Callable[[Request], bool]
"""Called with a REMOTE request whose blocks are allocated. Opens the hand-off; False: nothing is to be computed
elsewhere."""


class _Sent(NamedTuple):
    """A remote prefill: its tokens, the tokens sent before it, and its time."""

    num_tokens: int
    num_ahead: int
    since_s: float


class RemotePrefills:
    """Requests whose prefills this worker's own queue has sent away. Placement by cost learns from them how long a
    remote prefill takes. Those of pairs, which the frontend has placed, are not among them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent: dict[Request, _Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute elsewhere."""
        return sum(sent.num_tokens for sent in self._sent.values())

    def send(self, request: Request) -> None:
        """The request's prefill goes to the queue now."""
        self._sent[request] = _Sent(request.num_missing_tokens, self.num_tokens, self._clock.now())

    def came_back(self, request: Request) -> None:
        """Its KV has arrived."""
        report = self.arrived(request)
        if report is not None:
            report()

    def arrived(self, request: Request) -> Callable[[], None] | None:
        """Its KV has arrived. What tells its placement so, if that is to be told."""
        sent = self._sent.pop(request, None)
        policy = request.placement.policy if request.placement is not None else None
        if sent is None or policy is None:
            return None
        seconds = self._clock.now() - sent.since_s
        return partial(policy.came_back, request.request_id, sent.num_tokens, sent.num_ahead, seconds)

    def forget(self, request: Request) -> None:
        """No KV will arrive."""
        self._sent.pop(request, None)


class Scheduler:
    """Continuous batching with chunked prefill over one block pool.

    ``holding``: where KV may be beside the pool. ``pauses``: learns when sessions return; None: no one does.
    """

    def __init__(
        self,
        pool: BlockPool,
        clock: Clock,
        start_remote: StartRemote,
        config: EngineConfig,
        *,
        holding: Holding,
        pauses: Pauses | None,
    ) -> None:
        self.pool = pool
        self.pauses = pauses
        self.output = StepOutput()
        self.requests: dict[str, Request] = {}
        self.num_ended_requests = 0
        self.num_ended_blocks = 0
        """Blocks for the tokens of these requests."""
        self.num_prefilled_tokens = 0
        self.num_generated_tokens = 0
        self.num_steps = 0
        """Forward passes."""
        # Every decode must fit into a step, so that none starves and a prefill always has a token left to compute.
        max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_running = min(config.max_num_seqs, max_num_batched_tokens)
        self._clock = clock
        self._start_remote = start_remote
        self.token_budget = TokenBudget(clock)
        self._arriving = Arriving(pool.block_size, clock, lambda: self.token_budget.costs.cost)
        self._sources = Sources(HeldByPeer(pool.block_size), holding, self._arriving)
        self.admission = AdmissionQueue(pool, max_num_batched_tokens, clock, config.priority_ageing_s, self._sources)
        self.holding = holding
        holding.on_loaded = lambda request: self.kv_loaded(request, ok=True)
        if holding.blocks.num_blocks:
            self.admission.holding = holding
        self._batch = Batch(self.max_num_running)
        self._num_outside = 0
        """Requests admitted without a slot (REMOTE_PREFILLING, LOADING_KV); a slot is reserved for each, unless its KV
        comes to the holding area."""
        self._decode_allocator = DecodeAllocator(pool, self._batch, clock, self.admission.push)
        self.times = EngineTimes()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._remote_prefills = RemotePrefills(clock)
        self._planner = BatchPlanner(self._batch, max_num_batched_tokens, self.token_budget)
        self._scheduled = ScheduledBatch([], [])
        self._loads: dict[Request, KvLoad] = {}
        """Of requests that are LOADING_KV."""

    def attach(self, storage: KvStorage) -> None:
        """From now on prompts may begin with what this has kept of the pool's blocks."""
        self.add_source(storage)
        self.pool.on_evicted = storage.evicted

    def add_source(self, source: SourceBeyond) -> None:
        """From now on prompts may also begin with what this has."""
        self._sources.add(source)

    def __repr__(self) -> str:
        return (
            f"Scheduler({self.num_waiting} waiting, {len(self._batch)} running ({self._batch.num_decoding} decoding), "
            f"{self._num_outside} remote or loading, {len(self.requests)} unfinished, {self.pool!r})"
        )

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Those whose KV comes to the holding area included."""
        return self.admission.num_waiting + self.holding.num_arriving

    @property
    def num_preemptions(self) -> int:
        return self._decode_allocator.num_preemptions

    @property
    def num_demanded_blocks(self) -> int:
        """Blocks that are held (or quarantined), and those that waiting requests will need."""
        num_held = self.pool.num_blocks - self.pool.num_free
        return num_held + self.admission.num_waiting_blocks + self.holding.num_arriving_blocks

    @property
    def num_prefilling_tokens(self) -> int:
        """Prompt tokens still to compute of requests that have a slot. From any thread."""
        return sum(request.num_missing_tokens for request in list(self._batch.prefilling))

    def num_prefilling_tokens_before(self, num_tokens: int) -> int:
        """The part of these that is computed before a prompt of ``num_tokens``."""
        missing = (request.num_missing_tokens for request in self._batch.prefilling)
        return sum(count for count in missing if count <= num_tokens)

    @property
    def num_decoding(self) -> int:
        """Answers that the next step gives a token."""
        return self._batch.num_decoding

    @property
    def num_admitted(self) -> int:
        """Requests with a slot or a reserved one: decoding, prefilling, or waiting for their KV."""
        return len(self._batch) + self._num_outside

    @property
    def num_places(self) -> int:
        """How many waiting requests the free slots could take in the next step; 0 while blocks are short."""
        return 0 if self.admission.is_short_of_blocks else self.max_num_running - self.num_admitted

    @property
    def has_work(self) -> bool:
        """Whether a step would compute tokens, copy blocks or admit a request."""
        if len(self._batch) > 0 or self.holding.has_copies:
            return True
        return self._may_try_to_admit and self.admission.may_admit(self._load())

    def take_output(self) -> StepOutput:
        """Everything for the worker since the last call."""
        output, self.output = self.output, StepOutput()
        return output

    # -- arrivals, ends -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a new request in state WAITING."""
        self.requests[request.request_id] = request
        self.admission.push(request)
        if self.pauses is not None:
            self._resume_session(self.pauses, request)

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """End ``request`` now. If a transfer may touch its blocks, they are freed once the transfer has ended."""
        if request.abort_reason is not None:
            return
        if transfer_may_run(request, self.pool.block_size):
            request.abort_reason = reason
            if request.status is RequestStatus.RUNNING:
                self._batch.leave(request)
                request.move(RequestStatus.PREFILL_SENDING, self._clock.now())
        else:
            self.finish(request, FINISH_STATUS[reason])

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Finish the request and take back its slot and blocks."""
        if request.slot >= 0:
            self._batch.leave(request)
        elif request.status is RequestStatus.REMOTE_PREFILLING:
            self._no_longer_remote(request)
            self._remote_prefills.forget(request)
        elif request.status is RequestStatus.LOADING_KV:
            self._num_outside -= 1
        else:
            self.admission.discard(request)
        self.admission.shares.charge(request.tenant, request.num_output_tokens)
        request.move(status, self._clock.now())
        free_blocks(self.pool, request, self._pause_after(request))
        self.holding.release(request)
        if request.pause is not None and self.pauses is not None:
            self.pauses.resumed(request.pause, is_served=False)
        self.num_ended_requests += 1
        self.num_ended_blocks += self.pool.blocks_for(len(request.token_ids))
        del self.requests[request.request_id]

    # -- sessions -----------------------------------------------------------------------------------------------------

    def _resume_session(self, pauses: Pauses, request: Request) -> None:
        """If the prompt repeats an earlier one with its answer, that one's pause is over."""
        pause = pauses.end(request.sequence_hashes, request.tenant, is_half=request.is_half)
        if pause is not None:
            request.session, request.pause = pause.session, pause

    def _pause_after(self, request: Request) -> Pause | None:
        """The pause that begins as this request ends. None: it has failed, or left nothing behind."""
        num_blocks = request.num_cached_blocks
        if self.pauses is None or request.status not in _MAY_CONTINUE or not num_blocks:
            return None
        # The next prompt may show the answer otherwise, for instance without its reasoning: it is seen by the prompt.
        num_prompt_blocks = request.num_prompt_tokens // self.pool.block_size
        lengths = {num_blocks, min(num_prompt_blocks, num_blocks)} - {0}
        marks = {request.sequence_hashes[length - 1]: length for length in lengths}
        session = request.session or Session()
        pause = self.pauses.begin(request.request_id, request.tenant, marks, session, is_half=request.is_half)
        if request.sampling.is_prefetch:
            self.pauses.named(request.request_id, "prefetch", within_s=PREFETCHED_WITHIN_S)
        return pause

    def _resumed(self, pauses: Pauses, request: Request, pause: Pause) -> None:
        """A session's next turn has its blocks: where was what the last turn had? The worker that answers counts it."""
        pauses.resumed(pause, is_served=True)
        request.pause = None
        if request.is_half:
            return
        counts, num_repeated = pauses.counts, pause.num_repeated * self.pool.block_size
        num_here = min(request.num_computed_tokens, num_repeated)
        num_stored = min(request.num_stored_tokens, num_repeated - num_here)
        for medium in request.stored_media[: num_stored // self.pool.block_size]:
            counts.stored_tokens[medium] += self.pool.block_size
        counts.returned_tokens += num_repeated
        counts.pool_tokens += num_here
        counts.saved_s += self.token_budget.costs.cost.extra_seconds(num_here + num_stored, 0)
        # The last token of a prompt is always computed, so a block less is no loss.
        counts.num_missed += num_here + self.pool.block_size < num_repeated

    # -- remote prefills (decode side) --------------------------------------------------------------------------------

    def remote_done(self, request: Request, token_id: int | None, logprobs: PositionLogprobs | None) -> None:
        """The KV of a REMOTE request is in its blocks, and ``token_id`` is its next token: it joins the batch. None:
        the tail of its prompt is computed first."""
        self._no_longer_remote(request)
        self._remote_prefills.came_back(request)
        request.num_computed_tokens = request.num_handoff_tokens
        now_s = self._clock.now()
        self.times.handoff.observe(now_s - request.entered_s)
        request.move(RequestStatus.RUNNING, now_s)
        self._batch.enter(request, decoding=token_id is not None)
        cache_full_blocks(self.pool, request)
        if token_id is None:
            request.stay_here()
        else:
            self._accept_first(request, token_id, logprobs)

    def remote_held(self, request: Request, token_id: int | None, logprobs: PositionLogprobs | None) -> None:
        """The KV of a REMOTE request is in its blocks of the holding area: it waits for the pool's, and its client gets
        the first token, if that has come."""
        self._no_longer_remote(request)
        self._remote_prefills.came_back(request)
        now_s = self._clock.now()
        self.times.handoff.observe(now_s - request.entered_s)
        request.stay_here()
        request.move(RequestStatus.KV_HELD, now_s)
        self.holding.num_held += 1
        if token_id is None or not self._report_first(request, token_id, logprobs):
            self.admission.push(request)

    def _no_longer_remote(self, request: Request) -> None:
        if request.held_block_ids:
            self.holding.arrived(request)
        else:
            self._num_outside -= 1

    def remote_lost(self, request: Request) -> None:
        """No KV will arrive for a REMOTE request: it waits again, to be computed here or placed anew."""
        self._no_longer_remote(request)
        self._remote_prefills.forget(request)
        request.leave_pair()
        request.move(RequestStatus.WAITING, self._clock.now())
        free_blocks(self.pool, request)
        self.holding.release(request)
        self.admission.push(request)

    # -- loads of KV --------------------------------------------------------------------------------------------------

    def kv_loaded(self, request: Request, ok: bool, num_blocks: int = 0) -> None:
        """The request's KvLoad has ended: with all its blocks, or with ``num_blocks``; what did not come is
        computed."""
        load = self._loads.pop(request)
        self._arriving.ended(request)
        if request.abort_reason is not None:
            self.finish(request, FINISH_STATUS[request.abort_reason])
            return
        num_arrived = len(load.block_ids) if ok else num_blocks
        if num_arrived:
            num_loaded = (load.first_block + num_arrived) * self.pool.block_size
            # The last block of held KV may be partly filled.
            most = request.num_held_tokens if request.held_block_ids else len(request.token_ids) - 1
            request.num_computed_tokens = min(num_loaded, most)
            if request.mode is PrefillMode.LOCAL and not (request.first_output_sent or request.held_block_ids):
                request.num_cached_tokens = request.num_computed_tokens
            cache_full_blocks(self.pool, request)
        if not (ok and self._load_more(request)):
            self._num_outside -= 1
            self._start_prefill(request)

    def _load_more(self, request: Request) -> bool:
        """Whether a source has what follows the KV that is here; the load has begun then."""
        if request.wants_prompt_logprobs:
            return False
        first = request.num_computed_tokens // self.pool.block_size
        found = self._sources.find(request, first)
        if found is None or found[1].is_pending:
            return False
        source, hit = found
        if request.status is not RequestStatus.LOADING_KV:
            self._num_outside += 1
            request.move(RequestStatus.LOADING_KV, self._clock.now())
        load = KvLoad(request.request_id, first, tuple(request.block_ids[first : first + hit.num_blocks]))
        self._loads[request] = load
        self._arriving.begun(request, load, hit.seconds)
        source.load(request, load, self.output)
        return True

    def prefetches(self, request: Request) -> bool:
        """Whether KV of this prompt is to be loaded ahead of its turn; of its tokens then only those count which can be
        had. Not while it might be in the way of a load or of a request that waits, nor for more than half of the free
        blocks."""
        if not request.sampling.is_prefetch or self._loads or self.admission.num_waiting or not self.num_places:
            return False
        num_tokens = self.admission.num_held_tokens(request)
        num_blocks = self.pool.blocks_for(request.num_stored_tokens + 1)
        if not request.num_stored_tokens or num_blocks > self.pool.num_free / 2:
            return False
        request.cut(num_tokens + 1)  # admission leaves a last token to compute
        return True

    # -- hand-offs (prefill side) -------------------------------------------------------------------------------------

    def keep_blocks(self, request: Request, block_ids: Sequence[int]) -> None:
        """A HANDOFF request is computed, and no transfer touches its blocks: if there is room, move the KV of these to
        the holding area, and free the pool's blocks. ``kept_blocks`` tells."""

        def kept() -> None:
            self._observe_sending(request)
            free_blocks(self.pool, request)
            self.output.kept_blocks.append(KeptBlocks(request.request_id, tuple(request.held_block_ids)))

        if not self.holding.keep(request, block_ids, kept):
            self.output.kept_blocks.append(KeptBlocks(request.request_id, None))

    def _observe_sending(self, request: Request) -> None:
        """Its blocks are the pool's again."""
        if request.status is RequestStatus.PREFILL_SENDING and request.block_ids:
            self.times.sending.observe(self._clock.now() - request.entered_s)

    def sending_finished(self, request: Request) -> None:
        """No transfer touches the blocks of a HANDOFF request any more, and none will."""
        self._observe_sending(request)
        if request.abort_reason is not None:
            self.finish(request, FINISH_STATUS[request.abort_reason])
        elif request.status is RequestStatus.PREFILL_SENDING:
            self.finish(request, RequestStatus.FINISHED_STOPPED)
        else:
            self.finish(request, RequestStatus.FINISHED_ABORTED)

    # -- schedule -----------------------------------------------------------------------------------------------------

    def set_exclusive_prefill(self, exclusive: bool) -> None:
        """Whether a HANDOFF prefill runs in steps of its own; may change between steps."""
        self._planner.exclusive_prefill = exclusive

    def schedule(self) -> SchedulerOutput | None:
        """The next step's work; None if there is nothing to compute. Must be followed by ``update``."""
        preempted = self._decode_allocator.grow()
        if self.admission.num_waiting and not preempted:
            self._admit()
        if self.holding.is_short:
            self.holding.make_room(self.admission.held())
        if self.holding.has_copies:
            self.holding.copy_some()
        scheduled = self._scheduled = self._planner.plan()
        if not scheduled.num_tokens:
            return None
        return self._batch.build(scheduled.decodes, scheduled.chunks)

    def _admit(self) -> None:
        while self._may_try_to_admit:
            request = self.admission.admit(self._load())
            if request is None:
                break
            self._place(request)
        if self.admission.num_waiting and not self.num_places:
            for tenant in self.admission.shares.waiting:
                self._give_share(tenant)

    def _give_share(self, tenant: str) -> None:
        """Requests of a key that waits below its share get slots and blocks, if need be of keys above theirs."""
        while True:
            held = self._holdings()
            wanted = self.admission.num_blocks_wanted(self._load(), tenant) if held.allow(tenant, 0) else None
            if wanted is None or not held.allow(tenant, wanted):
                return
            request = self.admission.admit(self._load(), tenant) if self._may_try_to_admit else None
            if request is not None:
                self._place(request)
            elif not self._decode_allocator.make_room(held):
                return

    def _holdings(self) -> Holdings:
        outside = (RequestStatus.REMOTE_PREFILLING, RequestStatus.LOADING_KV)
        admitted = [
            request
            for request in self.requests.values()
            if request.slot >= 0 or (request.status in outside and request.block_ids)
        ]
        return Holdings(admitted, self.admission.shares.waiting, self.max_num_running, self.pool.num_blocks)

    @property
    def _may_try_to_admit(self) -> bool:
        """Whether a request waits and a slot is free, or perhaps none is needed. Most steps admit nothing: they must
        not pay for ``_load``."""
        return self.admission.num_waiting > 0 and (self._has_slot or self.admission.may_hold)

    @property
    def _has_slot(self) -> bool:
        return self.num_admitted < self.max_num_running

    def _load(self) -> EngineLoad:
        prefilling = list(self._batch.prefilling)
        return EngineLoad(
            num_admitted=self.num_admitted,
            num_with_slot=len(self._batch),
            backlog=tuple([Backlog(request.num_missing_tokens, request.arrival) for request in prefilling]),
            token_budget=self.token_budget,
            chunk=lambda num_tokens: self.token_budget.prefill_budget(
                prefilling, self._max_num_batched_tokens, num_tokens // 2
            ),
            num_remote_tokens=self._remote_prefills.num_tokens,
            num_remote_prefills=len(self._remote_prefills),
            has_slot=self._has_slot,
        )

    def steady_decodes(self, token_id: int) -> SteadyDecodes | None:
        """The next steps, if they are like the last one: the same answers get a token each, ``token_id``, which ends
        none. None: something else happens, or may."""
        rows, last = self._batch.decode_rows(), self._scheduled
        is_alone = not (self.admission.num_waiting or self._batch.prefilling or self.holding.has_copies)
        is_same = rows and last.decodes is rows and not last.chunks
        if not (is_alone and is_same) or self.holding.is_short or not self.output.is_empty:
            return None
        if any(token_id in request.stop_ids or request.report_interval > 1 for request in rows):
            return None
        return SteadyDecodes(rows, self.pool, self._decode_allocator, self.token_budget, self._count_decodes)

    def _count_decodes(self, num_steps: int) -> None:
        self.num_steps += num_steps
        self.num_generated_tokens += num_steps * self._batch.num_decoding

    def step_work(self) -> StepWork:
        """What the scheduled batch computes, for ``token_budget``. To be called before ``update``."""
        return self.token_budget.work_of(self._scheduled)

    def _place(self, request: Request) -> None:
        """Start an admitted request according to its mode."""
        is_held = request.status is RequestStatus.KV_HELD
        waits = self.times.held if is_held else self.times.queue
        waits.observe(self._clock.now() - request.entered_s)
        if request.pause is not None and self.pauses is not None:
            self._resumed(self.pauses, request, request.pause)
        if request.mode is PrefillMode.REMOTE:
            if self._start_remote(request):
                if not request.held_block_ids:
                    self._num_outside += 1
                if not request.handoff_number:
                    self._remote_prefills.send(request)
                request.move(RequestStatus.REMOTE_PREFILLING, self._clock.now())
                return
            request.stay_here()
        if request.mode is PrefillMode.HANDOFF:
            request.num_sent_blocks = request.num_load_tokens // self.pool.block_size
        if not self._load_more(request):
            self._start_prefill(request)

    def _start_prefill(self, request: Request) -> None:
        request.move(RequestStatus.RUNNING, self._clock.now())
        if request.sampling.is_prefetch:
            report_token(self.output, request, None, None, FinishReason.LENGTH)
            self.finish(request, RequestStatus.FINISHED_LENGTH)
            return
        is_held = bool(request.held_block_ids)
        self.holding.release(request)
        # Without a tail held KV lacks that of the last token only: what follows is a decode.
        self._batch.enter(request, decoding=is_held and not request.tail_tokens)
        if request.mode is PrefillMode.HANDOFF:
            report_blocks(self.output, request, self.pool.block_size)

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, result: ModelOutput) -> None:
        """Apply the executor's output for the last schedule."""
        self.num_steps += 1
        self.num_generated_tokens += len(result.token_ids) - result.token_ids.count(NO_TOKEN)
        self.num_prefilled_tokens += self._scheduled.num_prefill_tokens
        self._update_decodes(result)
        if self._scheduled.chunks:
            num_decodes = len(self._scheduled.decodes)
            tokens = iter(result.token_ids[num_decodes:])
            for row, (request, count) in enumerate(self._scheduled.chunks, num_decodes):
                self._update_chunk(request, count, row, tokens, result)

    def _update_decodes(self, result: ModelOutput) -> None:
        outputs, logprobs, failures = self.output.outputs, result.logprobs, result.failures
        decodes, size = self._scheduled.decodes, self.pool.block_size
        ended: list[tuple[Request, RequestStatus]] = []
        failed: list[tuple[Request, str]] = []
        for row, (request, token_id) in enumerate(zip(decodes, result.token_ids[: len(decodes)], strict=True)):
            if failures and row in failures:
                failed.append((request, failures[row]))
                continue
            if token_id == NO_TOKEN:
                continue
            known = request.token_ids
            known.append(token_id)
            request.num_computed_tokens = computed = len(known) - 1
            if computed % size == 0:
                cache_full_blocks(self.pool, request)
                if computed == size * len(request.block_ids):
                    self._decode_allocator.needing.append(request)
            if token_id in request.stop_ids or len(known) >= request.length_limit:
                reason = finish_reason(request, token_id)
                if reason is not None:
                    report_token(self.output, request, token_id, logprobs.get(row), reason)
                    ended.append((request, FINISH_STATUS[reason]))
                    continue
            position = computed - request.num_prompt_tokens
            if request.report_interval == 1:
                logprob = (logprobs[row],) if logprobs and row in logprobs else None
                outputs.append(TokenOutput(request.request_id, (token_id,), logprobs=logprob, position=position))
            elif position + 1 - request.num_reported >= request.report_interval:
                report_token(self.output, request, token_id, None, None)
        for request, status in ended:
            self.finish(request, status)
        for request, reason_text in failed:
            self._fail(request, reason_text)

    def _update_chunk(self, request: Request, count: int, row: int, tokens: Iterator[int], result: ModelOutput) -> None:
        is_last = request.num_computed_tokens + count == len(request.token_ids)
        token_id = next(tokens) if is_last and not request.is_prefill_only else None
        request.num_computed_tokens += count - 1 if token_id == NO_TOKEN else count
        if row in result.failures:
            self._fail(request, result.failures[row])
            return
        cache_full_blocks(self.pool, request)
        if row in result.prompt_logprobs:
            request.prompt_logprobs.extend(result.prompt_logprobs[row])
        if request.num_computed_tokens < len(request.token_ids):
            if request.mode is PrefillMode.HANDOFF:
                report_blocks(self.output, request, self.pool.block_size)
        elif request.mode is PrefillMode.HANDOFF:
            report_last_blocks(self.output, request, token_id, result.logprobs.get(row))
            self._batch.leave(request)
            now_s = self._clock.now()
            self.times.prefill.observe(now_s - request.entered_s)
            request.move(RequestStatus.PREFILL_SENDING, now_s)
        elif request.is_prefill_only:
            report_token(self.output, request, None, None, FinishReason.LENGTH)
            self.finish(request, RequestStatus.FINISHED_LENGTH)
        else:
            assert token_id is not None
            self._batch.start_decoding(request)
            self.times.prefill.observe(self._clock.now() - request.entered_s)
            self._accept_first(request, token_id, result.logprobs.get(row))

    def _fail(self, request: Request, reason: str) -> None:
        """End one request that the executor cannot continue."""
        position = request.num_output_tokens
        if reason == NOT_NUMBERS:
            self.pool.forget(request.block_ids)  # an attention may have let their KV see later tokens' NaN
        self.abort(request, FinishReason.ERROR)
        self.output.outputs.append(
            TokenOutput(
                request.request_id,
                finish_reason=FinishReason.ERROR,
                error=reason,
                position=position,
                is_final=True,
                status=500 if reason == NOT_NUMBERS else 400,
            )
        )

    def _accept_first(self, request: Request, token_id: int, logprobs: PositionLogprobs | None) -> None:
        """Add the first token after a completed prefill."""
        is_last = self._report_first(request, token_id, logprobs)
        if not is_last and request.num_computed_tokens == self.pool.block_size * len(request.block_ids):
            self._decode_allocator.needing.append(request)

    def _report_first(self, request: Request, token_id: int, logprobs: PositionLogprobs | None) -> bool:
        """Whether it was the last, too; the request has ended then."""
        request.is_late = request.is_late_at(self._clock.now())
        request.token_ids.append(token_id)
        reason = finish_reason(request, token_id)
        report_token(self.output, request, token_id, logprobs, reason)
        if reason is not None:
            self.finish(request, FINISH_STATUS[reason])
        return reason is not None
