"""A simulated worker's hand-offs: a real worker's own sides (``worker/sides``) in virtual time.

Here is what carries out what they ask for, over the simulated network, the worker's inbox, and the prefill queue.

KV is pushed; checksums are off, because there is no KV.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from kvrelay.control.memory_queue import MemoryPrefillDelivery
from kvrelay.control.redelivery import return_delay_s
from kvrelay.core.handoff import HandoffId, HandoffOrder, KvDirection, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.core.messages import TokenOutput
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.engine.core import EngineCore
from kvrelay.errors import KvrelayError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.base import Tick
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.handoff.messages import HandoffReleased
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules
from kvrelay.simulate.network import MODEL, TERM, Network
from kvrelay.transfer.values import TransferOp
from kvrelay.worker.marking import WorkerMarks
from kvrelay.worker.prefill.pulling import CLAIM_TIMEOUT_S, MAX_COMPUTING
from kvrelay.worker.reporting.stats import DecodeStats
from kvrelay.worker.sides.decode import DecodePorts, IncomingHandoffs
from kvrelay.worker.sides.ports import Link
from kvrelay.worker.sides.prefill import Job, OutgoingHandoffs, PrefillPorts
from kvrelay.worker.sides.side import Side
from kvrelay.worker.turns import TICK_INTERVAL_S

MARKS = WorkerMarks("", is_on=False)


class Host(Protocol):
    """The worker whose hand-offs these are."""

    worker_id: str
    is_alive: bool

    def post(self, callback: Callable[[EngineCore], None]) -> None:
        """Run it between two steps."""

    def check_drained(self) -> None:
        """Something has ended."""


class _Pieces(NamedTuple):
    num_tokens: int
    num_bytes: int
    num_pieces: int = 1


class _Plane:
    """Turns, transfers and memory of ``side``. No one is refused."""

    lock = nullcontext()

    def __init__(self, network: Network, host: Host, side: Side[Any]) -> None:
        self.network, self.host, self._side = network, host, side
        self._tick_s: float | None = None
        self._not_before_s = 0.0

    def now(self) -> float:
        return self.network.loop.clock.now()

    def on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        self.network.loop.after(0.0, partial(self.on_loop, function, *arguments))

    def plan_tick(self, due_s: Callable[[], float | None]) -> None:
        next_s = due_s()
        if next_s is None:
            return
        next_s = max(next_s, self._not_before_s)
        if self._tick_s is None or next_s < self._tick_s:
            self._tick_s = next_s
            self.network.loop.at(next_s, lambda: self._tick(next_s))

    def _tick(self, planned_s: float) -> None:
        if planned_s != self._tick_s or not self.host.is_alive:
            return  # an earlier one was planned later
        self._tick_s = None
        # As precise as the real worker, which looks once an interval.
        self._not_before_s = self.now() + TICK_INTERVAL_S
        self._side.handle(Tick())

    def pieces(self, op: TransferOp, worker_id: str, here: BlockRun, there: BlockRun, block_size: int) -> _Pieces:
        num_tokens = len((there if op is TransferOp.WRITE else here).block_ids) * block_size
        return _Pieces(num_tokens, num_tokens * self.network.costs.token_bytes)

    def open_window(self, window: MemoryWindow) -> None:
        """Nothing looks at it."""

    def close_window(self, handoff: str, loan: int) -> None:
        """Nothing was opened."""

    def submit(
        self,
        op: TransferOp,
        worker_id: str,
        pieces: _Pieces,
        notify: bytes | None = None,
        *,
        on_done: Callable[[str | None], None],
        group: str | None = None,
        timeout_s: float | None = None,
        key: RemoteKey | None = None,
    ) -> None:
        def ended(ok: bool) -> None:
            node = self.network.nodes[worker_id]
            if ok and notify is not None and node.is_alive:
                node.notified(notify)
            if self.host.is_alive:
                on_done(None if ok else "a worker is dead")

        self.network.move(self.host.worker_id, worker_id, pieces.num_tokens, ended)


class DecodeHandoffs(IncomingHandoffs):
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
        self._network, self._host = network, host
        plane: Any = _Plane(network, host, self)
        engine: Any = host
        ports = DecodePorts(
            plane,
            engine,
            plane,
            plane,
            plane,
            self,
            self._push,
            on_arrived,
            lambda *_: None,
            lambda _: None,
            lambda: TERM,
        )
        super().__init__(
            DecodeLedger(rules, secrets),
            ports,
            worker_id=host.worker_id,
            direction=KvDirection.PUSH,
            block_bytes=0,
            stats=DecodeStats(),
            marks=MARKS,
        )

    def send(self, connection: Any, message: Any, /) -> bool:
        """To a prefill worker: its id is the connection."""
        worker_id = self._host.worker_id
        self._network.hop(connection, lambda node: node.from_decode(worker_id, message))
        return True

    def _push(self, prefill: RemotePrefillRequest) -> None:
        if self._network.num_prefill_workers:
            self._network.push(
                msgspec.structs.replace(
                    prefill,
                    decode_address=self._host.worker_id,
                    model=MODEL,
                    kv_compatibility=MODEL,
                    timeout_s=self._network.spec.disagg.remote_prefill_timeout_s,
                )
            )
        else:
            self._network.loop.after(0.0, lambda: self.handle(de.NoPrefillWorker()))


class _Link(NamedTuple):
    """A connection to a decode worker."""

    send: Callable[[Any], None]


class PrefillHandoffs(OutgoingHandoffs):
    """A prefill worker's hand-offs, its connections to decode workers, and its end of the queue."""

    def __init__(self, network: Network, host: Host) -> None:
        rules = PrefillRules(
            worker_id=host.worker_id,
            block_size=network.spec.engine.block_size,
            kv_compatibility=MODEL,
            claim_timeout_s=CLAIM_TIMEOUT_S,
        )
        self.network, self.host = network, host
        self._is_pulling = self._is_waiting = False
        self._num_free = MAX_COMPUTING
        plane: Any = _Plane(network, host, self)
        engine: Any = host
        ports = PrefillPorts(
            plane,
            engine,
            plane,
            plane,
            plane,
            self,
            lambda _: None,
            lambda _, then: then(None),
            self._computes_here,
            lambda: TERM,
        )
        super().__init__(PrefillLedger(rules), ports, model=MODEL, marks=MARKS)

    # -- decode workers -----------------------------------------------------------------------------------------------

    def remember(self, worker_id: str, address: str) -> None:
        """All are known."""

    def reach(self, worker_id: str, then: Callable[[Link | None, KvrelayError | None], None]) -> None:
        then(_Link(partial(self.tell, worker_id)), None)

    def tell(self, worker_id: str, message: Any) -> None:
        connection = self.host.worker_id
        self.network.hop(worker_id, lambda node: node.from_prefill(connection, message))

    def release(self, worker_id: str, message: HandoffReleased, heard: Callable[[], None]) -> None:
        """It is acknowledged by the request plane: a message there, and one back."""
        network = self.network
        self.tell(worker_id, message)
        if network.nodes[worker_id].is_alive:
            network.loop.after(2 * network.costs.hop_s, lambda: heard() if self.host.is_alive else None)

    def _computes_here(self, handoff_id: HandoffId) -> None:
        own, failed = self.network.nodes[self.host.worker_id], de.PushFailed(handoff_id)
        self.network.loop.after(0.0, lambda: own.on_decode(failed))

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
        self.network.stop_pulling(self.host)  # type: ignore[arg-type]

    def _pull(self) -> None:
        """Wait for one entry, if another prefill may be taken; never for two at a time."""
        if self._is_pulling and self._num_free and not self._is_waiting and self.host.is_alive:
            self._is_waiting = True
            self.network.pull(self.host, self._take)  # type: ignore[arg-type]

    def lose_entries(self) -> None:
        """The worker is dead: the queue delivers its entries again after the ack deadline."""
        network = self.network
        for job in self.jobs.values():
            if isinstance(job, _Entry):
                network.loop.after(network.queue.ack_wait_s, partial(network.give_back, job.delivery))

    def _take(self, delivery: MemoryPrefillDelivery) -> None:
        self._num_free -= 1
        self._is_waiting = False
        self.network.loop.after(0.0, self._pull)
        self.pulled(_Entry(self, delivery), is_expired=delivery.is_expired)

    def take_half(self, request: RemotePrefillRequest, first: Callable[[TokenOutput | None], None]) -> None:
        """The prefill half of a pair; ``first`` gets the first token, or None if there will be none."""
        self.take(_Half(self, request, first))

    def free_place(self) -> None:
        """Another prefill may be taken."""
        self._num_free += 1
        self._pull()


