"""The engine: schedule, execute, update; and the methods that a worker calls between two steps.

It owns the scheduler, the block pool, the loans to hand-offs and the executor, and is driven by one thread. It does not
know sockets, queues or transports. A worker calls ``step()`` while ``has_work()`` and carries out the StepOutput.
Answers of peers come back through the methods below, between steps.

Who frees what. Blocks of a finished request are free at once, with two exceptions: blocks lent to a hand-off
(``loans.py``; the hand-off ledger decides when a loan ends), and blocks of a HANDOFF request that are being sent (until
``sending_finished``). Either may be of the pool or of the holding area (``holding.py``).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock
from kvrelay.core.events import KvEvent, LoadMetrics, TokenCounts
from kvrelay.core.handoff import HandoffId
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason, RequestStatus
from kvrelay.dp.group import Alone, Group
from kvrelay.dp.protocol import Round
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.cached_free import ByValue
from kvrelay.engine.holding import holding_of
from kvrelay.engine.kv_source import KvStorage, SourceBeyond
from kvrelay.engine.limits import NONE_PENDING, AdmissionLimits, PendingArrivals
from kvrelay.engine.loans import HandoffIds, Loans, remote_prefill
from kvrelay.engine.pauses import Pauses
from kvrelay.engine.reports import stop_token_ids
from kvrelay.engine.request import UINT64_MASK, PrefillMode, Request, check_tokens
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.stats import EngineStats, HoldingStats, SessionStats
from kvrelay.engine.step import Executor, KeptBlocks, StepOutput
from kvrelay.errors import ConfigError, EngineDeadError, IntegrityError, InvalidInputError, KvrelayError

_log = logging.getLogger(__name__)

MAX_LENT_SHARE = 0.25
"""Of the pool: no more is bound by peers that read prefixes."""


class EngineCore:
    """One engine. Not thread-safe: all calls come from the thread that steps it.

    ``seed`` seeds the generator of seeds for requests without one. ``group`` is the engine's data-parallel group, if
    any.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        clock: Clock,
        *,
        worker_id: str,
        seed: int = 0,
        group: Group | None = None,
    ) -> None:
        self.executor = executor
        self.config = config
        self.worker_id = worker_id
        self.group = group or Alone()
        self._clock = clock
        self._random = random.Random(seed)
        self._num_arrived = 0
        self._tail_tokens = executor.kv_layout.tail_tokens
        self._dead: EngineDeadError | None = None
        retains = config.kv_retention == "value" and config.enable_prefix_caching
        self.pauses = Pauses(clock) if retains else None
        """When sessions return; None: blocks are retained by recency."""
        cached_free = None if self.pauses is None else ByValue(clock, self.pauses.prior, self._block_seconds)
        self.pool = BlockPool(
            executor.num_blocks,
            executor.kv_layout.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            cached_free=cached_free,
        )
        self.holding = holding_of(executor, clock)
        self.loans = Loans()
        self._remote: dict[HandoffId, Request] = {}
        """Requests that wait for a hand-off."""
        self._handoff_ids = HandoffIds(worker_id)
        self.scheduler = Scheduler(
            self.pool, clock, self._start_remote, config, holding=self.holding, pauses=self.pauses
        )
        self.limits = AdmissionLimits(config, self.scheduler, clock)
        self.max_model_len = _max_model_len(executor, config)
        """Longest prompt plus answer, in tokens: the model's limit, the configured one, and the whole pool."""
        self.storage: KvStorage | None = None
        """KV beyond the pool."""

    def attach(self, storage: KvStorage) -> None:
        """Keep what the pool evicts there. Before the first request."""
        self.storage = storage
        self.scheduler.attach(storage)

    def add_source(self, source: SourceBeyond) -> None:
        """Prompts may also begin with what this has."""
        self.scheduler.add_source(source)

    def __repr__(self) -> str:
        return f"EngineCore({self.worker_id}, {self.scheduler!r}, {len(self.loans)} loans)"

    @property
    def lends(self) -> EngineCore:
        """Its hand-offs have blocks."""
        return self

    @property
    def moves(self) -> None:
        """Workers move its KV."""

    @property
    def schedules(self) -> EngineCore:
        """Its steps are its own."""
        return self

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self, announce: Callable[[StepOutput], None] | None = None) -> StepOutput:
        """Schedule, execute, update. If the executor fails, every request gets an error output, and the next call
        raises EngineDeadError.

        ``announce`` gets, before the executor runs, the output that need not wait for it: first tokens from hand-offs,
        prefills to send away, reads to begin. Without ``announce`` all of this comes with the result.
        """
        self._raise_if_dead()
        scheduler, began_s = self.scheduler, self._clock.now()
        work = scheduler.schedule()
        if work is not None and announce is not None and not scheduler.output.is_empty:
            announce(self._take_output())
        try:
            kind = self.group.begin_round(has_batch=work is not None)
            if work is not None:
                result = self.executor.execute(work)
            elif kind is Round.DUMMY:
                self.group.execute_dummy()
            else:
                self.executor.check()
        except Exception as exc:  # noqa: BLE001 - whatever a device or a kernel may raise
            return self._die(self.group.explain(exc))
        if work is not None:
            computed = scheduler.step_work()
            scheduler.update(result)
            seconds = self._clock.now() - began_s
            scheduler.token_budget.costs.add(computed, seconds)
            scheduler.times.step.observe(seconds)
        self.limits.observe()
        return self._take_output()

    def step_for_group(self) -> None:
        """Nothing is scheduled here any more: take part in the group's step if one is due. Raises EngineDeadError."""
        if self.group.begin_round(has_batch=False) is Round.DUMMY:
            self.group.execute_dummy()

    def has_work(self) -> bool:
        """Whether ``step`` has something to compute or to report now."""
        return self._dead is not None or self.scheduler.has_work or self._has_news() or self.group.owes_step

    def has_unfinished(self) -> bool:
        """Whether requests or hand-offs are in progress, including those that wait for a transfer."""
        return bool(self.scheduler.requests) or len(self.loans) > 0

    @property
    def num_requests(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self.scheduler.requests)

    def _take_output(self) -> StepOutput:
        output = self.scheduler.take_output()
        output.kv_events = self.drain_events()
        return output

    def _has_news(self) -> bool:
        has_events = self.pool.has_events or (self.storage is not None and self.storage.has_events)
        return has_events or not self.scheduler.output.is_empty

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add ``request``.

        Raises InvalidInputError (a wrong token, parameter or id), PromptTooLongError (it can never fit),
        OverloadedError (above a limit of ``admission``) or EngineDeadError, and then changes nothing.
        """
        self._raise_if_dead()
        self._validate(request)
        if not self.scheduler.requests:
            self.limits.reset_rates()
        is_new = request.num_output_tokens == 0 and request.mode is not PrefillMode.HANDOFF
        self.limits.check(len(request.token_ids), is_new=is_new, tenant=request.tenant)
        if is_new and request.placement is not None and request.placement.refuses_late:
            self.limits.check_objective(request)
        sampling = request.sampling
        self._num_arrived += 1
        request.arrival = self._num_arrived
        request.seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed & UINT64_MASK
        request.stop_ids = stop_token_ids(sampling, self.executor.eos_token_ids)
        request.tail_tokens = self._tail_tokens
        request.length_limit = min(request.num_prompt_tokens + sampling.max_tokens, self.max_model_len)
        request.times.append((RequestStatus.WAITING, self._clock.now()))
        if request.mode is PrefillMode.REMOTE and request.must_prefill_here:
            request.mode = PrefillMode.LOCAL
        has_all = len(request.token_ids) >= request.length_limit and not request.is_prefill_only
        if has_all and not self.scheduler.prefetches(request):
            # A migrated request whose last token was already generated: nothing is left to generate.
            self._close_unopened(request)
            self.scheduler.output.outputs.append(
                TokenOutput(
                    request.request_id,
                    finish_reason=FinishReason.LENGTH,
                    num_cached_tokens=0,
                    position=request.num_output_tokens,
                )
            )
            return
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request without an answer, in any state. Unknown ids are ignored: the request may just have ended."""
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)

    def check_room(
        self, num_tokens: int, *, is_new: bool, ahead: PendingArrivals = NONE_PENDING, tenant: str = ""
    ) -> None:
        """Raise OverloadedError if a request of ``num_tokens`` of this API key is above a limit now. From any thread,
        also during a step."""
        self.limits.check(num_tokens, is_new=is_new, tenant=tenant, ahead=ahead)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of the request that need not be computed now: the prefix cache or a tier has them. Its hashes are kept
        for admission."""
        return self.scheduler.admission.num_held_tokens(request)

    def session_paused(self, request_id: str, kind: str, within_s: float = 0.0, is_over: bool = False) -> None:
        """This request has ended, and its session does as ``SessionPaused`` says. Unknown ids are ignored: the session
        may have returned."""
        if self.pauses is None:
            return
        if is_over:
            self.pauses.over(request_id)
        else:
            self.pauses.named(request_id, kind, within_s)

    def _block_seconds(self, block_id: int) -> float:
        """How long it would take to have this cached block again if it were evicted now."""
        size, entry = self.pool.block_size, self.pool.entry(block_id)
        compute_s = self.scheduler.token_budget.costs.cost.extra_seconds(size, entry.depth * size)
        load_s = None if self.storage is None else self.storage.load_s(entry.sequence_hash)
        return compute_s if load_s is None else min(load_s, compute_s)

    def _validate(self, request: Request) -> None:
        request.sampling.validate(self.executor.vocab_size)
        check_tokens(
            request,
            is_running=request.request_id in self.scheduler.requests,
            vocab_size=self.executor.vocab_size,
            max_model_len=self.max_model_len,
        )
        held = request.num_load_tokens
        has_tail = self._tail_tokens > 0
        if request.mode is PrefillMode.HANDOFF and (
            request.is_prefill_only != has_tail or not 0 <= held < len(request.token_ids) or held % self.pool.block_size
        ):
            raise InvalidInputError(f"request {request.request_id} cannot be a hand-off", param="num_load_tokens")

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.REMOTE_PREFILLING and request.handoff_id is not None:
            del self._remote[request.handoff_id]
            self.scheduler.output.closed_handoffs.append(request.handoff_id)
        elif request.is_waiting:
            self._close_unopened(request)
        self.scheduler.abort(request, reason)

    def _close_unopened(self, request: Request) -> None:
        """A prefill worker may have claimed a hand-off that never opened here, because others know its id
        (prefill-first)."""
        if request.mode is PrefillMode.REMOTE and request.handoff_number:
            self.scheduler.output.closed_handoffs.append(HandoffId(self.worker_id, request.handoff_number))

    # -- remote prefills: this is the decode side ---------------------------------------------------------------------

    def resume_handoff(
        self, handoff_id: HandoffId, loan: int, token_id: int | None, logprobs: PositionLogprobs | None
    ) -> bool:
        """The blocks of ``loan`` hold the KV of the request that waits for this hand-off, and ``token_id`` is its first
        token; None if the tail of its prompt is to be computed here.

        False if no request waits any more, or if the token is invalid and the request is computed here.
        """
        request = self._remote.pop(handoff_id, None)
        lent = self.loans.find(handoff_id, loan)
        if request is None or lent is None:
            return False
        is_token = token_id is not None and 0 <= token_id < self.executor.vocab_size
        if not (token_id is None if request.tail_tokens else is_token):
            self.scheduler.remote_lost(request)
            return False
        is_held = lent.pool is self.holding.blocks
        block_ids = request.held_block_ids if is_held else request.block_ids
        num_lent = len(lent.block_ids)
        if tuple(block_ids[:num_lent]) != lent.block_ids:
            lent.pool.acquire(lent.block_ids)
            lent.pool.release(block_ids[:num_lent])
            block_ids[:num_lent] = lent.block_ids
        if is_held:
            self.scheduler.remote_held(request, token_id, logprobs)
        else:
            self.scheduler.remote_done(request, token_id, logprobs)
        return True

    def has_begun(self, request_id: str) -> bool:
        """Whether anything of this request is computed or loaded. Unknown ids have begun."""
        request = self.scheduler.requests.get(request_id)
        return request is None or request.status is not RequestStatus.WAITING

    def compute_handoff_here(self, handoff_id: HandoffId) -> None:
        """No KV will arrive: the request, if it still waits, is computed here in other blocks, or placed anew."""
        request = self._remote.pop(handoff_id, None)
        if request is not None:
            self.scheduler.remote_lost(request)

    def lend_fresh(self, handoff_id: HandoffId, loan: int) -> tuple[int, ...] | None:
        """Blocks for a later claimant, lent as ``loan``; None if no request waits or no blocks are free."""
        if handoff_id not in self._remote:
            return None
        before = self.loans.find(handoff_id, loan - 1)
        lent = None if before is None else self.loans.lend_fresh(handoff_id, loan, before)
        return None if lent is None else lent.block_ids

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        """No peer touches the blocks of this loan any more."""
        self.loans.end(handoff_id, loan)

    def lend_prefix(
        self, handoff_id: HandoffId, token_ids: Sequence[int], cache_salt: str | None
    ) -> tuple[int, ...] | None:
        """The cached blocks with which this prompt begins, lent as loan 1 to a peer that only reads; None if there are
        none, or if requests here need the room that such loans bind."""
        size = self.pool.block_size
        hashes = compute_sequence_hashes(token_ids, size, salt=cache_salt)
        # ``find_prefix`` leaves the last token to compute.
        block_ids = self.pool.find_prefix((*token_ids, 0), hashes)
        num_lent = self.loans.num_only_read + self.pool.num_free_among(block_ids)
        if (
            not block_ids
            or self.scheduler.admission.is_short_of_blocks
            or num_lent > self.pool.num_blocks * MAX_LENT_SHARE
        ):
            return None
        return self.loans.lend(handoff_id, self.pool, block_ids, len(block_ids)).block_ids

    def writable_blocks(self) -> Mapping[tuple[HandoffId, int], tuple[int, ...]]:
        """The lent blocks that a peer may write to, by hand-off and loan. From any thread."""
        return self.loans.writable_blocks()

    def keep_prefills_here(self) -> None:
        """No prefill worker is left: compute waiting remote prefills here."""
        self.scheduler.admission.cancel_remote_prefills()

    def _start_remote(self, request: Request) -> bool:
        if request.num_computed_tokens >= request.num_handoff_tokens:
            self._close_unopened(request)
            return False
        request.handoff_id = handoff_id = self._handoff_ids.of(request)
        self._remote[handoff_id] = request
        if request.held_block_ids:
            lent = self.loans.lend(handoff_id, self.holding.blocks, request.held_block_ids, 0)
        else:
            block_ids = request.block_ids[: self.pool.blocks_for(request.num_handoff_tokens)]
            lent = self.loans.lend(handoff_id, self.pool, block_ids, request.num_cached_blocks)
        sampling = msgspec.structs.replace(request.sampling, seed=request.seed)
        self.scheduler.output.remote_prefills.append(
            remote_prefill(request, handoff_id, sampling, lent.block_ids, request.num_computed_tokens)
        )
        return True

    # -- hand-offs: this is the prefill side --------------------------------------------------------------------------

    def set_exclusive_prefill(self, exclusive: bool) -> None:
        """Whether hand-off prefills run in steps of their own; may change between steps."""
        self.scheduler.set_exclusive_prefill(exclusive)

    def kv_loaded(self, request_id: str, ok: bool, num_blocks: int = 0) -> None:
        """The read that a KvLoad asked for has ended: with all blocks, or with the leading ``num_blocks``."""
        request = self.scheduler.requests.get(request_id)
        if request is not None and request.status is RequestStatus.LOADING_KV:
            self.scheduler.kv_loaded(request, ok, num_blocks)

    def keep_blocks(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The hand-off is computed, and no transfer touches its blocks until ``StepOutput.kept_blocks`` answers: if
        there is room, move the KV of ``block_ids`` out of the pool."""
        request = self.scheduler.requests.get(request_id)
        if request is None or request.status is not RequestStatus.PREFILL_SENDING:
            self.scheduler.output.kept_blocks.append(KeptBlocks(request_id, None))
        else:
            self.scheduler.keep_blocks(request, block_ids)

    def sending_finished(self, request_id: str) -> None:
        """No transfer touches the blocks of this hand-off any more, and none will: free them."""
        request = self.scheduler.requests.get(request_id)
        if request is not None and request.mode is PrefillMode.HANDOFF:
            self.scheduler.sending_finished(request)

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def metrics(self) -> LoadMetrics:
        """The load now, from any thread. ``num_blocks_in_use`` counts blocks that are held or quarantined, not those
        that are only cached."""
        scheduler, admission, pool = self.scheduler, self.scheduler.admission, self.pool
        num_active = pool.num_blocks - pool.num_free
        return LoadMetrics(
            worker_id=self.worker_id,
            num_admitted=scheduler.num_admitted,
            num_slots=scheduler.max_num_running,
            num_blocks_in_use=num_active,
            num_blocks=pool.num_blocks,
            num_waiting=scheduler.num_waiting,
            cache_usage=num_active / pool.num_blocks,
            prefix_hit_rate=admission.num_hit_tokens / max(1, admission.num_queried_tokens),
            kv_demand=scheduler.num_demanded_blocks / pool.num_blocks,
            num_running=scheduler.num_decoding,
            num_prefill_tokens=admission.num_waiting_tokens + scheduler.num_prefilling_tokens,
            step_cost=scheduler.token_budget.costs.cost,
        )

    def stats(self) -> EngineStats:
        """Counts and gauges. From any thread."""
        scheduler = self.scheduler
        costs = scheduler.token_budget.costs
        return EngineStats(
            load=self.metrics(),
            tokens=TokenCounts(scheduler.num_prefilled_tokens, scheduler.num_generated_tokens, scheduler.num_steps),
            num_blocks_quarantined=self.pool.num_quarantined,
            num_queried_tokens=scheduler.admission.num_queried_tokens,
            num_hit_tokens=scheduler.admission.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            step_cost_error=costs.relative_error,
            step_spread=costs.spread,
            num_step_samples=costs.num_samples,
            num_step_samples_rejected=costs.num_rejected,
            times=scheduler.times,
            holding=self._holding_stats(),
            tiers=None if self.storage is None else self.storage.stats(),
            sessions=None if self.pauses is None else SessionStats(self.pauses.num_paused, self.pauses.counts),
        )

    def _holding_stats(self) -> HoldingStats | None:
        holding, area = self.holding, self.holding.blocks
        if not area.num_blocks:
            return None
        num_in_use = area.num_blocks - area.num_free
        num_spilled = holding.spilled.num_blocks - holding.spilled.num_free
        return HoldingStats(
            num_blocks=area.num_blocks,
            num_blocks_in_use=num_in_use,
            num_blocks_spilled=num_spilled,
            num_arriving=holding.num_arriving,
            num_held=holding.num_held,
            num_spilled=holding.num_spilled,
            num_full=holding.num_full,
        )

    def drain_events(self) -> list[KvEvent]:
        """Events of the prefix cache and the tiers that no step has delivered yet."""
        events = self.pool.drain_events()
        return events if self.storage is None else events + self.storage.drain_events()

    def cached_hashes(self) -> list[int]:
        """Sequence hashes of every cached block."""
        return self.pool.cached_hashes()

    def clear_cache(self) -> None:
        """Forget every cached prefix, those beyond the pool too; running requests continue."""
        self.pool.clear_cache()
        if self.storage is not None:
            self.storage.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the requests and loans account for every block and all counts are true."""
        scheduler, pools = self.scheduler, (self.pool, self.holding.blocks, self.holding.spilled)
        owners: Counter[int] = Counter()
        for request in scheduler.requests.values():
            owners.update(request.block_ids)
            owners.update(request.held_block_ids)
        for block_ids in self.holding.spilling.values():
            owners.update(block_ids)
        quarantined: Counter[int] = Counter()
        for loan in self.loans:
            owners.update(loan.block_ids)
            quarantined.update(loan.quarantined)
        for pool in pools:
            pool.check_integrity()
            for block_id in pool.block_ids:
                if pool.num_refs(block_id) != owners[block_id]:
                    raise IntegrityError(f"block {block_id} has {owners[block_id]} owners: {pool.describe(block_id)}")
        waiting = [request for request in scheduler.requests.values() if request.is_waiting]
        num_waiting_blocks = sum(self.pool.blocks_for(len(request.token_ids)) for request in waiting)
        admission = scheduler.admission
        if (len(waiting), num_waiting_blocks) != (admission.num_waiting, admission.num_waiting_blocks):
            raise IntegrityError(f"{len(waiting)} requests wait for {num_waiting_blocks} blocks: {admission!r}")
        num_admitted = sum(request.slot >= 0 or request.will_get_slot for request in scheduler.requests.values())
        if num_admitted != scheduler.num_admitted:
            raise IntegrityError(f"{num_admitted} requests have a slot or a reserved one: {scheduler!r}")
        num_quarantined = sum(pool.num_quarantined for pool in pools)
        if quarantined.total() != num_quarantined or set(quarantined.values()) - {1}:
            raise IntegrityError(f"loans cover {quarantined.total()} blocks, {num_quarantined} quarantined")
        arriving = [r for r in self._remote.values() if r.held_block_ids]
        num_arriving_blocks = sum(len(request.held_block_ids) for request in arriving)
        if (len(arriving), num_arriving_blocks) != (self.holding.num_arriving, self.holding.num_arriving_blocks):
            raise IntegrityError(f"KV of {len(arriving)} requests is to come: {self.holding!r}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _die(self, cause: Exception) -> StepOutput:
        """Fail every request. The engine computes nothing any more, but loans and pool stay consistent."""
        reason = cause.message if isinstance(cause, KvrelayError) else repr(cause)
        self._dead = EngineDeadError(f"the executor failed: {reason}")
        self._dead.__cause__ = cause
        for request in list(self.scheduler.requests.values()):
            if request.abort_reason is None:
                self._end(request, FinishReason.ERROR)
                self.scheduler.output.outputs.append(
                    TokenOutput(request.request_id, (), finish_reason=FinishReason.ERROR, error=self._dead.message)
                )
        return self._take_output()


def _max_model_len(executor: Executor, config: EngineConfig) -> int:
    """Raises ConfigError if the pool does not hold what ``config`` asks for. A limit of the model gives way to it."""
    wanted = min(executor.max_model_len, config.max_model_len or executor.max_model_len)
    num_tokens = executor.num_blocks * executor.kv_layout.block_size
    if num_tokens >= wanted:
        return wanted
    if config.max_model_len:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {num_tokens} tokens that the KV pool holds: lower "
            "--max-model-len, or raise --kv-cache-memory or --num-blocks",
            param="max_model_len",
        )
    _log.warning("max_model_len is %d instead of the model's %d: the KV pool holds no more", num_tokens, wanted)
    return num_tokens
