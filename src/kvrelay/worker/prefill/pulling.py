"""A worker's prefill side: pull from the global queue, and compute for decode workers.

It owns the pull loop, and each queue entry until it is acknowledged. The ledger (``kvrelay/handoff``), driven by
``sides/prefill.py``, owns each hand-off; the engine schedules the prefills.

One prefill computes while the next one is pulled and the last writes of the previous one are in flight, so the engine
never waits for the queue. Claims are in flight while their prefills compute, so it does not wait for claims either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from kvrelay.control.base import PrefillDelivery
from kvrelay.control.redelivery import KEEPALIVE_INTERVAL_S, return_delay_s
from kvrelay.core.handoff import HandoffId, HandoffOrder
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.tasks import TaskSet, end_tasks, failure_of
from kvrelay.errors import KvrelayError
from kvrelay.handoff.base import EndReason, LeaseLost
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules, PrefillState
from kvrelay.rpc.heartbeat import Heartbeat
from kvrelay.worker.prefill.links import DecodeLinks
from kvrelay.worker.shutdown import none_left
from kvrelay.worker.sides.prefill import Job, OutgoingHandoffs, PrefillPorts
from kvrelay.worker.surroundings import Surroundings
from kvrelay.worker.turns import LoopTurns, PeersInMemory

_log = logging.getLogger(__name__)

PULL_TIMEOUT_S = 600.0
PULL_RETRY_S = 1.0
CLAIM_TIMEOUT_S = 10.0
"""From the pull to the answer, including the connection if it is the first."""
CLOSE_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 150.0
"""Longer than any decode worker waits for a hand-off that was claimed (``DecodeRules.grant_timeout_s``)."""
CONFIRM_TIMEOUT_S = 10.0
"""Then, until decode workers have confirmed what was written: one that hears of our leaving first computes it again."""
MAX_COMPUTING = 2
"""Hand-offs pulled and not yet computed: one in the engine, one waiting."""
MIN_GONE_FOR_S = 30.0
GONE_FOR_DETECTIONS = 3.0
"""Longer than a connection outlives a silent peer: after that its requests have also migrated. Several times as long,
because frontends use the decode worker's lease, which may be longer than ours."""


class PrefillSide:
    """Serves the prefill queue between ``start`` and ``stop``. ``computes_here`` gets hand-offs of this worker itself:
    its decode side shall compute them without one."""

    def __init__(self, around: Surroundings, computes_here: Callable[[HandoffId], None]) -> None:
        detection_s = Heartbeat.for_lease(around.settings.control.lease_ttl_s).detection_s
        layout = around.engine.facts.kv_layout
        rules = PrefillRules(
            worker_id=around.worker_id,
            block_size=layout.block_size,
            kv_compatibility=around.kv_compatibility,
            regions=layout.region_names,
            entry_tokens=layout.entry_tokens,
            tail_tokens=layout.tail_tokens,
            claim_timeout_s=CLAIM_TIMEOUT_S,
            gone_for_s=max(GONE_FOR_DETECTIONS * detection_s, MIN_GONE_FOR_S),
            checksums=around.checksums.required,
            late_s=around.transfer.late_s,
            can_keep=around.engine.facts.num_holding_blocks > 0,
        )
        turns, moves_kv = LoopTurns(), around.engine.facts.moves_kv
        self._links = DecodeLinks(around.peers, None if moves_kv else around.memory)
        ports = PrefillPorts(
            turns,
            around.engine,
            around.transfer,
            around.checksums,
            around.memory,
            self._links,
            PeersInMemory(around.transfer, moves_kv=moves_kv).may_use,
            self._prepare,
            computes_here,
            lambda: around.term,
        )
        self.handoffs = OutgoingHandoffs(PrefillLedger(rules), ports, model=around.settings.model, marks=around.marks)
        self._around = around
        self._kv_compatibility = around.kv_compatibility
        self._queue = around.control.prefill_queue
        self._slots = asyncio.Semaphore(MAX_COMPUTING)
        self._pulling: asyncio.Task[None] | None = None
        self._preparing = TaskSet()
        """Entries whose grammars are being compiled; nothing is claimed for them yet."""
        self._settling = TaskSet()
        self._tasks = TaskSet()
        self._tasks.spawn(turns.tick_forever(self.handoffs))

    @property
    def num_handoffs(self) -> int:
        """Hand-offs that hold blocks, or whose entries are not acknowledged."""
        return len(self.handoffs.jobs) + len(self._preparing)

    @property
    def is_pulling(self) -> bool:
        return self._pulling is not None

    def start(self) -> None:
        """Begin to pull."""
        if self._pulling is None:
            self._pulling = self._tasks.spawn(self._pull_forever())

    def stop(self) -> None:
        """Pull nothing more."""
        if self._pulling is not None:
            self._pulling.cancel()
            self._pulling = None

    async def drain(self) -> None:
        """Stop pulling; return when every hand-off, including its reads and writes, has ended and its decode worker
        knows, or when no decode worker waits for it any more."""
        pulling = self._pulling
        self.stop()
        if pulling is not None:
            await end_tasks([pulling])
        await self._preparing.wait()
        await none_left(lambda: self.handoffs.jobs, DRAIN_TIMEOUT_S)
        if self.handoffs.jobs:
            _log.error("gave up %d hand-offs that did not end in %g s", self.num_handoffs, DRAIN_TIMEOUT_S)
            self.give_up_all(EndReason.LEAVING)
            await none_left(lambda: self.handoffs.jobs, CLOSE_TIMEOUT_S)
        await none_left(lambda: self.handoffs.ledger.num_in(PrefillState.CONFIRMING), CONFIRM_TIMEOUT_S)
        await self._settling.wait()

    async def close(self) -> None:
        """Stop at once. Begins no more transfers; the transfer thread ends those in flight."""
        self.stop()
        await self._preparing.close()
        self.give_up_all(EndReason.LEAVING)
        await none_left(lambda: self.handoffs.jobs, CLOSE_TIMEOUT_S)
        await self._settling.close()
        await self._tasks.close()
        await self._links.close()

    def give_up_all(self, reason: EndReason) -> None:
        """Others may count us as dead and reuse their blocks, so nothing more may be written.

        Submits nothing from now on, including hand-offs that are being claimed. The caller withdraws submitted
        transfers.
        """
        self.handoffs.handle(LeaseLost(reason))

    async def _pull_forever(self) -> None:
        # Cancellation alone is not enough: asyncio.wait_for, in 3.11, swallows one that arrives with the result.
        while asyncio.current_task() is self._pulling:
            await self._slots.acquire()
            delivery = None
            try:
                delivery = await self._queue.pull(self._kv_compatibility, PULL_TIMEOUT_S)
            except KvrelayError as exc:
                _log.warning("cannot pull prefills: %s", exc)
                await asyncio.sleep(PULL_RETRY_S)
            finally:
                if delivery is None:
                    self._slots.release()
            if delivery is not None:
                self._take(delivery)

    def _take(self, delivery: PrefillDelivery) -> None:
        """One queue entry, from here to its acknowledgement."""
        job = _Entry(delivery, self._slots, self._tasks, self._settling)
        self.handoffs.pulled(job, is_expired=delivery.is_expired)

    def _prepare(self, sampling: SamplingParams, then: Callable[[KvrelayError | None], None]) -> None:
        """Compile the grammar on a thread of its own, so that neither the loop nor the engine waits for it."""

        async def prepare() -> None:
            then(await failure_of(asyncio.to_thread(self._around.engine.prepare, sampling), "a grammar"))

        self._preparing.spawn(prepare())


