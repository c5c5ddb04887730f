"""What may go wrong in a world: each fault is a move, out of a budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.handoff.nodes import TTL, D, Move

from kvrelay.core.handoff import HandoffId
from kvrelay.engine.step import StepOutput
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.messages import HandoffClaim, Prefix
from kvrelay.rpc.wire import Message


class Hazards:
    """Faults of a ``World``."""

    FAULTS = frozenset(
        {
            *("lose", "duplicate", "late", "break", "redeliver", "cancel", "damage", "fail", "no blocks", "no room"),
            *("crash", "stop", "revoke", "cut", "gone", "stray", "narrow", "widen"),
        }
    )

    def _fault_moves(self) -> Iterator[Move]:
        kinds = self.scenario.faults
        for item in self.net:
            is_message = isinstance(item[3], Message)
            if "lose" in kinds and is_message:
                yield ("lose", item)
            if "duplicate" in kinds and is_message and not self.node(item[1]).is_stopped:
                yield ("duplicate", item)
        for number in (D, *range(len(self.ps))):
            yield from self._node_faults(number, self.node(number))
        for handoff_id, status in self.d.status.items():
            if status not in ("expected", "waiting"):
                continue
            if "gone" in kinds and not self.d.is_dead and not self.d.is_stopped:
                yield ("gone", handoff_id)
            if "cancel" in kinds and not self.d.is_dead and not self.d.is_stopped:
                yield ("cancel", handoff_id)
        for handoff_id, holder in self.queue.items():
            if "redeliver" in kinds and holder is not None:
                yield ("redeliver", handoff_id)
        if "no blocks" in kinds and any(call[0] == "_allocate" for call in self.d.inbox):
            yield ("no blocks",)

    def _node_faults(self, number: int, node: Any) -> Iterator[Move]:
        kinds = self.scenario.faults
        if node.is_dead:
            return
        if node.ops and "fail" in kinds:
            yield ("fail", number)
        if node.ops and "damage" in kinds and not node.ops[0].is_damaged:
            yield ("damage", number)
        if "break" in kinds and number != D and node.conn and not self.d.is_dead:
            yield ("break", number)
        if "no room" in kinds and any(call[0] == "_keep" for call in node.inbox):
            yield ("no room", number)
        if "stray" in kinds and number != D and not node.conn and not node.is_astray:
            yield ("stray", number)
        if "forge" in kinds and number == 0 and node.conn:
            yield from (("forge", handoff_id) for handoff_id in self.d.status)
        yield from self._leases_and_doors(number, node)

    def _leases_and_doors(self, number: int, node: Any) -> Iterator[Move]:
        kinds = self.scenario.faults
        side = "decode" if number == D else "prefill"
        if (change := "narrow" if node.is_open else "widen") in kinds and not node.is_stopped:
            yield (change, number)
        if f"crash {side}" in kinds:
            yield ("crash", number)
        if f"stop {side}" in kinds and not node.is_stopped:
            yield ("stop", number)
        for kind in ("revoke", "cut"):
            if f"{kind} {side}" in kinds and node.lease.alive_until is None and not node.is_stopped:
                yield (kind, number)

    def do_late(self) -> None:
        """What is under way takes longer than a timer."""
        self.do_advance()

    def do_duplicate(self, item: Any) -> None:
        self.receive(*item)

    def do_lose(self, item: Any) -> None:
        self.net -= {item}

    def do_fail(self, number: int) -> None:
        node = self.node(number)
        op = node.ops[0]
        failed = tuple(other for other in node.ops if other[:2] == op[:2])
        node.ops = tuple(other for other in node.ops if other not in failed)
        node.ended_ops += tuple((other, False) for other in failed)
        node.failed_groups |= {other.group for other in failed if other.group is not None}
        node.is_copying = False

    def do_damage(self, number: int) -> None:
        node = self.node(number)
        node.ops = (node.ops[0]._replace(is_damaged=True), *node.ops[1:])

    def do_no_blocks(self) -> None:
        self._refuse_next(D, "_allocate")

    def do_no_room(self, number: int) -> None:
        """In the holding area of a prefill worker."""
        self._refuse_next(number, "_keep")

    def _refuse_next(self, number: int, name: str) -> None:
        node = self.node(number)
        plane = node.plane
        call = next(call for call in node.inbox if call[0] == name)
        node.inbox = tuple(other for other in node.inbox if other is not call)
        node.is_full = True
        plane.run(call, plane)
        node.is_full = False

    # -- faults -------------------------------------------------------------------------------------------------------

    def do_crash(self, number: int) -> None:
        """Its transfers may still land until others know that they cannot; its messages under way may arrive."""
        node = self.node(number)
        node.is_dead, node.is_stopped = True, False
        node.ended_ops = node.todo = node.inbox = node.watch = ()
        if self.scenario.copies:
            node.ops, node.is_copying = (), False  # the kernel takes the lock back
        if node.lease.alive_until is None:
            node.lease.alive_until = self.now + TTL
        self.net = frozenset(item for item in self.net if item[1] != number)
        if number == D:
            node.ops = ()
            for other, p in enumerate(self.ps):
                if p.conn and not p.is_dead:
                    self.net |= {(D, other, p.conn, "lost")}
        else:
            if node.conn:
                self.net |= {(number, D, node.conn, "lost")}
            node.engine.clear()

    def do_stop(self, number: int) -> None:
        """As SIGSTOP does."""
        node = self.node(number)
        node.is_stopped = True
        if node.lease.alive_until is None:
            node.lease.alive_until = self.now + TTL

    def do_wake(self, number: int) -> None:
        node = self.node(number)
        node.is_stopped = False
        if not node.lease.has_ended:
            node.lease.alive_until = None

    def do_revoke(self, number: int) -> None:
        """Its lease ends before its time; it may not hear of it before its own clock says so."""
        self.node(number).lease.alive_until = self.now + TTL
        self._end_lease(number)

    def do_cut(self, number: int) -> None:
        """From the control plane, for good as far as this lease is concerned."""
        self.node(number).lease.alive_until = self.now + TTL

    def do_cancel(self, handoff_id: HandoffId) -> None:
        self.d.status[handoff_id] = "aborted"
        self.d.blocks.pop(handoff_id, None)
        self.d.side.on_step(StepOutput(closed_handoffs=[handoff_id]))

    def do_gone(self, handoff_id: HandoffId) -> None:
        """The frontend has lost the claimant, which may live on."""
        self.handle(D, de.ClaimantGone(handoff_id))

    def do_break(self, number: int) -> None:
        """The connection ends; each end hears of it by itself."""
        p = self.ps[number]
        conn, p.conn = p.conn, 0
        self.net = frozenset(item for item in self.net if item[2] != conn)
        self.net |= {(number, D, conn, "lost"), (D, number, conn, "lost")}

    def do_narrow(self, number: int) -> None:
        """The door is closed: a prefill worker pulls no more, the decode worker takes no more requests. What came
        through it goes on. The others hear of it as of any change of an entry."""
        self.node(number).is_open = False
        self._tell_role(number)
        if number != D and not any(p.is_open for p in self.ps):
            self.d.watch = (*self.d.watch, (number, "none pulls"))

    def do_widen(self, number: int) -> None:
        """The door is open again."""
        self.node(number).is_open = True
        self._tell_role(number)

    def _tell_role(self, number: int) -> None:
        """The entry changes in place, in the same term; unless the lease has taken it away."""
        lease = self.node(number).lease
        if lease.has_ended:
            return
        for other in [self.d] if number != D else self.ps if self.scenario.knows_decode else []:
            other.watch = (*other.watch, (number, lease.term))

    def do_forge(self, handoff_id: HandoffId) -> None:
        """A prefill worker claims a prefix under the number of a request."""
        p, rules = self.ps[0], self.scenario.prefill_rules(0)
        claim = HandoffClaim(
            handoff_id, rules.worker_id, rules.kv_compatibility, term=p.lease.term, prefix=Prefix((0,))
        )
        self.send(0, D, p.conn, claim)

    def do_stray(self, number: int) -> None:
        """It cannot connect to the decode worker, which lives: discovery lacks it, or the network between them."""
        self.ps[number].is_astray = True

    def do_redeliver(self, handoff_id: HandoffId) -> None:
        self.queue[handoff_id] = None
