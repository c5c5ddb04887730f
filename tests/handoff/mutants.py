"""Protocols and sides that are wrong in one place each.

A mutant lacks one rule of docs/architecture.md, "What may never happen", and names the scenario in which the explorer
has to find it out. Rule 11, ``check_integrity``, is what the explorer's own invariants are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.handoff.nodes import Scenario

from kvrelay.core.handoff import HandoffOrder, KvDirection
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.decode import DecodeHandoff
from kvrelay.handoff.decode_events import EndLoan
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeState
from kvrelay.handoff.leases import PeerLeases
from kvrelay.handoff.messages import HandoffGrant
from kvrelay.handoff.prefill import PrefillHandoff
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillState
from kvrelay.worker.sides.decode import IncomingHandoffs
from kvrelay.worker.sides.prefill import OutgoingHandoffs
from kvrelay.worker.translation import chunk_computed

Patch = Callable[[pytest.MonkeyPatch], None]
ONE = Scenario(num_prefill=1)
TWO = Scenario(num_prefill=2)


@dataclass(frozen=True)
class Mutant:
    """``rule``: the number in docs/architecture.md."""

    name: str
    rule: int
    scenario: Scenario
    patch: Patch = lambda patch: None
    is_long: bool = False
    """For continuous integration only."""


def scenario(*faults: str, num_faults: int = 1, **settings: Any) -> Scenario:
    settings.setdefault("num_prefill", 1)
    return Scenario(faults=frozenset(faults), max_faults=num_faults, **settings)


def replacing(owner: type, name: str, wrap: Callable[[Any], Any]) -> Patch:
    """``wrap(original)`` takes the place of the method."""
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def the_end_of_a_connection_ends_grants(connection_lost: Any) -> Any:
    def mutated(self: DecodeHandoff, connection: Any, context: Any) -> None:
        connection_lost(self, connection, context)
        self.grants = tuple(grant for grant in self.grants if grant.connection != connection)

    return mutated


def nothing_is_lost(_: Any) -> Any:
    return lambda self, reason, context: None


def any_generation_is_current(done: Any) -> Any:
    def mutated(self: DecodeHandoff, message: Any, connection: Any, turn: Any) -> None:
        done(self, msgspec.structs.replace(message, generation=self.generation), connection, turn)

    return mutated


def loans_end_with_the_hand_off(settle: Any) -> Any:
    def mutated(self: DecodeHandoff, turn: Any) -> None:
        if self.state is DecodeState.CLOSED:
            turn.out += [EndLoan(self.handoff_id, loan) for loan in self.loans]
            self.loans = ()
        settle(self, turn)

    return mutated


def fenced_when_the_lease_ends(ended: Any) -> Any:
    def mutated(self: PeerLeases, worker_id: str, now_s: float) -> None:
        ended(self, worker_id, now_s)
        self.fences_s[worker_id] = now_s

    return mutated


def stopped_with_transfers_in_flight(settle: Any) -> Any:
    def mutated(self: PrefillHandoff, turn: Any) -> None:
        if self.state is PrefillState.STOPPING:
            self.num_in_flight = 0
        settle(self, turn)

    return mutated


def freed_with_the_last_write_submitted(submit: Any) -> Any:
    def mutated(self: PrefillHandoff, chunk: Any, turn: Any) -> None:
        submit(self, chunk, turn)
        if chunk.first_token is not None:
            self._free(turn)

    return mutated


def the_same_blocks_for_a_second_claimant(allocate: Any) -> Any:
    def mutated(self: DecodeHandoff, turn: Any) -> None:
        waiting, self.waiting = self.waiting, None
        assert waiting is not None
        self._abandon_holder(turn)
        self._grant(waiting, turn)

    return mutated


def a_release_is_said_once(tick: Any) -> Any:
    def mutated(self: PrefillHandoff, ended_s: float | None, turn: Any) -> None:
        if self.state is not PrefillState.RELEASING:
            tick(self, ended_s, turn)
        else:
            self.due_s = turn.now_s + 1

    return mutated


def written_before_the_grant(computed: Any) -> Any:
    def mutated(self: PrefillHandoff, chunk: Any, turn: Any) -> None:
        if self.state is PrefillState.CLAIMING:
            self.grant = HandoffGrant(self.handoff_id, 1, tuple(range(self.num_tokens)), self.num_cached_tokens)
            self._move(PrefillState.SENDING)
        computed(self, chunk, turn)

    return mutated


def only_current_loans_of_open_hand_offs(settle: Any) -> Any:
    def mutated(self: DecodeHandoff, turn: Any) -> None:
        if self.state is DecodeState.VERIFYING:
            turn.out += [EndLoan(self.handoff_id, loan) for loan in self.loans]
            self.loans = ()
        settle(self, turn)

    return mutated


def done_is_said_once(tick: Any) -> Any:
    def mutated(self: PrefillHandoff, ended_s: float | None, turn: Any) -> None:
        if self.state is PrefillState.CONFIRMING:
            self._move(PrefillState.ENDED)
        else:
            tick(self, ended_s, turn)

    return mutated


def any_claim_is_granted(claim: Any) -> Any:
    return lambda self, handoff, event, turn: handoff.claimed(event, turn)


def freed_with_ready(hold: Any) -> Any:
    def mutated(self: PrefillHandoff, chunk: Any, turn: Any) -> None:
        hold(self, chunk, turn)
        self._free(turn)

    return mutated


def ready_before_it_is_kept(keep: Any) -> Any:
    def mutated(self: PrefillHandoff, chunk: Any, turn: Any) -> None:
        keep(self, chunk, turn)
        self.chunks = ()
        self._hold(chunk, turn)

    return mutated


def written_while_it_is_moved(move_out: Any) -> Any:
    def mutated(self: PrefillHandoff, turn: Any) -> None:
        move_out(self, turn)
        self.is_moving = False

    return mutated


def stopped_while_it_is_kept(keep: Any) -> Any:
    def mutated(self: PrefillHandoff, chunk: Any, turn: Any) -> None:
        keep(self, chunk, turn)
        self.num_in_flight -= 1

    return mutated


def abandoned_while_read(ready: Any) -> Any:
    def mutated(self: DecodeHandoff, message: Any, turn: Any) -> bool:
        return bool(self.state is not DecodeState.CLOSED and ready(self, message, turn))

    return mutated


def forgotten_once_closed(allocated: Any) -> Any:
    def mutated(self: DecodeHandoff, event: Any, turn: Any) -> None:
        if self.state is DecodeState.CLOSED:
            self.allocating = 0
        else:
            allocated(self, event, turn)

    return mutated


def nothing(original: Any) -> Any:
    return lambda self, *arguments: None


MUTANTS = [
    Mutant(
        "a prefix is free as soon as its reader's connection ends",
        2,
        scenario("break", num_hit_blocks=1, is_prefix=True),
        replacing(DecodeHandoff, "connection_lost", the_end_of_a_connection_ends_grants),
    ),
    Mutant(
        "a reader whose lease was lost goes on",
        3,
        scenario("revoke prefill", num_hit_blocks=1, is_prefix=True),
        replacing(PrefillHandoff, "lost", nothing_is_lost),
    ),
    Mutant(
        "any generation is the current one",
        1,
        scenario("redeliver", num_prefill=2),
        replacing(DecodeHandoff, "done", any_generation_is_current),
    ),
    Mutant(
        "a second claimant gets the first one's blocks",
        1,
        scenario("redeliver", num_prefill=2),
        replacing(DecodeHandoff, "_allocate", the_same_blocks_for_a_second_claimant),
    ),
    Mutant(
        "blocks are free when their request ends",
        2,
        scenario("cancel"),
        replacing(DecodeHandoff, "settle", loans_end_with_the_hand_off),
    ),
    Mutant(
        "a peer is fenced when its lease ends",
        2,
        scenario("revoke prefill"),
        replacing(PeerLeases, "ended", fenced_when_the_lease_ends),
    ),
    Mutant(
        "a claim in a term that nobody knows yet is granted",
        8,
        scenario("revoke prefill"),
        replacing(PeerLeases, "is_live", lambda original: lambda self, worker_id, term: True),
    ),
    Mutant(
        "a release is said once",
        2,
        scenario("fail", "lose", num_faults=2),
        replacing(PrefillHandoff, "tick", a_release_is_said_once),
    ),
    Mutant(
        "a lost HandoffDone is not said again",
        2,
        scenario("lose", "break", num_faults=2),
        replacing(PrefillHandoff, "tick", done_is_said_once),
    ),
    Mutant(
        "an abandon of something unknown is not answered",
        2,
        scenario("lose", "stop decode", num_faults=2),
        replacing(PrefillLedger, "_release_unknown", nothing),
        is_long=True,
    ),
    Mutant(
        "a loan that arrives after its hand-off has closed is forgotten",
        2,
        scenario("redeliver", num_prefill=2),
        replacing(DecodeHandoff, "allocated", forgotten_once_closed),
        is_long=True,
    ),
    Mutant("a write is posted past the fence", 3, scenario("stop prefill", transport_fence=False)),
    Mutant("a lost lease stops nothing", 3, scenario("revoke prefill"), replacing(PrefillHandoff, "lost", nothing)),
    Mutant(
        "a hand-off has stopped though transfers are in flight",
        4,
        scenario("cancel"),
        replacing(PrefillHandoff, "settle", stopped_with_transfers_in_flight),
    ),
    Mutant(
        "blocks are free once their last write is submitted",
        4,
        ONE,
        replacing(PrefillHandoff, "_submit", freed_with_the_last_write_submitted),
    ),
    Mutant(
        "KV of another kind is taken",
        5,
        scenario(incompatible=True),
        replacing(DecodeLedger, "_claim", any_claim_is_granted),
    ),
    Mutant(
        "what was damaged on its way is taken",
        7,
        scenario("damage", checksums=True),
        replacing(DecodeHandoff, "verified", lambda original: lambda self, ok, turn: original(self, True, turn)),
    ),
    Mutant(
        "blocks are not lent while they are verified",
        7,
        scenario(checksums=True),
        replacing(DecodeHandoff, "settle", only_current_loans_of_open_hand_offs),
    ),
    Mutant("written before the grant", 2, ONE, replacing(PrefillHandoff, "chunk_computed", written_before_the_grant)),
    Mutant(
        "prefill-first: hits that D shares are written",
        2,
        scenario(num_hit_blocks=1, order=HandoffOrder.PREFILL_FIRST, is_paired=True),
        replacing(PrefillHandoff, "_lacking", lambda original: lambda self, chunk, rules: chunk),
    ),
    Mutant(
        "the end of a lease counts in the middle of a copy", 9, scenario("stop prefill", copies=True, has_bar=False)
    ),
    Mutant(
        "a decode worker that discovery never listed is told for ever",
        2,
        scenario("crash decode", knows_decode=False),
        replacing(PeerLeases, "gone_s", lambda original: lambda self, worker_id, unlisted_s: self.ended_s(worker_id)),
    ),
    Mutant(
        "prefill-first: a claim that its own release has overtaken is granted",
        2,
        scenario("late", "break", num_faults=2, order=HandoffOrder.PREFILL_FIRST),
        replacing(DecodeLedger, "_decline", nothing),
    ),
    Mutant("HandoffDone overtakes a write", 3, scenario(num_chunks=2, transport_order=False)),
    Mutant(
        "pull: blocks are free once D knows of them",
        4,
        scenario(direction=KvDirection.PULL),
        replacing(PrefillHandoff, "_hold", freed_with_ready),
    ),
    Mutant(
        "pull: D is told of blocks that the engine still empties",
        4,
        scenario(direction=KvDirection.PULL, keeps=True),
        replacing(PrefillHandoff, "_keep", ready_before_it_is_kept),
    ),
    Mutant(
        "pull: blocks are free while the engine still moves their KV",
        4,
        scenario("cancel", direction=KvDirection.PULL, keeps=True),
        replacing(PrefillHandoff, "_keep", stopped_while_it_is_kept),
    ),
    Mutant(
        "prefill-first: what the engine still moves is written",
        4,
        scenario(order=HandoffOrder.PREFILL_FIRST, is_paired=True, keeps=True),
        replacing(PrefillHandoff, "_move_out", written_while_it_is_moved),
    ),
    Mutant(
        "pull: D abandons what it still reads",
        4,
        scenario("cancel", "late", num_faults=2, direction=KvDirection.PULL),
        replacing(DecodeHandoff, "ready", abandoned_while_read),
    ),
]


# -- sides that are wrong: what they make of a ledger's actions -------------------------------------------------------


def lent_under_any_number(lend: Any) -> Any:
    def mutated(self: IncomingHandoffs, action: de.LendPrefix, core: Any) -> None:
        prefix = action.prefix
        blocks = core.schedules.lend_prefix(action.handoff_id, prefix.token_ids, prefix.cache_salt)
        self.handle(de.LoanAllocated(action.handoff_id, 1, blocks))

    return mutated


def back_before_the_window_is_closed(ask: Any) -> Any:
    def mutated(self: IncomingHandoffs, action: Any) -> None:
        if isinstance(action, de.EndLoan):
            self.ports.engine.post(partial(self._end_loan, action))
        else:
            ask(self, action)

    return mutated


def only_one_loan(resume: Any) -> Any:
    return lambda self, action, core: resume(self, msgspec.structs.replace(action, loan=1), core)


def only_good_news(answer: Any) -> Any:
    """Of an answer that is None if all is well, and of one that is None if it is not."""
    return lambda self, action, error: answer(self, action, None)


def not_told_without_blocks(allocate: Any) -> Any:
    def mutated(self: IncomingHandoffs, action: Any, core: Any) -> None:
        blocks = core.lends.lend_fresh(action.handoff_id, action.loan)
        if blocks is not None:
            self.handle(de.LoanAllocated(action.handoff_id, action.loan, blocks))

    return mutated


def polled_for_claims_only(handled: Any) -> Any:
    def mutated(self: IncomingHandoffs, event: Any) -> None:
        if isinstance(event, de.Claimed):
            handled(self, event)

    return mutated


def what_was_closed_is_not_told(on_step: Any) -> Any:
    return lambda self, step: on_step(self, msgspec.structs.replace(step, closed_handoffs=[]))


def writes_on_their_own(write: Any) -> Any:
    def mutated(self: OutgoingHandoffs, action: Any) -> None:
        submit = self.ports.transfer.submit
        ports = self.ports
        alone = SimpleNamespace(submit=lambda *args, group, **options: submit(*args, **options))
        self.ports = msgspec.structs.replace(ports, transfer=alone)
        write(self, action)
        self.ports = ports

    return mutated


def taken_back_without_an_answer(recall: Any) -> Any:
    """The decode worker goes on at once, as if nothing had begun."""

    def mutated(self: DecodeHandoff, context: Any) -> None:
        holder = self.holder
        recall(self, context)
        if holder is not None:
            self._end_grant(holder)
        self._compute_unless_held(EndReason.RECALLED, context)

    return mutated


def given_back_and_computed(recalled: Any) -> Any:
    """The prefill worker says that it has stopped, and has not."""

    def mutated(self: PrefillHandoff, generation: int, context: Any) -> None:
        if self.state is PrefillState.SENDING:
            self._say_released(context)

    return mutated


def freed_when_it_stops(ask: Any) -> Any:
    def mutated(self: OutgoingHandoffs, action: Any) -> None:
        if isinstance(action, pe.StopComputing):
            ask(self, pe.FreeBlocks(action.handoff_id))
        elif not isinstance(action, pe.FreeBlocks):
            ask(self, action)

    return mutated


def taken_again(pulled: Any) -> Any:
    return lambda self, job, is_expired: self.take(job)


def taken_whatever_came_meanwhile(prepared: Any) -> Any:
    return lambda self, job, term, error: self.take(job)


def told_to_the_engine(ask: Any) -> Any:
    """The end of a prefix's reading."""

    def mutated(self: OutgoingHandoffs, action: Any) -> None:
        if isinstance(action, pe.ReportLoaded):
            self.ports.engine.post(partial(self._kv_loaded, action))
        else:
            ask(self, action)

    return mutated


