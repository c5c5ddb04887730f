"""Memory in a world: transfers that land, engines that compute and lend, checksums. Here violations show."""

from __future__ import annotations

from tests.handoff.nodes import D, Violation
from tests.handoff.plane import ANSWERED, KEPT, Call, Link, Op

from kvrelay.core.handoff import HandoffId
from kvrelay.engine.step import StepOutput
from kvrelay.errors import WorkerUnavailableError


class Memory:
    """Transfers, engines and checksum threads of a ``World``."""

    # -- transfers ----------------------------------------------------------------------------------------------------

    def do_land(self, number: int) -> None:
        """The oldest transfer takes effect, or fails: at the fence, or since the peer's memory has gone.

        No fence stops a copy that has begun; only a read that ends after it does not count.
        """
        node = self.node(number)
        op, peer = node.ops[0], self.node(node.ops[0].peer)
        is_late = not node.lease.may_touch(self.now) and self.scenario.transport_fence
        if peer.is_dead or (is_late and not (node.is_copying and op[0] == "write")):
            self._miss(number)
            return
        node.ops, node.is_copying = node.ops[1:], False
        getattr(self, f"_land_{op.kind}")(number, op)
        node.ended_ops += ((op, True),)

    def do_copy(self, number: int) -> None:
        """Transport shm: the oldest transfer begins, unless the fence has passed or D has barred this worker."""
        node = self.node(number)
        node.is_copying = node.lease.may_touch(self.now) and number not in self.d.barred
        if not node.is_copying:
            self._miss(number)

    def _miss(self, number: int) -> None:
        """The oldest transfer fails. Nothing of its group follows a failed write."""
        node = self.node(number)
        op, node.ops, node.is_copying = node.ops[0], node.ops[1:], False
        if op.group is not None:
            node.failed_groups |= {op.group}
            failed = tuple(other for other in node.ops if other.group == op.group)
            node.ops = tuple(other for other in node.ops if other not in failed)
            node.ended_ops += tuple((other, False) for other in failed)
        node.ended_ops += ((op, False),)

    def _land_write(self, number: int, op: Op) -> None:
        handoff_id, local, remote, ref = op.handoff_id, op.local, op.remote, (str(op.handoff_id), op.generation)
        p = self.ps[number]
        if handoff_id not in p.held and not p.is_dead:
            raise Violation(f"p{number} writes from blocks that it has freed")
        moved = KEPT if handoff_id in p.kept else 0
        if any((block >= KEPT) != bool(moved) for block in local) and not p.is_dead:
            raise Violation(f"p{number} writes from blocks {local}, where the KV is not")
        for block in remote:
            if self.d.writer.get(block, ())[:2] != ref:
                raise Violation(f"a write of {ref} lands in block {block}: {self.d.writer}")
        for block, source in zip(remote, local, strict=True):
            good = not self.scenario.incompatible
            self.d.content[block] = ("damaged",) if op.is_damaged or not good else ("kv", handoff_id, source % KEPT)
        if op.done is not None:
            self.send(number, D, 0, op.done)

    def _land_load(self, number: int, op: Op) -> None:
        handoff_id = op.handoff_id
        if self.scenario.is_prefix and handoff_id not in self.ps[number].held and not self.ps[number].is_dead:
            raise Violation(f"p{number} reads into blocks that it has given back")
        lent = {block for (owner, _), blocks in self.d.loans.items() if owner == handoff_id for block in blocks}
        if not lent.issuperset(op.remote):
            raise Violation(f"p{number} reads blocks that nobody keeps for it")

    def _land_engine(self, number: int, op: Op) -> None:
        if op.handoff_id not in self.ps[op.peer].held:
            raise Violation(f"d's engine reads KV that p{op.peer}'s has freed")

    def _land_fetch(self, number: int, op: Op) -> None:
        handoff_id, source, remote, local, damaged = op.handoff_id, op.peer, op.remote, op.local, op.is_damaged
        if handoff_id not in self.ps[source].held:
            raise Violation(f"d reads blocks of p{source} that it has freed")
        lent = {block for (owner, _), blocks in self.d.loans.items() if owner == handoff_id for block in blocks}
        if not lent.issuperset(local):
            raise Violation("d reads into blocks that are not lent")
        moved = KEPT if handoff_id in self.ps[source].kept else 0
        for block, theirs in zip(local, remote, strict=True):
            if (theirs >= KEPT) != bool(moved):
                raise Violation(f"d reads block {theirs} of p{source}, where its KV is not")
            self.d.content[block] = ("damaged",) if damaged else ("kv", handoff_id, theirs - moved)

    def do_complete(self, number: int) -> None:
        node = self.node(number)
        (op, ok), node.ended_ops = node.ended_ops[0], node.ended_ops[1:]
        if op.kind == "engine":
            if ok and node.status[op.handoff_id] == "waiting":
                node.status[op.handoff_id] = "running"
            node.side.on_step(StepOutput(fetched_handoffs=[(op.handoff_id, ok)]))
        else:
            self.node(number).plane.run(op.ended, None if ok else "failed")

    # -- engines and other threads ------------------------------------------------------------------------------------

    def do_turn(self, number: int) -> None:
        """The engine takes in what is asked of it, until something is answered."""
        node = self.node(number)
        plane = node.plane
        while node.inbox:
            call, node.inbox = node.inbox[0], node.inbox[1:]
            plane.run(call, plane)
            if call[0] in ANSWERED:
                break

    def do_work(self, number: int) -> None:
        """The checksum thread, or a task of the event loop."""
        node = self.node(number)
        plane = node.plane
        (kind, call, blocks), node.todo = node.todo[0], node.todo[1:]
        if kind == "connect":
            self._connected(number, call)
        elif kind == "soon":
            plane.run(call)
        elif kind in ("reach", "prepare"):
            plane.run(call, None)
        else:
            handoff_id = call[1][0].handoff_id
            if number == D:
                self._expect_lent(handoff_id, blocks)
            elif handoff_id not in node.held:
                raise Violation(f"p{number} checksums blocks that it has freed")
            ok = number != D or all(self.d.content.get(block, ("damaged",))[0] == "kv" for block in blocks)
            plane.run(call, tuple(0 for _ in blocks) if kind == "checksum" else None if ok else "damaged")

    def _connected(self, number: int, then: Call) -> None:
        """A prefill worker has found the decode worker, or has not."""
        p = self.ps[number]
        is_astray, p.is_astray = p.is_astray and not p.conn, False
        if not is_astray and self.connect(number):
            self.node(number).plane.run(then, Link(self, number), None)
        else:
            self.node(number).plane.run(then, None, WorkerUnavailableError("there is no way"))

    def _expect_lent(self, handoff_id: HandoffId, blocks: tuple[int, ...]) -> None:
        lent = {block for (owner, _), lent in self.d.loans.items() if owner == handoff_id for block in lent}
        if not lent.issuperset(blocks):
            raise Violation("d checksums blocks that are not lent")