class _Entry(Job):
    """A queue entry, from its pull to its acknowledgement. It holds a permit of the pull loop until it is computed."""

    order = HandoffOrder.DECODE_FIRST

    def __init__(self, delivery: PrefillDelivery, slots: asyncio.Semaphore, tasks: TaskSet, settling: TaskSet) -> None:
        super().__init__(delivery.request)
        self._delivery = delivery
        self._slot: asyncio.Semaphore | None = slots
        self._delay_s = return_delay_s(delivery.num_deliveries)
        self.may_return = self._delay_s is not None
        self._settling = settling
        self._keepalives = tasks.spawn(_extend_ack_deadline(delivery))

    def computed(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()

    def settled(self) -> None:
        self._end(_settle(self._delivery))

    def returned(self) -> None:
        assert self._delay_s is not None, "only an entry that may return does"
        self._end(_give_back(self._delivery, self._delay_s))

    def _end(self, ending: Coroutine[None, None, None]) -> None:
        self.computed()
        self._keepalives.cancel()
        self._settling.spawn(ending)


async def _extend_ack_deadline(delivery: PrefillDelivery) -> None:
    while True:
        await asyncio.sleep(KEEPALIVE_INTERVAL_S)
        try:
            await delivery.in_progress()
        except KvrelayError as exc:
            _log.warning(
                "extending the ack deadline of prefill %s failed (%s); it may be redelivered",
                delivery.request.handoff_id,
                exc,
            )


async def _settle(delivery: PrefillDelivery) -> None:
    """Acknowledge. If that fails the entry is delivered again, and the decode worker refuses its claim as stale."""
    try:
        await delivery.ack()
    except KvrelayError as exc:
        _log.warning("cannot acknowledge %s: %s", delivery.request.handoff_id, exc)


async def _give_back(delivery: PrefillDelivery, delay_s: float) -> None:
    """To another prefill worker. If that fails the entry is delivered again after its ack deadline."""
    handoff_id = delivery.request.handoff_id
    _log.warning("hand-off %s goes back to the queue; it is delivered again in %g s", handoff_id, delay_s)
    try:
        await delivery.nak(delay_s)
    except KvrelayError as exc:
        _log.warning("cannot give %s back: %s", handoff_id, exc)
