"""What becomes of an entry of the prefill queue, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.handoff.scenarios import SCENARIOS

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.handoff import HandoffId, HandoffOrder, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import KvLoad, StepOutput
from kvrelay.errors import InvalidInputError, KvrelayError, ProtocolError, WorkerUnavailableError
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.messages import HandoffClaim
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.marks.phases import Phase
from kvrelay.worker.marking import WorkerMarks
from kvrelay.worker.sides.prefill import Job, OutgoingHandoffs

CONSTRAINED = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a"))


class Marks(WorkerMarks):
    """Which phase each entry was received in."""

    def __init__(self) -> None:
        super().__init__("", is_on=False)
        self.phases: list[Phase] = []
        self.forgotten: list[str] = []

    def received(self, name: str, phase: Phase) -> None:
        self.phases.append(phase)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)


class Counted(Job):
    """How often it was settled, and given back."""

    may_return = True
    num_settled = num_returned = 0

    def settled(self) -> None:
        self.num_settled += 1

    def returned(self) -> None:
        self.num_returned += 1


class Recording(OutgoingHandoffs):
    """A prefill worker p0 that notes the events of its ledger instead of having them handled."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.remembered: list[str] = []
        self.computed_here: list[HandoffId] = []
        self.compiled: list[Callable[[KvrelayError | None], None]] = []
        self.term, self.marks = 1, Marks()
        ports = SimpleNamespace(
            turns=SimpleNamespace(on_loop=lambda call, *arguments: call(*arguments)),
            peers=SimpleNamespace(remember=lambda worker_id, address: self.remembered.append(worker_id)),
            prepare=lambda sampling, then: self.compiled.append(then),
            computes_here=self.computed_here.append,
            term=lambda: self.term,
        )
        rules = SCENARIOS["push, behind, a grammar is compiled"].prefill_rules(0)
        super().__init__(PrefillLedger(rules), ports, model="m", marks=self.marks)  # type: ignore[arg-type]

    def handle(self, event: Any) -> None:
        self.events.append(event)

    def pull(self, owner: str = "d", by: str = "d", is_expired: bool = False, **changes: Any) -> Counted:
        fields = {"model": "m", "sampling": SamplingParams(), **changes}
        request = RemotePrefillRequest(
            HandoffId(owner, 1), by, "r", (1, 2), 0, fields["sampling"], (), 0, model=fields["model"]
        )
        job = Counted(request)
        job.order = changes.get("order", HandoffOrder.DECODE_FIRST)
        self.pulled(job, is_expired=is_expired)
        return job


def test_an_entry_of_another_owner_than_its_hand_off_is_dropped() -> None:
    side = Recording()
    assert side.pull(owner="d", by="e").num_settled == 1
    assert (side.events, side.computed_here, side.remembered) == ([], [], [])


def test_an_entry_of_its_own_decode_side_is_computed_there() -> None:
    side = Recording()
    assert side.pull(owner="p0", by="p0").num_settled == 1
    assert side.computed_here == [HandoffId("p0", 1)]
    assert (side.events, side.remembered) == ([], [])


def test_an_entry_that_was_handled_here_before_is_dropped() -> None:
    side = Recording()
    side.ledger.seen[HandoffId("d", 1)] = None
    assert side.pull().num_settled == 1
    assert not side.events


def test_an_entry_that_comes_too_late_or_is_of_another_model_is_declined() -> None:
    """Its owner is told, and the ledger settles it once the owner knows."""
    for changes, reason in (({"is_expired": True}, EndReason.EXPIRED), ({"model": "other"}, EndReason.WRONG_MODEL)):
        side = Recording()
        assert side.pull(**changes).num_settled == 0
        assert side.events == [pe.Declined(HandoffId("d", 1), "d", reason)]
        assert (list(side.jobs), side.remembered) == ([HandoffId("d", 1)], ["d"])


