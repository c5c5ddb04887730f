"""Memory in a world: transfers that land, engines that compute and lend, checksums. Here violations show."""

from __future__ import annotations

from typing import Any

from tests.handoff.nodes import D, Violation

from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe

KEPT = 1000
"""What a block of the holding area is numbered above the block of the pool whose KV it has."""


class Memory:
    """Transfers, engines and checksum threads of a ``World``."""

    # -- transfers ----------------------------------------------------------------------------------------------------

    def do_land(self, number: int) -> None:
        """The oldest transfer takes effect, or fails: at the fence, or since the peer's memory has gone.

        No fence stops a copy that has begun; only a read that ends after it does not count.
        """
        node = self.node(number)
        op, peer = node.ops[0], self.d if number != D else self.ps[node.ops[0][2]]
        is_late = not node.lease.may_touch(self.now) and self.scenario.transport_fence
        if peer.is_dead or (is_late and not (node.is_copying and op[0] == "write")):
            self._miss(number)
            return
        node.ops, node.is_copying = node.ops[1:], False
        getattr(self, f"_land_{op[0]}")(number, op)
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
        if op[0] == "write":
            failed = tuple(other for other in node.ops if other[0] == "write" and other[1] == op[1])
            node.ops = tuple(other for other in node.ops if other not in failed)
            node.ended_ops += tuple((other, False) for other in failed)
        node.ended_ops += ((op, False),)

    def _land_write(self, number: int, op: Any) -> None:
        _, handoff_id, generation, local, remote, done, damaged = op
        p = self.ps[number]
        if handoff_id not in p.held and not p.is_dead:
            raise Violation(f"p{number} writes from blocks that it has freed")
        moved = KEPT if handoff_id in p.kept else 0
        if any((block >= KEPT) != bool(moved) for block in local) and not p.is_dead:
            raise Violation(f"p{number} writes from blocks {local}, where the KV is not")
        for block in remote:
            if self.d.writer.get(block) != (handoff_id, generation):
                raise Violation(f"a write of {handoff_id}/{generation} lands in block {block}: {self.d.writer}")
        for block, source in zip(remote, local, strict=True):
            good = not self.scenario.incompatible
            self.d.content[block] = ("damaged",) if damaged or not good else ("kv", handoff_id, source % KEPT)
        if done is not None:
            self._send(number, D, 0, done)

    def _land_load(self, number: int, op: Any) -> None:
        _, handoff_id, _, remote, _ = op
        if self.scenario.is_prefix and handoff_id not in self.ps[number].held and not self.ps[number].is_dead:
            raise Violation(f"p{number} reads into blocks that it has given back")
        lent = {block for (owner, _), blocks in self.d.loans.items() if owner == handoff_id for block in blocks}
        if not lent.issuperset(remote):
            raise Violation(f"p{number} reads blocks that nobody keeps for it")

    def _land_fetch(self, number: int, op: Any) -> None:
        _, handoff_id, source, _, remote, local, damaged = op
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
        if op[0] == "write":
            self._handle(number, pe.Written(op[1], ok))
        elif op[0] == "load":
            self._handle(number, pe.HitsRead(op[1], ok))
        else:
            self._handle(D, de.FetchEnded(op[1], op[3], ok))

    # -- engines and checksums ----------------------------------------------------------------------------------------

    def do_work(self, number: int) -> None:
        node = self.node(number)
        task, node.todo = node.todo[0], node.todo[1:]
        kind, handoff_id = task[0], task[1]
        if kind == "allocate":
            self._allocate(handoff_id, task[2], possible=self.scenario.can_replace_blocks)
        elif kind == "lend":
            self._lend(handoff_id)
        elif kind == "hits":
            self._expect_lent(handoff_id, task[3])
            self._handle(D, de.HitsChecksummed(handoff_id, task[2], tuple(0 for _ in task[3])))
        elif kind == "verify":
            self._expect_lent(handoff_id, task[3])
            ok = all(self.d.content.get(block, ("damaged",))[0] == "kv" for block in task[3])
            self._handle(D, de.Verified(handoff_id, task[2], ok))
        elif kind == "compute here":
            if self.d.status[handoff_id] == "waiting":
                self.d.status[handoff_id] = "local"
                self.d.blocks.pop(handoff_id, None)
        elif kind == "not sent":
            self._handle(D, de.GrantNotSent(handoff_id, task[2]))
        elif kind == "unreachable":
            self._handle(number, pe.Unreachable(handoff_id))
        else:
            if handoff_id not in node.held:
                raise Violation(f"p{number} reads blocks that it has freed")
            if kind == "keep":
                self._keep(number, handoff_id, task[2], possible=True)
            elif kind == "chunk":
                self._handle(number, pe.ChunkChecksummed(handoff_id, (0,)))
            else:
                self._handle(number, pe.HitsVerified(handoff_id, True))

    def _keep(self, number: int, handoff_id: str, blocks: tuple[int, ...], *, possible: bool) -> None:
        p = self.ps[number]
        if possible:
            p.kept |= {handoff_id}
        self._handle(number, pe.Kept(handoff_id, tuple(block + KEPT for block in blocks) if possible else None))

    def _lend(self, handoff_id: str) -> None:
        """The prefix, if the cache still has it."""
        blocks = None if self.d.has_evicted else tuple(range(self.scenario.num_hit_blocks))
        if blocks is not None:
            if (handoff_id, 1) in self.d.loans:
                raise Violation(f"{handoff_id} is lent twice; the first loan is forgotten")
            self.d.loans[handoff_id, 1] = blocks
        self._handle(D, de.LoanAllocated(handoff_id, 1, blocks))

    def _allocate(self, handoff_id: str, loan: int, *, possible: bool) -> None:
        blocks: tuple[int, ...] | None = None
        if possible and self.d.status[handoff_id] == "waiting":
            old = self.d.blocks.get(handoff_id, ())
            hits = old[: self.scenario.num_hit_blocks]
            blocks = hits + self._fresh(self.scenario.num_chunks)
            self.d.loans[handoff_id, loan] = blocks
        self._handle(D, de.LoanAllocated(handoff_id, loan, blocks))

    def _expect_lent(self, handoff_id: str, blocks: tuple[int, ...]) -> None:
        lent = {block for (owner, _), lent in self.d.loans.items() if owner == handoff_id for block in lent}
        if not lent.issuperset(blocks):
            raise Violation("d checksums blocks that are not lent")
