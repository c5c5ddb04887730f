"""One decode worker, some prefill workers, and a network that delays, reorders, duplicates and loses.

Nothing here decides anything: the workers' own sides do, over their ledgers (``kvrelay/worker/sides``). A world is a
state; ``plain_moves`` and ``fault_moves`` are all that may happen to it next, ``apply`` makes one happen. Everything
asynchronous is a move of its own: each message, each transfer's landing and its completion, what an engine takes in,
each checksum, each tick. Faults come out of a budget. Violations are raised as they happen, and by ``check``;
``is_idle`` tells whether everything has ended.

Time is counted in whole units. A state that comes again later, or after a fault has been survived, has the same ``key``
(``keys``). Messages in flight are a set: saying again what is still under way changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.handoff.hazards import Hazards
from tests.handoff.keys import CONN_STEP, Frame, net_key, without_words
from tests.handoff.memory import Memory
from tests.handoff.nodes import (
    PROMPT,
    PROMPT_TOKEN,
    TTL,
    D,
    DecodeNode,
    Lease,
    Move,
    Node,
    PrefillNode,
    Scenario,
    Violation,
    name,
)
from tests.handoff.plane import DecodePlane, PrefillPlane, Reader, Stage

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.handoff import FIRST_PREFIX, HandoffId, HandoffOrder, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import HandoffChunk, KvLoad, StepOutput
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import LeaseEnded, LeaseLost, Registered, Tick
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.messages import HandoffReleased, Prefix
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.rpc.wire import encode_message
from kvrelay.worker.marking import WorkerMarks
from kvrelay.worker.reporting.stats import DecodeStats
from kvrelay.worker.sides.decode import IncomingHandoffs
from kvrelay.worker.sides.prefill import OutgoingHandoffs

SECRET = 5
MARKS = WorkerMarks("", is_on=False)
MODEL = "m"


class Heard(msgspec.Struct, frozen=True):
    """A decode worker's answer to a release."""

    handoff_id: HandoffId