def test_what_is_begun_is_received_in_the_phase_of_its_order() -> None:
    for order, phase in ((HandoffOrder.DECODE_FIRST, Phase.PULLED), (HandoffOrder.PREFILL_FIRST, Phase.RECEIVED)):
        side = Recording()
        assert side.pull(order=order).num_settled == 0
        assert side.marks.phases == [phase]
        assert [(type(event), event.order, event.may_return) for event in side.events] == [(pe.Pulled, order, True)]


def test_a_constrained_entry_is_begun_once_its_grammar_is_compiled() -> None:
    side = Recording()
    job = side.pull(sampling=CONSTRAINED)
    assert not side.events
    side.compiled[0](None)
    assert [type(event) for event in side.events] == [pe.Pulled]
    assert job.num_settled == 0


def test_what_happens_while_a_grammar_is_compiled_decides_about_its_entry() -> None:
    """It was delivered again and begun meanwhile; its grammar is none; the lease under which it was pulled has gone."""
    side = Recording()
    job = side.pull(sampling=CONSTRAINED)
    side.ledger.seen[HandoffId("d", 1)] = None
    side.compiled[0](None)
    assert (job.num_settled, side.events) == (1, [])
    for error, term, reason in (
        (InvalidInputError("no grammar"), 1, EndReason.ENGINE_REFUSED),
        (None, 2, EndReason.LEASE_LOST),
    ):
        side = Recording()
        job = side.pull(sampling=CONSTRAINED)
        side.term = term
        side.compiled[0](error)
        assert side.events == [pe.Declined(HandoffId("d", 1), "d", reason)]
        assert job.num_settled == 0


@pytest.mark.parametrize("is_returned", [False, True])
def test_what_is_over_is_told_once_and_forgotten(is_returned: bool) -> None:
    """The queue would deliver it again, and a name that stays is a leak; a late step of it is none of ours."""
    side = Recording()
    job, handoff_id = side.pull(), HandoffId("d", 1)
    load = KvLoad(str(handoff_id), 0, (5,))
    side.on_step(StepOutput(kv_loads=[load]))
    side.carry_out(pe.Return(handoff_id) if is_returned else pe.Settle(handoff_id, None))
    assert (job.num_settled, job.num_returned) == (not is_returned, is_returned)
    assert not side.jobs
    assert side.marks.forgotten == [str(handoff_id)]
    side.on_step(StepOutput(kv_loads=[load]))
    assert [type(event) for event in side.events] == [pe.Pulled, pe.LoadRequested]


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (WorkerUnavailableError("no way"), pe.Unreachable(HandoffId("d", 1))),
        (ProtocolError("what it says is no claim"), pe.ClaimFailed(HandoffId("d", 1))),
    ],
)
def test_only_what_no_way_leads_to_may_be_tried_from_elsewhere(error: KvrelayError, event: object) -> None:
    side = Recording()
    side.ports.peers.reach = lambda worker_id, then: then(None, error)
    side.pull()
    claim = HandoffClaim(HandoffId("d", 1), "p0", "same", term=1)
    side.carry_out(pe.SendClaim("d", claim))
    assert side.events[1:] == [event]


def test_kv_is_neither_read_nor_written_between_memories_that_are_not_connected_or_do_not_fit() -> None:
    side, handoff_id, blocks = Recording(), HandoffId("d", 1), BlockRun(0, (1,))
    side.pull()
    side.ledger.handoffs[handoff_id] = SimpleNamespace(decode_block_size=lambda rules: 4)  # type: ignore[assignment]
    later: list[Callable[[], None]] = []
    side.ports.memory = SimpleNamespace(pieces=lambda *_: None)  # type: ignore[assignment]
    side.ports.turns.soon = lambda call, *arguments: later.append(lambda: call(*arguments))  # type: ignore[method-assign]
    side.carry_out(pe.ReadHits(handoff_id, 1, blocks, blocks))
    side.carry_out(pe.Write(handoff_id, 1, blocks, blocks, None))
    assert len(side.events) == 1, "never within the call, whose lock is still held"
    for call in later:
        call()
    assert side.events[1:] == [pe.HitsRead(handoff_id, False), pe.Written(handoff_id, False)]