class _Job(Job):
    """What both kinds of prefills have."""

    def __init__(self, handoffs: PrefillHandoffs, request: RemotePrefillRequest) -> None:
        super().__init__(request)
        self._handoffs = handoffs

    def settled(self) -> None:
        self._handoffs.network.loop.after(0.0, self._handoffs.host.check_drained)


class _Half(_Job):
    """The prefill half of a pair."""

    order = HandoffOrder.PREFILL_FIRST

    def __init__(
        self, handoffs: PrefillHandoffs, request: RemotePrefillRequest, first: Callable[[TokenOutput | None], None]
    ) -> None:
        super().__init__(handoffs, request)
        self._first = first
        self._has_told = False

    def first(self, output: TokenOutput | None) -> None:
        if output is not None:
            self._has_told = True
            self._first(output)

    def settled(self) -> None:
        super().settled()
        if not self._has_told:
            self._first(None)


class _Entry(_Job):
    """An entry of the queue."""

    order = HandoffOrder.DECODE_FIRST

    def __init__(self, handoffs: PrefillHandoffs, delivery: MemoryPrefillDelivery) -> None:
        super().__init__(handoffs, delivery.request)
        self.delivery = delivery
        self.may_return = return_delay_s(delivery.num_deliveries) is not None
        self._has_place = True

    def computed(self) -> None:
        if self._has_place:
            self._has_place = False
            self._handoffs.network.loop.after(0.0, self._handoffs.free_place)

    def settled(self) -> None:
        self.computed()
        self._handoffs.network.ack(self.delivery)
        super().settled()

    def returned(self) -> None:
        self.computed()
        self._handoffs.network.nak(self.delivery)
