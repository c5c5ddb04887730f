"""Drives the real hand-off ledgers in virtual time: events in, actions out, ticks when one is due.

``worker/decode/handoffs.py`` and ``worker/prefill/handoffs.py`` do the same over sockets and threads. KV is pushed;
checksums are off, because there is no KV.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from kvrelay.control.memory_queue import MemoryPrefillDelivery
from kvrelay.control.redelivery import return_delay_s
from kvrelay.core.handoff import HandoffId, HandoffOrder, KvDirection, RemotePrefillRequest
from kvrelay.core.messages import TokenOutput
from kvrelay.engine.core import EngineCore
from kvrelay.engine.step import StepOutput
from kvrelay.errors import KvrelayError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, Tick
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.handoff.messages import HandoffAbandon, HandoffDone, HandoffReady
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules
from kvrelay.simulate.network import MODEL, Network
from kvrelay.worker.driver import TICK_INTERVAL_S, Ledger
from kvrelay.worker.prefill.pulling import CLAIM_TIMEOUT_S, MAX_COMPUTING
from kvrelay.worker.translation import chunk_computed, engine_request, opened, pulled


class Host(Protocol):
    """The worker whose hand-offs these are."""

    worker_id: str
    is_alive: bool

    def post(self, callback: Callable[[EngineCore], None]) -> None:
        """Run it between two steps."""

    def check_drained(self) -> None:
        """Something has ended."""


class _Driver:
    """A ledger, the functions that carry out its actions, and its next tick."""

    def __init__(
        self, network: Network, host: Host, ledger: Ledger[Any], carriers: dict[type, Callable[[Any], None]]
    ) -> None:
        self._network, self._host = network, host
        self._any_ledger, self._carriers = ledger, carriers
        self._tick_s: float | None = None
        self._not_before_s = 0.0

    def handle(self, event: Any) -> None:
        """Pass an event to the ledger and carry out what follows. Never called from within an action."""
        for action in self._any_ledger.handle(event, self._network.loop.clock.now()):
            self._carriers[type(action)](action)
        self._plan_tick()

    def _plan_tick(self) -> None:
        due_s = self._any_ledger.next_tick_s()
        if due_s is None:
            return
        due_s = max(due_s, self._not_before_s)
        if self._tick_s is None or due_s < self._tick_s:
            self._tick_s = due_s
            self._network.loop.at(due_s, lambda: self._tick(due_s))

    def _tick(self, planned_s: float) -> None:
        if planned_s != self._tick_s or not self._host.is_alive:
            return  # an earlier one was planned later
        self._tick_s = None
        # As precise as the real driver, which looks once an interval.
        self._not_before_s = self._network.loop.clock.now() + TICK_INTERVAL_S
        self.handle(Tick())


class DecodeHandoffs(_Driver):
    """A decode worker's hand-offs. ``on_arrived(request_id, prefill_s)``: KV has come, before its request continues."""

    def __init__(
        self, network: Network, host: Host, secrets: Callable[[], int], on_arrived: Callable[[str, float], None]
    ) -> None:
        disagg, block_size = network.spec.disagg, network.spec.engine.block_size
        rules = DecodeRules(
            block_size=block_size,
            kv_compatibility=MODEL,
            remote_prefill_timeout_s=disagg.remote_prefill_timeout_s,
            max_attempts=disagg.max_handoff_attempts,
        )
        self.ledger = DecodeLedger(rules, secrets)
        self._on_arrived = on_arrived
        self._prefills: dict[HandoffId, RemotePrefillRequest] = {}
        super().__init__(
            network,
            host,
            self.ledger,
            {
                de.Push: self._push,
                de.AllocateLoan: self._allocate,
                de.SendGrant: self._grant,
                de.SendToPrefill: self._send,
                de.EndLoan: lambda a: host.post(lambda core: core.end_loan(a.handoff_id, a.loan)),
                de.Resume: lambda a: host.post(lambda core: self._resume(core, a)),
                de.Avoid: lambda _: None,
                de.ComputeHere: lambda a: host.post(lambda core: core.compute_handoff_here(a.handoff_id)),
            },
        )

    def on_step(self, step: StepOutput) -> None:
        """Report the hand-offs that a step has opened and closed."""
        for prefill in step.remote_prefills:
            self._prefills[prefill.handoff_id] = prefill
            self.handle(opened(prefill, self.ledger, KvDirection.PUSH, term=0))
            self._prefills.pop(prefill.handoff_id, None)
        for handoff_id in step.closed_handoffs:
            self.handle(de.Closed(handoff_id))

    def _push(self, action: de.Push) -> None:
        timeout_s = self._network.spec.disagg.remote_prefill_timeout_s
        prefill = msgspec.structs.replace(
            self._prefills.pop(action.handoff_id),
            decode_address=self._host.worker_id,
            model=MODEL,
            kv_compatibility=MODEL,
            timeout_s=timeout_s,
        )
        if self._network.num_prefill_workers:
            self._network.push(prefill)
        else:
            self._network.loop.after(0.0, lambda: self.handle(de.NoPrefillWorker()))

    def _allocate(self, action: de.AllocateLoan) -> None:
        def allocate(core: EngineCore) -> None:
            self.handle(
                de.LoanAllocated(action.handoff_id, action.loan, core.lend_fresh(action.handoff_id, action.loan))
            )

        self._host.post(allocate)

    def _grant(self, action: de.SendGrant) -> None:
        self._network.to_prefill(action.worker_id, pe.Granted(self._host.worker_id, action.message))

    def _send(self, action: de.SendToPrefill) -> None:
        message = action.message
        worker_id = self._host.worker_id
        event: pe.PrefillEvent = pe.Abandoned(worker_id, message) if isinstance(message, HandoffAbandon) else message
        self._network.to_prefill(str(action.connection), event)

    def _resume(self, core: EngineCore, action: de.Resume) -> None:
        message = action.message
        self._on_arrived(action.request_id, message.prefill_s)
        core.resume_handoff(action.handoff_id, action.loan, message.token_id, message.logprobs)