def its_job_is_kept(settle: Any) -> Any:
    return lambda self, action: self.jobs[action.handoff_id].settled()


def of_a_prefill_that_is_over(chunk: Any) -> Any:
    def mutated(self: OutgoingHandoffs, chunk: Any) -> None:
        (handoff_id,) = (job.request.handoff_id for job in self.jobs.values() if job.name == chunk.request_id)
        self.handle(chunk_computed(handoff_id, chunk))

    return mutated


def read_whoever_waits(is_wanted: Any) -> Any:
    return lambda self, action: True


def opened_without_blocks(open_window: Any) -> Any:
    def mutated(self: IncomingHandoffs, action: Any) -> None:
        key = RemoteKey(str(action.message.handoff_id), action.message.generation)
        self.ports.transfer.open_window(MemoryWindow(key, 0, action.worker_id, (), (), 1, 1))
        open_window(self, action)

    return mutated


PREFIX, PULL = {"num_hit_blocks": 1, "is_prefix": True}, {"direction": KvDirection.PULL}
SIDE_MUTANTS = [
    Mutant(
        "a prefix is lent under a request's number",
        2,
        scenario("forge", num_hit_blocks=1),
        replacing(IncomingHandoffs, "_lend_prefix", lent_under_any_number),
    ),
    Mutant(
        "the engine gets blocks back whose window is open",
        2,
        ONE,
        replacing(IncomingHandoffs, "_ask_engine", back_before_the_window_is_closed),
    ),
    Mutant("a grant is sent before its window is open", 8, ONE, replacing(IncomingHandoffs, "_open_window", nothing)),
    Mutant(
        "a window without blocks is opened, and nothing closes it",
        8,
        scenario(with_blocks=False, **PULL),
        replacing(IncomingHandoffs, "_open_window", opened_without_blocks),
    ),
    Mutant(
        "a request goes on with the first claimant's blocks",
        1,
        scenario("redeliver", num_prefill=2),
        replacing(IncomingHandoffs, "_resume", only_one_loan),
    ),
    Mutant(
        "a read that has failed counts",
        7,
        scenario("fail", **PULL),
        replacing(IncomingHandoffs, "_read_ended", only_good_news),
    ),
    Mutant(
        "damage is not told",
        7,
        scenario("damage", checksums=True),
        replacing(IncomingHandoffs, "_verified", only_good_news),
    ),
    Mutant(
        "a loan that the engine has no blocks for is not answered",
        2,
        scenario("redeliver", "no blocks", num_faults=2, num_prefill=2),
        replacing(IncomingHandoffs, "_allocate", not_told_without_blocks),
    ),
    Mutant(
        "the transfer thread does not hear of the end of grants",
        3,
        ONE,
        replacing(IncomingHandoffs, "handled", polled_for_claims_only),
    ),
    Mutant(
        "a request that was cancelled is expected for ever",
        2,
        scenario("cancel", order=HandoffOrder.PREFILL_FIRST, is_paired=True),
        replacing(IncomingHandoffs, "on_step", what_was_closed_is_not_told),
    ),
    Mutant(
        "pull: a read begins that was decided before the lease was lost",
        4,
        scenario("revoke decode", lags=True, **PULL),
        replacing(IncomingHandoffs, "_is_wanted", read_whoever_waits),
    ),
    Mutant(
        "HandoffDone follows a write that has failed",
        3,
        scenario("fail", num_chunks=2),
        replacing(OutgoingHandoffs, "_write", writes_on_their_own),
    ),
    Mutant(
        "blocks are free when the computation stops",
        4,
        scenario("cancel"),
        replacing(OutgoingHandoffs, "_ask_engine", freed_when_it_stops),
    ),
    Mutant(
        "a late claimant's blocks go back before it has answered",
        4,
        scenario("late", order=HandoffOrder.PREFILL_FIRST, is_paired=True, recalls=True, slow=True),
        replacing(DecodeHandoff, "_recall", taken_back_without_an_answer),
    ),
    Mutant(
        "a claimant gives back what it goes on to compute",
        4,
        scenario("late", order=HandoffOrder.PREFILL_FIRST, is_paired=True, recalls=True, slow=True),
        replacing(PrefillHandoff, "recalled", given_back_and_computed),
    ),
    Mutant(
        "an entry is taken twice",
        2,
        scenario("redeliver", max_computing=2),
        replacing(OutgoingHandoffs, "pulled", taken_again),
    ),
    Mutant(
        "an entry is taken that was delivered again while its grammar was compiled",
        2,
        scenario("redeliver", with_grammar=True),
        replacing(OutgoingHandoffs, "_prepared", taken_whatever_came_meanwhile),
    ),
    Mutant(
        "a prefix that was read is told to the wrong one",
        4,
        scenario(**PREFIX),
        replacing(OutgoingHandoffs, "_ask_engine", told_to_the_engine),
    ),
    Mutant("a job is kept for ever", 2, ONE, replacing(OutgoingHandoffs, "_settle", its_job_is_kept)),
    Mutant(
        "a chunk of a prefill that is over is told",
        4,
        scenario("cancel", lags=True),
        replacing(OutgoingHandoffs, "_chunk", of_a_prefill_that_is_over),
    ),
]
"""What is wrong in a side alone: its ledger is as it should be."""
