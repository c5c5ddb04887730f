"""What every part of a simulated cluster reaches the others through: messages, transfers, discovery, the prefill queue.

worker ──hop──> worker        after one hop, if the receiver still lives
worker ──move──> worker       over the links of both
push ──queue hop──> MemoryQueue ──> the consumer that has waited longest
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.control.memory_queue import MemoryPrefillDelivery, MemoryQueue
from kvrelay.control.redelivery import MAX_DELIVERIES, ack_wait_for_lease, return_delay_s
from kvrelay.core.handoff import RemotePrefillRequest
from kvrelay.handoff.decode_events import DecodeEvent
from kvrelay.handoff.messages import ToDecode
from kvrelay.rpc.heartbeat import Heartbeat
from kvrelay.rpc.wire import Message
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.decode_run import DecodeRun
from kvrelay.simulate.loop import EventLoop
from kvrelay.simulate.machine import Links
from kvrelay.simulate.virtual_tiers import SimulatedHost

MODEL = "simulated"
"""All workers have this model and can exchange KV."""
TERM = 0
"""Of all workers: none ever registers again."""


class Node(Protocol):
    """A worker as its peers reach it."""

    worker_id: str
    is_alive: bool

    def on_decode(self, event: DecodeEvent) -> None: ...

    def from_prefill(self, worker_id: str, message: ToDecode) -> None: ...

    def from_decode(self, worker_id: str, message: Message) -> None: ...

    def notified(self, payload: bytes) -> None: ...


class _AlwaysConnected:
    """The queue server is never away."""

    is_connected = True

    def check_connected(self) -> None:
        """It is."""


class Network:
    """``nodes``: all workers that were started, by id. ``listed``: the roles of those in discovery."""

    def __init__(self, spec: ClusterSpec, costs: Costs, loop: EventLoop, seed: int) -> None:
        self.spec, self.costs, self.loop, self.seed = spec, costs, loop, seed
        self.links = Links(costs)
        self._hosts: dict[int, SimulatedHost] = {}
        self.nodes: dict[str, Node] = {}
        self.may_jump = True
        """Whether workers may jump over steps that only decode."""
        self.runs: dict[int, DecodeRun] = {}
        """What they are jumping over now, by number."""
        self.listed: dict[str, WorkerRole] = {}
        self.num_prefill_workers = 0
        self._pulling: set[str] = set()
        self.detection_s = Heartbeat.for_lease(spec.lease_ttl_s).detection_s
        self.places: Counter[str] = Counter()
        self.queue = MemoryQueue(loop.clock, ack_wait_for_lease(spec.lease_ttl_s), MAX_DELIVERIES)
        self._consumers: deque[tuple[Node, Callable[[MemoryPrefillDelivery], None]]] = deque()
        self._plane = _AlwaysConnected()

    def host_of(self, number: int) -> SimulatedHost:
        """Of the worker with that number. Raises ConfigError."""
        spec = self.spec
        at = number // spec.workers_per_host
        if at not in self._hosts:
            self._hosts[at] = SimulatedHost(spec.tiers, self.costs, spec.engine.block_size, self.loop)
        return self._hosts[at]

    def list(self, worker_id: str, role: WorkerRole | None, *, pulls_prefills: bool = False) -> None:
        """A worker enters discovery in ``role``, or leaves it (None)."""
        if role is None:
            self.listed.pop(worker_id, None)
            self._pulling.discard(worker_id)
        else:
            self.listed[worker_id] = role
            (self._pulling.add if pulls_prefills else self._pulling.discard)(worker_id)
        self.num_prefill_workers = len(self._pulling)

    def catch_up(self) -> None:
        """Have all workers do what comes before now."""
        position = self.loop.position
        for run in self.runs.values():
            if run.next_s <= position.time_s:
                run.catch_up(position)

    # -- messages -----------------------------------------------------------------------------------------------------

    def hop(self, worker_id: str, deliver: Callable[[Node], None]) -> None:
        """A message to a worker, if that still lives when it arrives."""
        node = self.nodes[worker_id]
        self.loop.after(self.costs.hop_s, lambda: deliver(node) if node.is_alive else None)

    def move(self, one: str, other: str, num_tokens: int, ended: Callable[[bool], None]) -> None:
        """Move KV between two workers; ``ended(ok)`` follows. A dead end is noticed by its silence."""
        now_s = self.loop.clock.now()
        end_s = self.links.transfer(one, other, num_tokens, now_s)

        def arrive() -> None:
            if self.nodes[one].is_alive and self.nodes[other].is_alive:
                ended(True)
            else:
                self.loop.after(self.detection_s, lambda: ended(False))

        self.loop.at(end_s, arrive)

    # -- the prefill queue --------------------------------------------------------------------------------------------

    def push(self, request: RemotePrefillRequest) -> None:
        """Queue an entry; a waiting consumer gets it."""
        data = msgspec.msgpack.encode(request)

        def arrive() -> None:
            self.queue.push_raw(request.kv_compatibility, data, request.queue_class)
            self._serve()

        self.loop.after(self.costs.queue_hop_s, arrive)

    def pull(self, consumer: Node, take: Callable[[MemoryPrefillDelivery], None]) -> None:
        """Wait for one entry."""
        self._consumers.append((consumer, take))
        self._serve()

    def stop_pulling(self, consumer: Node) -> None:
        """``consumer`` waits for nothing any more."""
        self._consumers = deque(waiting for waiting in self._consumers if waiting[0] is not consumer)

    def ack(self, delivery: MemoryPrefillDelivery) -> None:
        """Nothing of the entry is left to do."""
        self.queue.pulled.discard(delivery)

    def nak(self, delivery: MemoryPrefillDelivery) -> None:
        """Another consumer should have the entry, after the queue's delay."""
        delay_s = return_delay_s(delivery.num_deliveries) or 0.0
        self.give_back(delivery, delay_s)

    def give_back(self, delivery: MemoryPrefillDelivery, delay_s: float = 0.0) -> None:
        """The entry is delivered again, if it was not acknowledged."""
        self.queue.give_back(delivery, delay_s)
        self.loop.after(delay_s, self._serve)

    def _serve(self) -> None:
        while self._consumers:
            delivery = self.queue.pop(MODEL, self._plane)
            if delivery is None:
                return
            consumer, take = self._consumers.popleft()
            if consumer.is_alive:
                take(delivery)
            else:
                self.give_back(delivery)