class _Job(msgspec.Struct):
    """A prefill, with its queue entry (decode-first) or the function that takes its first token (prefill-first)."""

    request: RemotePrefillRequest
    delivery: MemoryPrefillDelivery | None = None
    first: Callable[[TokenOutput], None] | None = None
    num_bytes: int = 0


class PrefillHandoffs(_Driver):
    """A prefill worker's hand-offs, and its end of the queue."""

    def __init__(self, network: Network, host: Host) -> None:
        rules = PrefillRules(
            worker_id=host.worker_id,
            block_size=network.spec.engine.block_size,
            kv_compatibility=MODEL,
            claim_timeout_s=CLAIM_TIMEOUT_S,
        )
        self.ledger = PrefillLedger(rules)
        self.jobs: dict[HandoffId, _Job] = {}
        self._by_name: dict[str, HandoffId] = {}
        self._is_pulling = self._is_waiting = False
        self._num_free = MAX_COMPUTING
        super().__init__(
            network,
            host,
            self.ledger,
            {
                pe.Compute: lambda a: host.post(lambda core: self._add_request(core, a.handoff_id)),
                pe.SendClaim: lambda a: network.to_decode(a.worker_id, de.Claimed(a.message, host.worker_id)),
                pe.ReadHits: self._read,
                pe.ReportLoaded: lambda a: host.post(lambda core: core.kv_loaded(str(a.handoff_id), a.ok)),
                pe.Write: self._write,
                pe.StopComputing: lambda a: host.post(lambda core: core.abort(str(a.handoff_id))),
                pe.FreeBlocks: lambda a: host.post(lambda core: core.sending_finished(str(a.handoff_id))),
                pe.Computed: self._computed,
                pe.Settle: self._settle,
                pe.Return: self._return,
                pe.SendToDecode: self._tell,
                pe.SendRelease: self._release,
            },
        )

    # -- the queue ----------------------------------------------------------------------------------------------------

    @property
    def is_pulling(self) -> bool:
        """Whether it takes entries of the queue."""
        return self._is_pulling

    def start(self) -> None:
        """Pull entries: one computes while the next one waits."""
        self._is_pulling = True
        self._pull()

    def stop(self) -> None:
        """Pull nothing more."""
        self._is_pulling = self._is_waiting = False
        self._network.stop_pulling(self._host)  # type: ignore[arg-type]

    def _pull(self) -> None:
        """Wait for one entry, if another prefill may be taken; never for two at a time."""
        if self._is_pulling and self._num_free and not self._is_waiting and self._host.is_alive:
            self._is_waiting = True
            self._network.pull(self._host, self._take)  # type: ignore[arg-type]

    def lose_entries(self) -> None:
        """The worker is dead: the queue delivers its entries again after the ack deadline."""
        network = self._network
        for delivery in [job.delivery for job in self.jobs.values() if job.delivery is not None]:
            network.loop.after(network.queue.ack_wait_s, partial(network.give_back, delivery))

    def _take(self, delivery: MemoryPrefillDelivery) -> None:
        self._num_free -= 1
        self._is_waiting = False
        self._network.loop.after(0.0, self._pull)
        request = delivery.request
        job = _Job(request, delivery)
        if request.decode_worker_id == self._host.worker_id:
            # It does both: its own engine computes it without a hand-off.
            self._network.ack(delivery)
            self._free_place()
            own = self._network.nodes[self._host.worker_id]
            self._network.loop.after(0.0, lambda: own.on_decode(de.PushFailed(request.handoff_id)))
        elif request.handoff_id in self.ledger.seen:
            self._network.ack(delivery)
            self._free_place()
        elif delivery.is_expired:
            self.jobs[request.handoff_id] = job
            self.handle(pe.Declined(request.handoff_id, request.decode_worker_id, EndReason.EXPIRED))
        else:
            self._begin(job, HandoffOrder.DECODE_FIRST, may_return=return_delay_s(delivery.num_deliveries) is not None)

    def take_half(self, request: RemotePrefillRequest, first: Callable[[TokenOutput], None]) -> None:
        """The prefill half of a pair; ``first`` gets the first token."""
        self._begin(_Job(request, first=first), HandoffOrder.PREFILL_FIRST, may_return=False)

    def _begin(self, job: _Job, order: HandoffOrder, *, may_return: bool) -> None:
        handoff_id = job.request.handoff_id
        self.jobs[handoff_id] = job
        self._by_name[str(handoff_id)] = handoff_id
        self.handle(pulled(job.request, self.ledger.rules.block_size, 0, order, may_return=may_return))

    def _computed(self, action: pe.Computed) -> None:
        if self.jobs[action.handoff_id].delivery is not None:
            self._network.loop.after(0.0, self._free_place)

    def _free_place(self) -> None:
        self._num_free += 1
        self._pull()

    def _settle(self, action: pe.Settle) -> None:
        job = self._pop(action.handoff_id)
        if job.delivery is not None:
            self._network.ack(job.delivery)
        self._network.loop.after(0.0, self._host.check_drained)

    def _return(self, action: pe.Return) -> None:
        job = self._pop(action.handoff_id)
        if job.delivery is not None:
            self._network.nak(job.delivery)

    def _pop(self, handoff_id: HandoffId) -> _Job:
        self._by_name.pop(str(handoff_id), None)
        return self.jobs.pop(handoff_id)

    # -- the engine ---------------------------------------------------------------------------------------------------

    def on_step(self, step: StepOutput) -> None:
        """Report a step's computed blocks and requested reads."""
        for load in step.kv_loads:
            blocks = pe.RequestBlocks(load.first_block, load.block_ids)
            self.handle(pe.LoadRequested(self._by_name[load.request_id], blocks))
        for chunk in step.handoff_chunks:
            handoff_id = self._by_name.get(chunk.request_id)
            if handoff_id is None:
                continue
            job = self.jobs[handoff_id]
            if chunk.first_output is not None and job.first is not None:
                job.first(chunk.first_output)
            self.handle(chunk_computed(handoff_id, chunk))

    def _add_request(self, core: EngineCore, handoff_id: HandoffId) -> None:
        job = self.jobs.get(handoff_id)
        if job is None:
            return
        try:
            core.add_request(engine_request(job.request, self.ledger.rules.block_size))
        except KvrelayError:
            self.handle(pe.EngineRefused(handoff_id))

    # -- the decode worker --------------------------------------------------------------------------------------------

    def _read(self, action: pe.ReadHits) -> None:
        request = self.jobs[action.handoff_id].request
        num_tokens = len(action.blocks.block_ids) * self.ledger.rules.block_size
        self._network.move(
            self._host.worker_id,
            request.decode_worker_id,
            num_tokens,
            lambda _, ok: self._if_alive(pe.HitsRead(action.handoff_id, ok)),
        )

    def _write(self, action: pe.Write) -> None:
        job = self.jobs[action.handoff_id]
        decode_worker_id = job.request.decode_worker_id
        num_tokens = len(action.remote_block_ids) * self.ledger.rules.block_size
        job.num_bytes += num_tokens * self._network.costs.token_bytes
        done = action.done and msgspec.structs.replace(action.done, num_transferred_bytes=job.num_bytes)

        def ended(_: int, ok: bool) -> None:
            node = self._network.nodes[decode_worker_id]
            if ok and done is not None and node.is_alive:
                node.on_decode(de.Done(done))
            self._if_alive(pe.Written(action.handoff_id, ok))

        self._network.move(self._host.worker_id, decode_worker_id, num_tokens, ended)

    def _if_alive(self, event: pe.PrefillEvent) -> None:
        if self._host.is_alive:
            self.handle(event)

    def _tell(self, action: pe.SendToDecode) -> None:
        message = action.message
        assert not isinstance(message, HandoffReady), "KV is pushed"
        worker_id = self._host.worker_id
        event: de.DecodeEvent = de.Done(message, worker_id) if isinstance(message, HandoffDone) else message
        self._network.to_decode(action.worker_id, event)

    def _release(self, action: pe.SendRelease) -> None:
        """It is acknowledged by the request plane: a message there, and one back."""
        network, node = self._network, self._network.nodes[action.worker_id]
        acknowledged = pe.ReleaseAcknowledged(action.message.handoff_id)
        network.to_decode(action.worker_id, action.message)
        if node.is_alive:
            network.loop.after(2 * network.costs.hop_s, lambda: self._if_alive(acknowledged))