@dataclass
class World(Hazards, Memory):
    scenario: Scenario
    stage: Stage
    d: DecodeNode
    ps: list[PrefillNode]
    now: int = 0
    net: frozenset[Any] = frozenset()
    """(from, to, connection, message)."""
    queue: dict[HandoffId, int | None] = field(default_factory=dict)
    """Entries that are not settled, and who has pulled each."""
    requests: dict[HandoffId, RemotePrefillRequest] = field(default_factory=dict)
    by_name: dict[str, HandoffId] = field(default_factory=dict)
    returned: frozenset[HandoffId] = frozenset()
    """Entries that were given back once: not again."""
    num_faults: int = 0
    ids: dict[Any, int] = field(default_factory=dict)
    """Numbers for the parts of keys, shared by all worlds of an exploration: a state is then a few small numbers."""

    # -- beginning ----------------------------------------------------------------------------------------------------

    @classmethod
    def begin(cls, scenario: Scenario) -> World:
        decode, prefill, stage = DecodeNode(), [PrefillNode() for _ in range(scenario.num_prefill)], Stage()
        decode.plane = DecodePlane(stage, D)
        world = stage.world = cls(scenario, stage, decode, prefill)
        ledger = DecodeLedger(scenario.decode_rules(), lambda: SECRET)
        decode.side = IncomingHandoffs(
            ledger,
            decode.plane.ports(),
            worker_id="d",
            direction=scenario.direction,
            block_bytes=1,
            stats=DecodeStats(),
            marks=MARKS,
        )
        for number, node in enumerate(prefill):
            node.plane, rules = PrefillPlane(stage, number), scenario.prefill_rules(number)
            node.side = OutgoingHandoffs(PrefillLedger(rules), node.plane.ports(), model=MODEL, marks=MARKS)
            decode.side.handle(Registered(name(number), TTL, 1))
            if scenario.knows_decode:
                node.side.handle(Registered("d", TTL, 1))
        for number in range(scenario.num_requests):
            world.ask(HandoffId("d", FIRST_PREFIX + number if scenario.is_prefix else number))
        return world

    def ask(self, handoff_id: HandoffId) -> None:
        """A request that is to come, or a reader of a prefix."""
        scenario = self.scenario
        self.by_name[str(handoff_id)] = handoff_id
        if scenario.is_prefix:
            reader = (handoff_id.number - FIRST_PREFIX) % scenario.num_prefill
            self.ps[reader].engine[handoff_id] = ("want",)
            return
        num_tokens = scenario.num_hit_blocks + scenario.num_chunks
        sampling = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a") if scenario.with_grammar else None)
        self.requests[handoff_id] = RemotePrefillRequest(
            handoff_id,
            "d",
            f"r-{handoff_id}",
            tuple(range(num_tokens)),
            0,
            sampling,
            (),
            scenario.num_known_hits,
            model=MODEL,
        )
        self.d.status[handoff_id] = "new"
        if scenario.order is HandoffOrder.PREFILL_FIRST:
            self.queue[handoff_id] = None

    def after(self, move: Move) -> World:
        """A copy in which ``move`` has happened. What the move does not touch is shared with this world."""
        touched = self._touched(move)
        d = self.d.clone() if D in touched else self.d
        ps = [p.clone() if number in touched else p for number, p in enumerate(self.ps)]
        queue = dict(self.queue)
        world = World(
            self.scenario,
            self.stage,
            d,
            ps,
            self.now,
            self.net,
            queue,
            self.requests,
            self.by_name,
            self.returned,
            self.num_faults,
            self.ids,
        )
        world.apply(move)
        return world

    def _touched(self, move: Move) -> set[int]:
        match move[0]:
            case "deliver" | "duplicate":
                return {move[1][1]}
            case (
                "tick"
                | "watch"
                | "work"
                | "turn"
                | "complete"
                | "copy"
                | "wake"
                | "pull"
                | "compute"
                | "damage"
                | "fail"
                | "stop"
                | "stray"
                | "no room"
            ):
                return {move[1]}
            case "land":
                return {move[1], D}
            case "refuse" | "refuse half" | "expect" | "arrive" | "cancel" | "gone" | "no blocks":
                return {D}
            case "lose" | "redeliver":
                return set()
        return {D, *range(len(self.ps))}

    def key(self) -> tuple[int, ...]:
        """Equal for states from which the same can happen, if no fault is left."""
        frame = Frame(
            self.now,
            self.d.lease.term,
            tuple([p.lease.term for p in self.ps]),
            tuple([p.num_conns for p in self.ps]),
            TTL + 1,
        )
        rest = (net_key(self.net, frame), tuple(self.queue.items()), self.returned)
        numbers = [node.key_id(frame, self.ids) for node in self.nodes()]
        return (*numbers, self.ids.setdefault(rest, len(self.ids)))

    # -- what may happen next -----------------------------------------------------------------------------------------

    def plain_moves(self) -> list[Move]:
        """Everything that may happen without a fault. Time passes only when nothing prompt is left to happen."""
        moves = list(self._node_and_network_moves())
        if not any(move[0] in PROMPT for move in moves):
            moves.append(("advance",))
        return moves

    def fault_moves(self) -> list[Move]:
        """Every fault that may happen, while the budget lasts."""
        if self.num_faults >= self.scenario.max_faults:
            return []
        moves = list(self._fault_moves())
        is_late = "late" in self.scenario.faults and not any(self._is_due(node) for node in self.nodes())
        if is_late and any(move[0] in PROMPT for move in self._node_and_network_moves()):
            moves.append(("late",))
        return moves

    def _node_and_network_moves(self) -> Iterator[Move]:
        for item in self.net:
            if not self.node(item[1]).is_stopped:
                yield ("deliver", item)
        for number in (D, *range(len(self.ps))):
            yield from self._node_moves(number, self.node(number))
        if not self.d.is_dead and not self.d.is_stopped:
            for handoff_id, status in self.d.status.items():
                if status == "new" and not self.d.is_open:
                    yield ("refuse", handoff_id)
                elif status == "new" and self.scenario.is_paired:
                    yield ("expect", handoff_id)
                elif status in ("new", "expected"):
                    yield ("arrive", handoff_id)
        if self.scenario.is_prefix and not self.d.is_dead and not self.d.has_evicted:
            yield ("evict",)
        for number, p in enumerate(self.ps):
            if not p.is_dead and not p.is_stopped:
                yield from self._prefill_moves(number, p)

    def _prefill_moves(self, number: int, p: PrefillNode) -> Iterator[Move]:
        for handoff_id, steps in p.engine.items():
            if steps and steps[0] != "loading":
                yield ("compute", number, handoff_id)
        if not p.is_open:
            if self.scenario.is_paired:
                yield from self._halves_to_refuse()
            return
        if p.lease.is_lost or p.ledger.num_active >= self.scenario.max_computing:
            return
        for handoff_id, holder in self.queue.items():
            if (holder is None or self.ps[holder].is_dead) and (number == 0 or not self.scenario.is_paired):
                yield ("pull", number, handoff_id)
                break

    def _halves_to_refuse(self) -> Iterator[Move]:
        """Paired: the claimant takes no more halves, and the decode worker has the other one."""
        for handoff_id, holder in self.queue.items():
            if holder is None and self.d.status[handoff_id] != "new":
                yield ("refuse half", handoff_id)

    def _node_moves(self, number: int, node: Node) -> Iterator[Move]:
        if self.scenario.copies and number != D:
            if node.ops and not node.is_stopped and not node.is_dead:
                yield ("land" if node.is_copying else "copy", number)
        elif node.ops:
            yield ("land", number)
        if node.is_stopped:
            yield ("wake", number)
        if node.is_dead or node.is_stopped:
            return
        for kind, is_possible in (
            ("complete", node.ended_ops),
            ("work", node.todo),
            ("turn", node.inbox),
            ("watch", node.watch and not self._is_held_back(number)),
            ("tick", self._is_due(node)),
        ):
            if is_possible:
                yield (kind, number)
        if node.lease.has_ended and not node.lease.is_lost:
            yield ("lease lost", number)
        elif node.lease.has_ended and not node.is_copying:
            yield ("register", number)

    def _is_held_back(self, number: int) -> bool:
        """Whether D cannot take the lock of a worker whose lease has ended."""
        if number != D or not self.scenario.copies or not self.scenario.has_bar:
            return False
        who, what = self.d.watch[0]
        return what == "ended" and self.ps[who].is_copying

    def _is_due(self, node: Any) -> bool:
        if node.is_dead or node.is_stopped:
            return False
        due = node.ledger.next_tick_s()
        return due is not None and due <= self.now

    # -- making it happen ---------------------------------------------------------------------------------------------

    def apply(self, move: Move) -> None:
        """Make it happen, in place."""
        self.stage.world = self
        if move[0] in self.FAULTS:
            self.num_faults += 1
        getattr(self, "do_" + move[0].replace(" ", "_"))(*move[1:])

    def node(self, number: int) -> Any:
        return self.d if number == D else self.ps[number]

    def nodes(self) -> list[Any]:
        return [self.d, *self.ps]

    def do_advance(self) -> None:
        self.now += 1
        for number, node in [(D, self.d), *enumerate(self.ps)]:
            lease = node.lease
            if lease.alive_until is not None and lease.alive_until <= self.now and not lease.has_ended:
                self._end_lease(number)

    def _end_lease(self, number: int) -> None:
        node = self.node(number)
        node.lease.has_ended = True
        for other in self.nodes() if number != D else self.ps:
            if other is not node and (self.scenario.knows_decode if number == D else other is self.d):
                other.watch = (*other.watch, (number, "ended"))

    def do_tick(self, number: int) -> None:
        self.handle(number, Tick())

    def do_watch(self, number: int) -> None:
        node = self.node(number)
        (who, what), node.watch = node.watch[0], node.watch[1:]
        if number == D:
            if what == "ended":
                self.d.barred |= {who}
            elif what != "none pulls":
                self.d.barred -= {who}
            event: Any = LeaseEnded(name(who)) if what == "ended" else Registered(name(who), TTL, what)
            if what == "none pulls":
                event = de.NoPrefillWorker()
        else:
            event = LeaseEnded("d") if what == "ended" else Registered("d", TTL, what)
        self.handle(number, event)

    def do_lease_lost(self, number: int) -> None:
        """The holder hears of it: what it has submitted is withdrawn."""
        node = self.node(number)
        node.lease.is_lost = True
        node.lease.term += 1
        self.handle(number, LeaseLost())
        kept = node.ops[:1] if node.is_copying else ()  # a copy that has begun cannot be withdrawn
        node.ended_ops += tuple((op, False) for op in node.ops if op not in kept)
        node.ops = kept

    def do_register(self, number: int) -> None:
        node = self.node(number)
        node.lease = Lease(term=node.lease.term)
        for other in [self.d] if number != D else self.ps if self.scenario.knows_decode else []:
            # The lease puts back what it had, then the worker says that this is another term.
            other.watch = (*other.watch, (number, node.lease.term - 1), (number, node.lease.term))

    def do_expect(self, handoff_id: HandoffId) -> None:
        """A request comes to the decode worker and waits for blocks."""
        self.d.status[handoff_id] = "expected"
        self.handle(D, de.Expected(handoff_id, name(0), 1 if self.scenario.recalls else 0))

    def do_refuse(self, handoff_id: HandoffId) -> None:
        """The frontend takes the request elsewhere."""
        self.d.status[handoff_id] = "refused"

    def do_refuse_half(self, handoff_id: HandoffId) -> None:
        """The frontend tells the decode worker, if it still waits."""
        del self.queue[handoff_id]
        if self.d.status[handoff_id] in ("expected", "waiting"):
            self.do_gone(handoff_id)

    def do_arrive(self, handoff_id: HandoffId) -> None:
        """A request comes to the decode worker, whose engine lends its blocks."""
        scenario, d = self.scenario, self.d
        d.status[handoff_id] = "waiting"
        blocks: tuple[int, ...] = ()
        if scenario.with_blocks:
            hits = d.fresh(scenario.num_hit_blocks)
            for block in hits:
                d.content[block] = ("hit", handoff_id)
            d.blocks[handoff_id] = hits
            blocks = hits + d.fresh(scenario.num_chunks)
            d.blocks[handoff_id] = blocks
            d.loans[handoff_id, 1] = blocks
        if scenario.order is HandoffOrder.PREFILL_FIRST and not scenario.is_paired:
            counts = scenario.num_hit_blocks, scenario.num_hit_blocks + scenario.num_chunks
            how = scenario.order, scenario.direction
            opened = de.Opened(handoff_id, f"r-{handoff_id}", blocks, *counts, *how, term=d.lease.term)
            self.handle(D, opened)
            return
        request, num_cached = self.requests[handoff_id], scenario.num_hit_blocks
        request = msgspec.structs.replace(request, block_ids=blocks, num_cached_tokens=num_cached)
        d.side.on_step(StepOutput(remote_prefills=[request]))

    def do_pull(self, number: int, handoff_id: HandoffId) -> None:
        self.queue[handoff_id] = number
        may_return = not self.scenario.is_paired and handoff_id not in self.returned
        side, job = self.ps[number].side, self.ps[number].plane.job(handoff_id, may_return)
        if self.scenario.is_paired:
            side.take(job)
        else:
            side.pulled(job, is_expired=False)

    def do_compute(self, number: int, handoff_id: HandoffId) -> None:
        """A step of a prefill worker's engine."""
        p, scenario, engine_id = self.ps[number], self.scenario, str(handoff_id)
        step, rest = p.engine[handoff_id][0], p.engine[handoff_id][1:]
        hits = tuple(range(100, 100 + scenario.num_hit_blocks))
        if step == "want":
            p.engine[handoff_id] = ("loading",)
            p.held |= {handoff_id}
            prefix = Prefix(tuple(range(scenario.num_hit_blocks)))
            wanted = pe.PrefixWanted(handoff_id, "d", BlockRun(0, hits), prefix, p.lease.term, 1)
            p.side.read_prefix(Reader(p.plane, handoff_id), wanted)
            return
        if step == "load":
            p.engine[handoff_id] = ("loading", *rest)
            p.side.on_step(StepOutput(kv_loads=[KvLoad(engine_id, 0, hits)]))
            return
        p.engine[handoff_id] = rest
        index = scenario.num_known_hits + int(step)
        if scenario.by_engine:
            chunk = HandoffChunk(engine_id, 0, (), True, kv_transfer_params=str(number).encode())
        else:
            output = None if rest else TokenOutput(engine_id, (PROMPT_TOKEN,))
            chunk = HandoffChunk(engine_id, index, (100 + index,), not rest, output)
        p.side.on_step(StepOutput(handoff_chunks=[chunk]))

    def do_evict(self) -> None:
        """The decode worker's cache forgets the prefix, and reuses its blocks unless they are lent."""
        self.d.has_evicted = True

    def do_deliver(self, item: Any) -> None:
        self.net -= {item}
        self.receive(*item)

    def receive(self, source: int, target: int, conn: int, message: Any) -> None:
        """A message has arrived."""
        node = self.node(target)
        if node.is_dead:
            return
        if message == "lost":
            if target != D and node.conn == conn:
                node.conn = 0
            self.handle(target, de.ClaimantConnectionLost(conn) if target == D else pe.DecodeConnectionLost("d"))
        elif isinstance(message, Heard):
            self.handle(target, pe.ReleaseAcknowledged(message.handoff_id))
        elif target != D:
            node.side.on_message("d", message)
        elif conn == 0:
            node.side.notified(encode_message(message))
        else:
            node.side.on_message(conn, message)
            if isinstance(message, HandoffReleased):
                self.send(D, source, conn, Heard(message.handoff_id))

    def handle(self, number: int, event: Any) -> None:
        """News for a side."""
        self.node(number).side.handle(event)

    def connect(self, number: int) -> bool:
        """Whether there is a connection to the decode worker, perhaps a new one."""
        if self.d.is_dead:
            return False
        p = self.ps[number]
        if not p.conn:
            p.num_conns += 1
            p.conn = CONN_STEP * p.num_conns + number
        return True

    def send(self, source: int, target: int, conn: int, message: Any) -> None:
        """Into the network, if the connection stands (0: the notification of a write)."""
        p = self.ps[source if target == D else target]
        if (conn == 0 or p.conn == conn) and not self.node(target).is_dead:
            self.net |= {(source, target, conn, without_words(message))}

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds in every state."""
        owners: dict[int, str] = {}
        for (handoff_id, loan), blocks in self.d.loans.items():
            for block in blocks[self.scenario.num_hit_blocks :]:
                if owners.setdefault(block, f"{handoff_id} {loan}") != f"{handoff_id} {loan}":
                    raise Violation(f"block {block} is lent twice")
        for handoff_id, blocks in self.d.blocks.items():
            if self.d.status[handoff_id] == "running" and not self.d.writer.keys().isdisjoint(blocks):
                raise Violation(f"a peer may write to blocks of {handoff_id}, which runs: {self.d.writer}")
            for other, theirs in self.d.blocks.items():
                if other != handoff_id and set(blocks) & set(theirs):
                    raise Violation(f"{handoff_id} and {other} share blocks")
        if self.d.is_dead:
            return
        ending = {(call[1][0].handoff_id, call[1][0].loan) for call in self.d.inbox if call[0] == "_end_loan"}
        lent = {(handoff.handoff_id, loan) for handoff in self.d.ledger.handoffs.values() for loan in handoff.loans}
        if lent != set(self.d.loans) - ending:
            raise Violation(f"the ledger counts loans {lent}, the engine {set(self.d.loans)}, less {ending}")
        if self.d.num_in_memory != self.d.ledger.num_grants:
            raise Violation(f"the transfer thread knows of {self.d.num_in_memory} grants")

    @property
    def is_idle(self) -> bool:
        """Whether everything has ended: nothing is held, nobody waits."""
        d = self.d
        if not d.is_dead and (d.ledger.handoffs or d.loans or d.ledger.early or "waiting" in d.status.values()):
            return False
        if not d.is_dead and (d.ledger.expected or {"new", "expected"} & set(d.status.values())):
            return False
        if not d.is_dead and (d.opened or d.inbox or d.todo):
            return False
        alive = [p for p in self.ps if not p.is_dead]
        if any(p.ledger.handoffs or p.held or p.engine or p.ops or p.ended_ops or p.inbox or p.todo for p in alive):
            return False
        if any(p.side.jobs or p.side.prefixes for p in alive):
            return False
        return not self.queue or not any(p.is_open for p in alive)

    def complain(self) -> str:
        """What is not over, for a message."""
        d = self.d
        parts = [f"status {d.status}", f"loans {d.loans}", f"{list(d.ledger.handoffs.values())}", f"queue {self.queue}"]
        parts += [f"p{n}: held {set(p.held)} {list(p.ledger.handoffs.values())}" for n, p in enumerate(self.ps)]
        return "\n  ".join(parts)
