"""One decode worker, some prefill workers, and a network that delays, reorders, duplicates and loses.

Nothing here decides anything: the two ledgers do. A world is a state; ``plain_moves`` and ``fault_moves`` are all that
may happen to it next, ``apply`` makes one happen. Everything asynchronous is a move of its own: each message, each
transfer's landing and its completion, each checksum, each tick. Faults come out of a budget. Violations are raised as
they happen, and by ``check``; ``is_idle`` tells whether everything has ended.

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
    number_of,
)

from kvrelay.core.handoff import HandoffOrder, KvDirection
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import LeaseEnded, LeaseLost, Registered, Tick
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.messages import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffFetched,
    HandoffGrant,
    HandoffProgress,
    HandoffReady,
    HandoffRefused,
    HandoffReleased,
    Prefix,
)
from kvrelay.handoff.prefill_ledger import PrefillLedger

SECRET = 5


@dataclass
class World(Hazards, Memory):
    scenario: Scenario
    d: DecodeNode
    ps: list[PrefillNode]
    now: int = 0
    net: frozenset[Any] = frozenset()
    """(from, to, connection, message)."""
    queue: dict[str, int | None] = field(default_factory=dict)
    """Entries that are not settled, and who has pulled each."""
    entries: dict[str, pe.Pulled] = field(default_factory=dict)
    returned: frozenset[str] = frozenset()
    """Entries that were given back once: not again."""
    num_faults: int = 0
    ids: dict[Any, int] = field(default_factory=dict)
    """Numbers for the parts of keys, shared by all worlds of an exploration: a state is then a few small numbers."""

    # -- beginning ----------------------------------------------------------------------------------------------------

    @classmethod
    def begin(cls, scenario: Scenario) -> World:
        decode = DecodeNode(ledger=DecodeLedger(scenario.decode_rules(), lambda: SECRET))
        prefill = [
            PrefillNode(ledger=PrefillLedger(scenario.prefill_rules(number))) for number in range(scenario.num_prefill)
        ]
        world = cls(scenario, decode, prefill)
        for number, node in enumerate(prefill):
            decode.ledger.handle(Registered(name(number), TTL, 1), 0)
            if scenario.knows_decode:
                node.ledger.handle(Registered("d", TTL, 1), 0)
        for number in range(scenario.num_requests):
            handoff_id = f"h{number}"
            if scenario.is_prefix:
                prefill[number % scenario.num_prefill].engine[handoff_id] = ("want",)
                continue
            world.entries[handoff_id] = pe.Pulled(
                handoff_id,
                "d",
                scenario.num_hit_blocks + scenario.num_chunks,
                scenario.num_known_hits,
                0,
                scenario.order,
            )
            decode.status[handoff_id] = "new"
            if scenario.order is HandoffOrder.PREFILL_FIRST:
                world.queue[handoff_id] = None
        return world

    def after(self, move: Move) -> World:
        """A copy in which ``move`` has happened. What the move does not touch is shared with this world."""
        touched = self._touched(move)
        d = self.d.clone() if D in touched else self.d
        ps = [p.clone() if number in touched else p for number, p in enumerate(self.ps)]
        queue = dict(self.queue)
        world = World(
            self.scenario, d, ps, self.now, self.net, queue, self.entries, self.returned, self.num_faults, self.ids
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
        self._handle(number, Tick())

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
        self._handle(number, event)

    def do_lease_lost(self, number: int) -> None:
        """The holder hears of it: what it has submitted is withdrawn."""
        node = self.node(number)
        node.lease.is_lost = True
        node.lease.term += 1
        self._handle(number, LeaseLost())
        kept = node.ops[:1] if node.is_copying else ()  # a copy that has begun cannot be withdrawn
        node.ended_ops += tuple((op, False) for op in node.ops if op not in kept)
        node.ops = kept

    def do_register(self, number: int) -> None:
        node = self.node(number)
        node.lease = Lease(term=node.lease.term)
        for other in [self.d] if number != D else self.ps if self.scenario.knows_decode else []:
            # The lease puts back what it had, then the worker says that this is another term.
            other.watch = (*other.watch, (number, node.lease.term - 1), (number, node.lease.term))

    def do_expect(self, handoff_id: str) -> None:
        """A request comes to the decode worker and waits for blocks."""
        self.d.status[handoff_id] = "expected"
        self._handle(D, de.Expected(handoff_id, name(0)))

    def do_refuse(self, handoff_id: str) -> None:
        """The frontend takes the request elsewhere."""
        self.d.status[handoff_id] = "refused"

    def do_refuse_half(self, handoff_id: str) -> None:
        """The frontend tells the decode worker, if it still waits."""
        del self.queue[handoff_id]
        if self.d.status[handoff_id] in ("expected", "waiting"):
            self.do_gone(handoff_id)

    def do_arrive(self, handoff_id: str) -> None:
        """A request comes to the decode worker, whose engine lends its blocks."""
        scenario, d = self.scenario, self.d
        d.status[handoff_id] = "waiting"
        blocks: tuple[int, ...] = ()
        if scenario.with_blocks:
            hits = self._fresh(scenario.num_hit_blocks)
            for block in hits:
                d.content[block] = ("hit", handoff_id)
            d.blocks[handoff_id] = hits
            blocks = hits + self._fresh(scenario.num_chunks)
            d.blocks[handoff_id] = blocks
            d.loans[handoff_id, 1] = blocks
        self._handle(
            D,
            de.Opened(
                handoff_id,
                f"r-{handoff_id}",
                blocks,
                scenario.num_hit_blocks,
                scenario.order,
                scenario.direction,
                name(0) if scenario.is_paired else None,
                d.lease.term,
            ),
        )

    def _fresh(self, count: int) -> tuple[int, ...]:
        """The lowest free blocks: what was freed is reused at once."""
        used = {block for blocks in (*self.d.blocks.values(), *self.d.loans.values()) for block in blocks}
        found = []
        block = 0
        while len(found) < count:
            if block not in used:
                found.append(block)
                self.d.content.pop(block, None)
            block += 1
        return tuple(found)

    def do_pull(self, number: int, handoff_id: str) -> None:
        self.queue[handoff_id] = number
        may_return = not self.scenario.is_paired and handoff_id not in self.returned
        entry, term = self.entries[handoff_id], self.ps[number].lease.term
        self._handle(number, msgspec.structs.replace(entry, term=term, may_return=may_return))

    def do_compute(self, number: int, handoff_id: str) -> None:
        p, scenario = self.ps[number], self.scenario
        step, rest = p.engine[handoff_id][0], p.engine[handoff_id][1:]
        if step == "want":
            p.engine[handoff_id] = ("loading",)
            p.held |= {handoff_id}
            blocks = pe.RequestBlocks(0, tuple(range(100, 100 + scenario.num_hit_blocks)))
            prefix = Prefix(tuple(range(scenario.num_hit_blocks)))
            self._handle(number, pe.PrefixWanted(handoff_id, "d", blocks, prefix, p.lease.term, 1))
            return
        if step == "load":
            p.engine[handoff_id] = ("loading", *rest)
            blocks = pe.RequestBlocks(0, tuple(range(100, 100 + scenario.num_hit_blocks)))
            self._handle(number, pe.LoadRequested(handoff_id, blocks))
            return
        p.engine[handoff_id] = rest
        index = scenario.num_known_hits + int(step)
        if scenario.by_engine:
            self._handle(number, pe.ChunkComputed(handoff_id, pe.RequestBlocks(0, ()), kv_transfer_params=b"{}"))
            return
        token = pe.FirstToken(7) if not rest else None
        self._handle(number, pe.ChunkComputed(handoff_id, pe.RequestBlocks(index, (100 + index,)), token))

    def do_evict(self) -> None:
        """The decode worker's cache forgets the prefix, and reuses its blocks unless they are lent."""
        self.d.has_evicted = True

    def do_deliver(self, item: Any) -> None:
        self.net -= {item}
        self._receive(*item)

    def _receive(self, source: int, target: int, conn: int, message: Any) -> None:
        if self.node(target).is_dead:
            return
        if target == D:
            self._handle(D, decode_event(source, conn, message, self.d.lease.term), conn, source)
        else:
            if message == "lost" and self.ps[target].conn == conn:
                self.ps[target].conn = 0
            self._handle(target, prefill_event(message))

    # -- ledgers ------------------------------------------------------------------------------------------------------

    def _handle(self, number: int, event: Any, conn: int = 0, source: int = 0) -> None:
        if event is None:
            return
        if number == D:
            for action in self.d.ledger.handle(event, self.now):
                self._decode_action(action)
            if isinstance(event, HandoffReleased):
                self._send(D, source, conn, f"heard {event.handoff_id}")
        else:
            for action in self.ps[number].ledger.handle(event, self.now):
                self._prefill_action(number, action)

    def _decode_action(self, action: Any) -> None:
        d = self.d
        match action:
            case de.Push():
                self.queue[action.handoff_id] = None
            case de.AllocateLoan() | de.LendPrefix():
                is_prefix = isinstance(action, de.LendPrefix)
                task = ("lend", action.handoff_id) if is_prefix else ("allocate", action.handoff_id, action.loan)
                d.todo += (task,)
            case de.ChecksumHits():
                d.todo += (("hits", action.handoff_id, action.generation, action.block_ids),)
            case de.SendGrant():
                self._send_grant(action)
            case de.SendToPrefill():
                self._send(D, self._owner(action.connection), action.connection, action.message)
            case de.Fetch():
                source = number_of(action.worker_id)
                op = (action.remote_block_ids, action.block_ids, False)
                d.ops += (("fetch", action.handoff_id, source, action.generation, *op),)
            case de.Verify():
                d.todo += (("verify", action.handoff_id, action.generation, action.block_ids),)
            case de.EndLoan():
                self._end_loan(action)
            case de.Discard() | de.Avoid():
                pass
            case de.Resume():
                self._resume(action)
            case de.ComputeHere():
                self._compute_here(action)
            case _:
                raise TypeError(action)

    def _owner(self, conn: int) -> int:
        return conn % CONN_STEP

    def _send_grant(self, action: de.SendGrant) -> None:
        d, message = self.d, action.message
        number = number_of(action.worker_id)
        if message.direction is KvDirection.PUSH:
            for block in message.block_ids[self.scenario.num_hit_blocks :]:
                d.writer[block] = (message.handoff_id, message.generation)
        if self.ps[number].conn != action.connection:
            d.todo += (("not sent", message.handoff_id, message.generation),)
        else:
            self._send(D, number, action.connection, message)

    def _end_loan(self, action: de.EndLoan) -> None:
        blocks = self.d.loans.pop((action.handoff_id, action.loan), None)
        if blocks is None:
            raise Violation(f"loan {action.loan} of {action.handoff_id} ends twice")
        # A second loan shares the hits of the first.
        for block in blocks:
            if self.d.writer.get(block, ("",))[0] == action.handoff_id:
                self.d.writer.pop(block)

    def _resume(self, action: de.Resume) -> None:
        d, handoff_id, message = self.d, action.handoff_id, action.message
        if d.status[handoff_id] != "waiting":
            raise Violation(f"a first token for a request that is {d.status[handoff_id]}")
        d.status[handoff_id] = "running"
        if self.scenario.by_engine:
            return
        blocks = d.blocks[handoff_id] = d.loans[handoff_id, action.loan]
        for index, block in enumerate(blocks):
            wanted = ("hit", handoff_id) if index < self.scenario.num_hit_blocks else ("kv", handoff_id, 100 + index)
            if d.content.get(block) != wanted:
                raise Violation(f"block {block} of a running request holds {d.content.get(block)}, not {wanted}")
        if message.token_id != 7:
            raise Violation("a wrong token")

    def _compute_here(self, action: de.ComputeHere) -> None:
        d = self.d
        if d.status[action.handoff_id] != "waiting":
            raise Violation(f"to be computed here, but it is {d.status[action.handoff_id]}")
        if not self.scenario.can_replace_blocks and any(owner == action.handoff_id for owner, _ in d.loans):
            raise Violation("to be computed in blocks that are lent")
        # The engine hears of it after what was asked of it before, such as other blocks for the same request.
        d.todo += (("compute here", action.handoff_id),)

    def _prefill_action(self, number: int, action: Any) -> None:
        p = self.ps[number]
        match action:
            case pe.SendClaim():
                self._claim(number, action)
            case pe.SendToDecode() | pe.SendRelease():
                if self._connect(number):
                    self._send(number, D, p.conn, action.message)
            case pe.ReadHits():
                p.ops += (("load", action.handoff_id, action.blocks.block_ids, action.remote_block_ids, False),)
            case pe.Write():
                data = (action.generation, action.blocks.block_ids, action.remote_block_ids)
                op = ("write", action.handoff_id, *data, without_words(action.done), False)
                p.ops = (*p.ops, op) if self.scenario.transport_order else (op, *p.ops)
            case pe.VerifyHits():
                p.todo += (("verify hits", action.handoff_id),)
            case pe.ChecksumChunk():
                p.todo += (("chunk", action.handoff_id),)
            case pe.Keep():
                p.todo += (("keep", action.handoff_id, action.block_ids),)
            case pe.Settle() | pe.Return():
                self._end_delivery(number, action)
            case pe.Computed():
                pass
            case _:
                self._order(number, action)

    def _claim(self, number: int, action: pe.SendClaim) -> None:
        p = self.ps[number]
        is_astray, p.is_astray = p.is_astray and not p.conn, False
        if not is_astray and self._connect(number):
            self._send(number, D, p.conn, action.message)
        else:
            p.todo += (("unreachable", action.message.handoff_id),)

    def _end_delivery(self, number: int, action: pe.Settle | pe.Return) -> None:
        is_mine = self.queue.get(action.handoff_id) == number
        if isinstance(action, pe.Return):
            self.returned |= {action.handoff_id}
            if is_mine:
                self.queue[action.handoff_id] = None
        elif is_mine:
            del self.queue[action.handoff_id]

    def _order(self, number: int, action: Any) -> None:
        """To a prefill worker's engine."""
        p, handoff_id = self.ps[number], action.handoff_id
        match action:
            case pe.Compute():
                scenario = self.scenario
                num_chunks = scenario.num_hit_blocks - scenario.num_known_hits + scenario.num_chunks
                steps = tuple(str(chunk) for chunk in range(num_chunks))
                p.engine[handoff_id] = ("load", *steps) if scenario.num_known_hits else steps
                p.held |= {handoff_id}
            case pe.ReportLoaded() if self.scenario.is_prefix:
                if p.engine.pop(handoff_id, ()) != ("loading",):
                    raise Violation(f"the load of {handoff_id} ends twice")
                p.held -= {handoff_id}
            case pe.ReportLoaded():
                if p.engine.get(handoff_id, ("",))[:1] == ("loading",):
                    p.engine[handoff_id] = p.engine[handoff_id][1:]
            case pe.StopComputing():
                p.engine.pop(handoff_id, None)
            case pe.FreeBlocks():
                if handoff_id not in p.held:
                    raise Violation(f"p{number} frees blocks twice")
                p.held -= {handoff_id}
                p.kept -= {handoff_id}
                p.engine.pop(handoff_id, None)
            case _:
                raise TypeError(action)

    def _connect(self, number: int) -> bool:
        """Whether there is a connection to the decode worker, perhaps a new one."""
        if self.d.is_dead:
            return False
        p = self.ps[number]
        if not p.conn:
            p.num_conns += 1
            p.conn = CONN_STEP * p.num_conns + number
        return True

    def _send(self, source: int, target: int, conn: int, message: Any) -> None:
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
            if self.d.status[handoff_id] == "running" and set(blocks) & set(self.d.writer):
                raise Violation(f"a peer may write to blocks of {handoff_id}, which runs: {self.d.writer}")
            for other, theirs in self.d.blocks.items():
                if other != handoff_id and set(blocks) & set(theirs):
                    raise Violation(f"{handoff_id} and {other} share blocks")
        if self.d.is_dead:
            return
        lent = {(handoff.handoff_id, loan) for handoff in self.d.ledger.handoffs.values() for loan in handoff.loans}
        if lent != set(self.d.loans):
            raise Violation(f"the ledger counts loans {lent}, the engine {set(self.d.loans)}")

    @property
    def is_idle(self) -> bool:
        """Whether everything has ended: nothing is held, nobody waits."""
        d = self.d
        if not d.is_dead and (d.ledger.handoffs or d.loans or d.ledger.early or "waiting" in d.status.values()):
            return False
        if not d.is_dead and (d.ledger.expected or {"new", "expected"} & set(d.status.values())):
            return False
        alive = [p for p in self.ps if not p.is_dead]
        if any(p.ledger.handoffs or p.held or p.engine or p.ops or p.ended_ops for p in alive):
            return False
        return not self.queue or not any(p.is_open for p in alive)

    def complain(self) -> str:
        """What is not over, for a message."""
        d = self.d
        parts = [f"status {d.status}", f"loans {d.loans}", f"{list(d.ledger.handoffs.values())}", f"queue {self.queue}"]
        parts += [f"p{n}: held {set(p.held)} {list(p.ledger.handoffs.values())}" for n, p in enumerate(self.ps)]
        return "\n  ".join(parts)


# -- messages to events -----------------------------------------------------------------------------------------------


def decode_event(source: int, conn: int, message: Any, term: int) -> Any:
    match message:
        case HandoffClaim():
            return de.Claimed(message, conn, term)
        case HandoffDone():
            return de.Done(message, conn or None)
        case HandoffReady():
            return de.Offered(message, conn)
        case HandoffProgress() | HandoffReleased():
            return message
        case "lost":
            return de.ClaimantConnectionLost(conn)
    raise TypeError(message)


def prefill_event(message: Any) -> Any:
    match message:
        case HandoffGrant():
            return pe.Granted("d", message)
        case HandoffAbandon():
            return pe.Abandoned("d", message)
        case HandoffRefused() | HandoffFetched():
            return message
        case "lost":
            return pe.DecodeConnectionLost("d")
        case str():
            return pe.ReleaseAcknowledged(message.removeprefix("heard "))
    raise TypeError(message)
