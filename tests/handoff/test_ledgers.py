"""Single steps of the two ledgers, where the explorer's invariants do not say what exactly has to follow."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
from tests.handoff.events import pulled

from kvrelay.core.handoff import HandoffId, KvDirection
from kvrelay.core.layout import BlockRun
from kvrelay.errors import IllegalTransitionError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, LeaseEnded, LeaseLost, RefusalReason, Registered, Tick, Value
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import TRANSITIONS as DECODE_TRANSITIONS
from kvrelay.handoff.decode_state import DecodeRules, DecodeState
from kvrelay.handoff.leases import MAX_LEASE_TTL_S, PeerLeases
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
from kvrelay.handoff.prefill_state import TRANSITIONS as PREFILL_TRANSITIONS
from kvrelay.handoff.prefill_state import PrefillRules, PrefillState

BLOCKS = (0, 1, 2, 3, 4)
"""Of a request with blocks of 4 tokens: the first two are prefix hits."""
SECRET = 99


def decode_ledger(**rules: object) -> DecodeLedger:
    """With one open hand-off, "h" of request "r", and a prefill worker "p" in term 1."""
    ledger = DecodeLedger(DecodeRules(block_size=4, kv_compatibility="same", **rules), lambda: SECRET)
    ledger.handle(Registered("p", 10.0, 1), 0.0)
    opened = ledger.handle(de.Opened("h", "r", BLOCKS, 2, 20), 0.0)
    assert opened == [de.Push("h")]
    return ledger


def claim(worker_id: str = "p", term: int = 1, **fields: object) -> de.Claimed:
    return de.Claimed(HandoffClaim("h", worker_id, "same", term=term, **fields), f"to {worker_id}")


def grant_of(actions: list[Value]) -> HandoffGrant:
    (sent,) = [action for action in actions if isinstance(action, de.SendGrant)]
    return sent.message


def refusal_of(actions: list[Value]) -> str:
    (sent,) = [a for a in actions if isinstance(a, de.SendToPrefill) and isinstance(a.message, HandoffRefused)]
    return sent.message.reason


def done(
    handoff_id: str = "h", generation: int = 1, checksums: tuple[int, ...] | None = None, secret: int = SECRET
) -> de.Done:
    return de.Done(HandoffDone(handoff_id, generation, 7, None, 0, 0.0, checksums, secret))


HEARD = de.SendToPrefill("to p", HandoffFetched("h", 1))


# -- the decode side --------------------------------------------------------------------------------------------------


def test_a_grant_names_the_blocks_and_what_is_computed_of_them() -> None:
    grant = grant_of(decode_ledger().handle(claim(), 1.0))
    assert (grant.generation, grant.block_ids, grant.num_cached_tokens) == (1, BLOCKS, 8)
    assert grant.checksums is None


def test_done_resumes_the_request_and_then_ends_the_loan() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    message = done()
    assert ledger.handle(message, 2.0) == [HEARD, de.Resume("h", "r", 1, message.message), de.EndLoan("h", 1)]
    assert not ledger.handoffs
    assert ledger.handle(message, 2.0) == []
    assert ledger.counters.num_stale == 1


def test_messages_for_an_earlier_incarnation_are_stale() -> None:
    """Hand-off ids name the decode worker's id, which is new at every start."""
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    assert ledger.handle(done("h of another start"), 2.0) == []
    assert ledger.handle(HandoffReleased("h of another start", "p"), 2.0) == []
    assert ledger.counters.num_stale == 2
    assert ledger.num_grants == 1


@pytest.mark.parametrize("generation", [0, 2])
def test_done_of_another_generation_changes_nothing(generation: int) -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    assert ledger.handle(done(generation=generation), 2.0) == []
    assert (ledger.num_open, ledger.num_grants, ledger.counters.num_stale) == (1, 1, 1)


def test_only_the_claimant_can_say_that_it_is_done_or_computes() -> None:
    """Others may guess hand-off ids and generations, not the secret of a grant."""
    ledger = decode_ledger()
    assert grant_of(ledger.handle(claim(), 1.0)).secret == SECRET
    for secret in (0, SECRET + 1):
        assert ledger.handle(done(secret=secret), 2.0) == []
        assert ledger.handle(de.Done(done(secret=secret).message, "to q"), 2.0) == []
        assert ledger.handle(HandoffProgress("h", 1, secret), 9.0) == []
    assert ledger.counters.num_stale == 6
    assert de.ComputeHere("h", "r", EndReason.CLAIMANT_SILENT) in ledger.handle(Tick(), 11.0)


def test_grants_have_different_secrets() -> None:
    ledger = DecodeLedger(DecodeRules(block_size=4, kv_compatibility="same"))
    ledger.handle(Registered("p", 10.0, 1), 0.0)
    ledger.handle(Registered("q", 10.0, 1), 0.0)
    ledger.handle(de.Opened("h", "r", BLOCKS, 2, 20), 0.0)
    first = grant_of(ledger.handle(claim(), 1.0))
    ledger.handle(claim("q"), 2.0)
    second = grant_of(ledger.handle(de.LoanAllocated("h", 2, (0, 1, 7, 8, 9)), 3.0))
    assert 0 < first.secret != second.secret > 0


def test_done_is_answered_however_often_it_is_said() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    again = de.Done(done().message, "again to p")
    heard = de.SendToPrefill("again to p", HandoffFetched("h", 1))
    assert ledger.handle(again, 2.0)[0] == heard
    assert ledger.handle(again, 3.0) == [heard]


def test_a_claimant_that_falls_silent_loses_the_request() -> None:
    ledger = decode_ledger(silence_timeout_s=10.0, grant_timeout_s=120.0)
    ledger.handle(claim(), 1.0)
    ledger.handle(HandoffProgress("h", 1, SECRET), 9.0)
    assert ledger.handle(Tick(), 18.9) == []
    assert ledger.next_tick_s() == 19.0
    actions = ledger.handle(Tick(), 19.0)
    assert actions == [
        de.SendToPrefill("to p", HandoffAbandon("h", 1)),
        de.ComputeHere("h", "r", EndReason.CLAIMANT_SILENT),
    ]
    assert ledger.num_grants == 1, "it may write still"


def test_a_claimant_is_not_silent_before_it_knows_of_its_grant() -> None:
    ledger = decode_ledger(silence_timeout_s=10.0)
    ledger.handle(claim(wants_checksums=True), 1.0)
    assert ledger.handle(Tick(), 60.0) == []
    ledger.handle(de.HitsChecksummed("h", 1, (5, 6)), 60.0)
    assert ledger.handle(Tick(), 69.9) == []
    assert ledger.handle(Tick(), 70.0) != []


def test_what_was_granted_stays_lent_until_the_claimant_has_stopped() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    assert ledger.handle(de.Closed("h"), 2.0) == [de.SendToPrefill("to p", HandoffAbandon("h", 1))]
    assert ledger.handle(HandoffReleased("h", "q"), 3.0) == [], "that was another's"
    assert ledger.handle(HandoffReleased("h", "p"), 3.0) == [de.EndLoan("h", 1)]


def test_before_a_grant_the_blocks_are_free_at_once() -> None:
    assert decode_ledger().handle(de.Closed("h"), 2.0) == [de.EndLoan("h", 1)]


def test_a_second_claimant_gets_other_blocks() -> None:
    ledger = decode_ledger()
    ledger.handle(Registered("q", 10.0, 2), 0.0)
    ledger.handle(claim(), 1.0)
    assert ledger.handle(claim("q", 2), 2.0) == [de.AllocateLoan("h", 2)]
    actions = ledger.handle(de.LoanAllocated("h", 2, (0, 1, 7, 8, 9)), 3.0)
    assert actions[0] == de.SendToPrefill("to p", HandoffAbandon("h", 1))
    assert (grant_of(actions).generation, grant_of(actions).block_ids) == (2, (0, 1, 7, 8, 9))
    assert ledger.handle(done(), 4.0) == [HEARD, de.EndLoan("h", 1)], "too late, but it has stopped"
    message = done(generation=2)
    assert ledger.handle(message, 5.0)[1:] == [de.Resume("h", "r", 2, message.message), de.EndLoan("h", 2)]


def test_the_end_of_the_first_claimants_lease_leaves_the_claim_of_the_second() -> None:
    ledger = decode_ledger()
    ledger.handle(Registered("q", 10.0, 2), 0.0)
    ledger.handle(claim(), 1.0)
    ledger.handle(claim("q", 2), 2.0)
    assert ledger.handle(LeaseEnded("p"), 3.0) == []
    assert grant_of(ledger.handle(de.LoanAllocated("h", 2, (0, 1, 7, 8, 9)), 4.0)).generation == 2


def test_without_other_blocks_a_second_claimant_is_refused() -> None:
    ledger = decode_ledger()
    ledger.handle(Registered("q", 10.0, 2), 0.0)
    ledger.handle(claim(), 1.0)
    ledger.handle(claim("q", 2), 2.0)
    assert refusal_of(ledger.handle(de.LoanAllocated("h", 2, None), 3.0)) == RefusalReason.NO_BLOCKS
    assert isinstance(ledger.handle(done(), 4.0)[1], de.Resume)


def test_without_other_blocks_and_without_its_first_claimant_the_request_is_computed_here() -> None:
    """The first claimant released it while the second waited, so no one else would continue it before the deadline."""
    ledger = decode_ledger()
    ledger.handle(Registered("q", 10.0, 2), 0.0)
    ledger.handle(claim(), 1.0)
    ledger.handle(claim("q", 2), 2.0)
    assert ledger.handle(HandoffReleased("h", "p"), 3.0) == []
    actions = ledger.handle(de.LoanAllocated("h", 2, None), 4.0)
    assert refusal_of(actions) == RefusalReason.NO_BLOCKS
    assert actions[1:] == [de.EndLoan("h", 1), de.ComputeHere("h", "r", EndReason.RELEASED)]
    assert not ledger.handoffs


def test_a_repeated_claim_changes_nothing_while_it_waits_for_blocks_or_holds_a_grant() -> None:
    ledger = decode_ledger()
    ledger.handle(Registered("q", 10.0, 2), 0.0)
    ledger.handle(claim(), 1.0)
    assert ledger.handle(claim(), 1.0) == []
    ledger.handle(claim("q", 2), 2.0)
    assert ledger.handle(claim("q", 2), 2.0) == [], "a refusal would make it give up, and then get the grant"
    assert grant_of(ledger.handle(de.LoanAllocated("h", 2, (0, 1, 7, 8, 9)), 3.0)).generation == 2
    assert ledger.handle(claim("q", 2), 3.0) == []
    assert ledger.counters.num_refused == 0


@pytest.mark.parametrize("block_ids", [(0, 1, 7, 8, 9), None])
def test_a_loan_that_arrives_after_the_end_goes_back(block_ids: tuple[int, ...] | None) -> None:
    """The engine lent the blocks before it heard that the request is computed here."""
    ledger = decode_ledger()
    ledger.handle(Registered("q", 10.0, 2), 0.0)
    ledger.handle(claim(), 1.0)
    assert ledger.handle(claim("q", 2), 2.0) == [de.AllocateLoan("h", 2)]
    ledger.handle(HandoffReleased("h", "p"), 3.0)
    assert de.ComputeHere("h", "r", EndReason.RELEASED) in ledger.handle(HandoffReleased("h", "q"), 3.0)
    assert ledger.handle(de.LoanAllocated("h", 2, block_ids), 4.0) == [de.EndLoan("h", 2)] * (block_ids is not None)
    assert not ledger.handoffs


def test_claims_are_bounded() -> None:
    ledger = decode_ledger(max_attempts=1)
    ledger.handle(Registered("q", 10.0, 2), 0.0)
    ledger.handle(claim(), 1.0)
    actions = ledger.handle(claim("q", 2), 2.0)
    assert refusal_of(actions) == RefusalReason.EXHAUSTED
    assert actions[-1] == de.ComputeHere("h", "r", EndReason.CLAIMS_EXHAUSTED)


def test_a_claim_under_a_lease_that_is_not_known_yet_waits_for_it() -> None:
    ledger = decode_ledger()
    assert ledger.handle(claim("q", 2), 1.0) == []
    assert grant_of(ledger.handle(Registered("q", 10.0, 2), 2.0)).generation == 1


def test_a_claim_under_a_lease_that_never_becomes_known_is_computed_here() -> None:
    ledger = decode_ledger()
    ledger.handle(claim("q", 2), 1.0)
    actions = ledger.handle(Tick(), 2.0)
    assert refusal_of(actions) == RefusalReason.TERM_UNKNOWN
    assert actions[-1] == de.ComputeHere("h", "r", EndReason.CLAIMANT_REFUSED)


def test_a_claim_under_an_ended_lease_is_refused_and_computed_here() -> None:
    ledger = decode_ledger()
    ledger.handle(LeaseEnded("p"), 1.0)
    actions = ledger.handle(claim(), 2.0)
    assert refusal_of(actions) == RefusalReason.LEASE_ENDED
    assert actions[-1] == de.ComputeHere("h", "r", EndReason.CLAIMANT_LEASE_ENDED)


def test_the_end_of_a_lease_moves_the_request_and_the_fence_frees_the_blocks() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    actions = ledger.handle(LeaseEnded("p"), 2.0)
    assert actions[-1] == de.ComputeHere("h", "r", EndReason.CLAIMANT_LEASE_ENDED)
    assert ledger.next_tick_s() is not None
    assert not [a for a in ledger.handle(Tick(), 11.9) if isinstance(a, de.EndLoan)]
    assert de.EndLoan("h", 1) in ledger.handle(Tick(), 12.0)


def test_a_claimant_that_registers_in_a_later_term_has_no_grant_left() -> None:
    """It withdrew everything before that, so nothing waits for the end of its old lease."""
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    actions = ledger.handle(Registered("p", 10.0, 2), 2.0)
    assert actions == [de.EndLoan("h", 1), de.ComputeHere("h", "r", EndReason.CLAIMANT_LEASE_ENDED)]
    assert (ledger.num_grants, ledger.counters.num_fenced) == (0, 1)


def test_an_abandon_is_said_again_over_the_claimants_next_connection() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    ledger.handle(de.ClaimantConnectionLost("to p"), 2.0)
    again = de.Claimed(HandoffClaim("another", "p", "same", term=1), "again to p")
    assert de.SendToPrefill("again to p", HandoffAbandon("h", 1)) in ledger.handle(again, 2.5)


def test_a_grant_that_could_not_be_sent_is_no_grant() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    actions = ledger.handle(de.GrantNotSent("h", 1), 1.0)
    assert set(actions) == {de.EndLoan("h", 1), de.ComputeHere("h", "r", EndReason.GRANT_NOT_SENT)}


def test_hits_are_checksummed_before_a_grant_whose_claimant_wants_that() -> None:
    ledger = decode_ledger()
    assert ledger.handle(claim(wants_checksums=True), 1.0) == [de.ChecksumHits("h", 1, (0, 1))]
    assert grant_of(ledger.handle(de.HitsChecksummed("h", 1, (5, 6)), 2.0)).checksums == (5, 6)


def test_a_claimant_that_gives_up_meanwhile_gets_no_grant() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(wants_checksums=True), 1.0)
    actions = ledger.handle(HandoffReleased("h", "p"), 2.0)
    assert actions == [de.ComputeHere("h", "r", EndReason.RELEASED)], "the hits are being read still"
    assert ledger.handle(de.HitsChecksummed("h", 1, (5, 6)), 3.0) == [de.EndLoan("h", 1)]


def test_an_engine_that_cannot_replace_blocks_computes_only_when_the_claimant_has_stopped() -> None:
    ledger = decode_ledger(can_replace_blocks=False)
    ledger.handle(claim(), 1.0)
    assert not [a for a in ledger.handle(LeaseEnded("p"), 2.0) if isinstance(a, de.ComputeHere)]
    actions = ledger.handle(HandoffReleased("h", "p"), 3.0)
    assert actions == [de.EndLoan("h", 1), de.ComputeHere("h", "r", EndReason.CLAIMANT_LEASE_ENDED)]


def test_pull_without_room_waits_for_it() -> None:
    ledger = DecodeLedger(DecodeRules(block_size=4, kv_compatibility="same"), lambda: SECRET)
    ledger.handle(Registered("p", 10.0, 1), 0.0)
    ledger.handle(de.Opened("h", "r", (), 0, 8, direction=KvDirection.PULL), 0.0)
    ledger.handle(claim(), 1.0)
    ready = de.Offered(HandoffReady("h", 1, (8, 9), 7, None, 0.0, secret=SECRET), "to p")
    for generation, secret in ((1, 0), (1, SECRET + 1), (0, SECRET), (2, SECRET)):
        foreign = HandoffReady("h", generation, (6, 7), 7, None, 0.0, secret=secret)
        abandon = de.SendToPrefill("to q", HandoffAbandon("h", generation))
        assert ledger.handle(de.Offered(foreign, "to q"), 1.5) == [abandon], "only the claimant offers KV"
    assert ledger.handle(ready, 2.0) == [de.AllocateLoan("h", 1)]
    assert ledger.handle(ready, 2.5) == [], "P repeats it"
    here, there = BlockRun(0, (3, 4)), BlockRun(0, (8, 9))
    assert ledger.handle(de.LoanAllocated("h", 1, (3, 4)), 3.0) == [de.Fetch("h", 1, "p", here, there, 4)]
    actions = ledger.handle(de.FetchEnded("h", 1, True), 4.0)
    assert actions[-2:] == [de.Resume("h", "r", 1, ready.message), de.EndLoan("h", 1)]


def test_while_one_generation_is_read_the_release_of_an_earlier_one_ends_its_grant() -> None:
    ledger = DecodeLedger(DecodeRules(block_size=4, kv_compatibility="same"), lambda: SECRET)
    for worker_id in ("p", "q"):
        ledger.handle(Registered(worker_id, 10.0, 1), 0.0)
    ledger.handle(de.Opened("h", "r", BLOCKS, 2, 20, direction=KvDirection.PULL), 0.0)
    for worker_id in ("p", "q"):
        ledger.handle(claim(worker_id), 1.0)
    ready = HandoffReady("h", 2, (8, 9, 10), 7, None, 0.0, secret=SECRET)
    assert [type(action) for action in ledger.handle(de.Offered(ready, "to q"), 2.0)] == [de.Fetch]
    ledger.handle(HandoffReleased("h", "p"), 3.0)
    assert [grant.worker_id for grant in ledger.handoffs["h"].grants] == ["q"]
    ledger.handle(HandoffReleased("h", "q"), 3.0)
    assert ledger.num_grants == 1, "its blocks are being read"
    ledger.handle(de.FetchEnded("h", 2, True), 4.0)
    assert not ledger.handoffs


PARAMS = b'{"remote_engine_id": "e"}'


def engine_pull() -> tuple[DecodeLedger, de.Offered]:
    """A granted hand-off between engines that move the KV themselves, and P's message that everything is computed."""
    ledger = DecodeLedger(DecodeRules(block_size=4, kv_compatibility="same"), lambda: SECRET)
    ledger.handle(Registered("p", 10.0, 1), 0.0)
    ledger.handle(de.Opened("h", "r", (), 0, 18, direction=KvDirection.PULL, term=1), 0.0)
    grant = grant_of(ledger.handle(claim(), 1.0))
    assert (grant.direction, grant.block_ids, grant.num_cached_tokens) == (KvDirection.PULL, (), 0)
    message = HandoffReady("h", 1, (), None, None, 0.5, secret=SECRET, kv_transfer_params=PARAMS)
    return ledger, de.Offered(message, "to p")


def test_an_engine_that_moves_kv_itself_reads_by_its_params_without_blocks() -> None:
    ledger, ready = engine_pull()
    assert ledger.handle(ready, 2.0) == [de.Fetch("h", 1, "p", kv_transfer_params=PARAMS)]
    assert ledger.handle(ready, 3.0) == [], "P repeats it until it hears of the end"
    fetched, resume = ledger.handle(de.FetchEnded("h", 1, True), 4.0)
    assert fetched == de.SendToPrefill("to p", HandoffFetched("h", 1))
    assert resume == de.Resume("h", "r", 0, ready.message)
    assert not ledger.handoffs


def test_when_an_engine_has_not_fetched_the_prefill_side_is_told_to_free_it() -> None:
    ledger, ready = engine_pull()
    ledger.handle(ready, 2.0)
    abandon = de.SendToPrefill("to p", HandoffAbandon("h", 1))
    assert ledger.handle(de.FetchEnded("h", 1, False), 3.0) == [
        abandon,
        de.ComputeHere("h", "r", EndReason.READ_FAILED),
    ]
    assert not ledger.handoffs
    assert ledger.handle(ready, 4.0) == [abandon], "the first one was lost"


def test_a_request_that_ends_while_its_engine_fetches_waits_for_the_end_of_that() -> None:
    ledger, ready = engine_pull()
    ledger.handle(ready, 2.0)
    assert ledger.handle(de.Closed("h"), 3.0) == []
    assert ledger.handle(ready, 3.5) == [], "P keeps what is being read"
    assert ledger.handle(de.FetchEnded("h", 1, False), 4.0) == [de.SendToPrefill("to p", HandoffAbandon("h", 1))]
    assert not ledger.handoffs


def test_kv_that_no_request_fetches_is_discarded_unless_it_is_being_fetched() -> None:
    ledger, ready = engine_pull()
    released = HandoffReleased("h", "p", None, PARAMS)
    ledger.handle(ready, 2.0)
    assert ledger.handle(released, 2.5) == []
    ledger.handle(de.FetchEnded("h", 1, False), 3.0)
    assert ledger.handle(released, 4.0) == [de.Discard("h", PARAMS)]


def test_a_prefix_is_lent_once_whatever_is_claimed_while_the_engine_lends_it() -> None:
    ledger = decode_ledger()
    wanted = HandoffClaim("x", "p", "same", term=1, prefix=Prefix((1, 2, 3, 4)))
    assert ledger.handle(de.Claimed(wanted, "to p"), 1.0) == [de.LendPrefix("x", wanted.prefix)]
    ledger.handle(de.ClaimantConnectionLost("to p"), 1.0)
    assert refusal_of(ledger.handle(de.Claimed(wanted, "anew"), 1.0)) == RefusalReason.BUSY
    assert ledger.handle(de.LoanAllocated("x", 1, (7,)), 2.0) == [de.EndLoan("x", 1)]
    assert "x" not in ledger.handoffs


def test_a_prefix_is_lent_for_a_limited_time() -> None:
    """Then its reader is asked to stop; its answer, or its fence, frees the blocks."""
    ledger = decode_ledger(prefix_timeout_s=5.0)
    wanted = HandoffClaim("x", "p", "same", term=1, prefix=Prefix((1, 2, 3, 4)))
    ledger.handle(de.Claimed(wanted, "to p"), 1.0)
    assert grant_of(ledger.handle(de.LoanAllocated("x", 1, (7,)), 2.0)).block_ids == (7,)
    abandon = de.SendToPrefill("to p", HandoffAbandon("x", 1))
    assert abandon not in ledger.handle(Tick(), 6.9)
    assert abandon in ledger.handle(Tick(), 7.0)
    assert ledger.handle(HandoffReleased("x", "p"), 8.0) == [de.EndLoan("x", 1)]


# -- the prefill side -------------------------------------------------------------------------------------------------


def prefill_ledger(**rules: object) -> PrefillLedger:
    """With one hand-off, of 5 blocks of which D holds 2, that is being claimed."""
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same", **rules))
    actions = ledger.handle(pulled(), 0.0)
    sent = HandoffClaim("h", "p", "same", ledger.rules.checksums, term=1, block_size=4)
    assert actions == [pe.Compute("h"), pe.SendClaim("d", sent)]
    return ledger


GRANT = HandoffGrant("h", 1, BLOCKS, 8, secret=SECRET)


def test_nothing_is_touched_before_the_grant_and_everything_after_it() -> None:
    ledger = prefill_ledger()
    load, chunk = BlockRun(0, (20, 21)), BlockRun(2, (22, 23))
    assert ledger.handle(pe.LoadRequested("h", load), 1.0) == []
    assert ledger.handle(pe.ChunkComputed("h", chunk), 1.0) == []
    actions = ledger.handle(GRANT, 2.0)
    read, write = pe.ReadHits("h", 1, load, BlockRun(0, (0, 1))), pe.Write("h", 1, chunk, BlockRun(2, (2, 3)), None)
    assert actions == [read, write]


@pytest.mark.parametrize(
    ("is_abandoned", "is_read", "reason"),
    [(False, True, None), (False, False, EndReason.READ_FAILED), (True, True, EndReason.ABANDONED)],
)
def test_who_reads_a_prefix_hears_why_it_did_not_come(
    is_abandoned: bool, is_read: bool, reason: EndReason | None
) -> None:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    here = BlockRun(0, (20,))
    ledger.handle(pe.PrefixWanted("x", "d", here, Prefix((1, 2, 3, 4)), 1, 5.0), 1.0)
    assert ledger.handle(HandoffGrant("x", 1, (7,), 4), 2.0) == [pe.ReadHits("x", 1, here, BlockRun(0, (7,)))]
    if is_abandoned:
        assert ledger.handle(HandoffAbandon("x", 1), 3.0) == [], "it still writes into our blocks"
    loaded, released = ledger.handle(pe.HitsRead("x", is_read), 4.0)
    assert loaded == pe.ReportLoaded("x", reason is None, int(reason is None), reason)
    assert isinstance(released, pe.SendRelease)


def test_the_release_waits_for_what_a_failed_write_has_left_under_way() -> None:
    ledger = prefill_ledger(late_s=1.0)
    ledger.handle(GRANT, 2.0)
    ledger.handle(pe.ChunkComputed("h", BlockRun(2, (22, 23))), 2.0)
    ledger.handle(pe.ChunkComputed("h", BlockRun(4, (24,))), 2.0)
    assert ledger.handle(pe.Written("h", False), 3.0) == [pe.StopComputing("h"), pe.Computed("h")]
    assert ledger.handle(pe.Written("h", False), 3.5) == [], "both may still land"
    assert ledger.next_tick_s() == 4.5
    assert ledger.handle(Tick(), 4.4) == []
    release = HandoffReleased("h", "p", EndReason.TRANSFER_FAILED)
    assert ledger.handle(Tick(), 4.5) == [
        pe.FreeBlocks("h"),
        pe.Settle("h", EndReason.TRANSFER_FAILED),
        pe.SendRelease("d", release),
    ]


def test_kv_transfer_params_are_offered_until_they_are_used() -> None:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(Registered("d", 10.0, 3), 0.0)
    ledger.handle(pulled(18, 0), 0.0)
    chunk = pe.ChunkComputed("h", BlockRun(0, ()), kv_transfer_params=PARAMS)
    assert ledger.handle(chunk, 1.0) == [pe.Computed("h")]
    grant = HandoffGrant("h", 1, (), 0, direction=KvDirection.PULL, term=3, block_size=4, secret=SECRET)
    (offer,) = ledger.handle(grant, 2.0)
    assert isinstance(offer, pe.SendToDecode)
    assert offer.message == HandoffReady("h", 1, (), None, None, 1.0, secret=SECRET, kv_transfer_params=PARAMS)
    for other in (pe.Recalled("h", 1), pe.DecodeConnectionLost("d"), HandoffFetched("h", 2)):
        assert ledger.handle(other, 3.0) == [], "D may be reading"
    assert ledger.handle(Tick(), 60.0) == [offer]
    assert ledger.handle(HandoffFetched("h", 1), 61.0) == [pe.FreeBlocks("h"), pe.Settle("h", None)]


def test_kv_transfer_params_that_no_one_uses_are_given_up() -> None:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(Registered("d", 10.0, 3), 0.0)
    ledger.handle(pulled(18, 0), 0.0)
    ledger.handle(pe.ChunkComputed("h", BlockRun(0, ()), kv_transfer_params=PARAMS), 1.0)
    ledger.handle(HandoffGrant("h", 1, (), 0, direction=KvDirection.PULL, term=3), 2.0)
    actions = ledger.handle(HandoffAbandon("h", 1), 3.0)
    assert actions[:2] == [pe.StopComputing("h"), pe.FreeBlocks("h")]
    release = HandoffReleased("h", "p", EndReason.ABANDONED, PARAMS)
    assert actions[-1] == pe.SendRelease("d", release), "only D's engine can have it freed"


def test_kv_that_was_computed_for_a_refused_claim_is_given_back_too() -> None:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(pulled(18, 0), 0.0)
    ledger.handle(pe.ChunkComputed("h", BlockRun(0, ()), kv_transfer_params=PARAMS), 1.0)
    actions = ledger.handle(HandoffRefused("h", RefusalReason.UNKNOWN), 2.0)
    assert actions[-1] == pe.SendRelease("d", HandoffReleased("h", "p", EndReason.REFUSED, PARAMS))
    ledger.handle(pe.ReleaseAcknowledged("h"), 3.0)
    assert not ledger.handoffs


def test_kv_that_is_computed_after_the_stop_is_given_back() -> None:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(pulled(18, 0), 0.0)
    actions = ledger.handle(HandoffAbandon("h", 1), 2.0)
    assert actions[-1] == pe.SendRelease("d", HandoffReleased("h", "p", EndReason.ABANDONED))
    actions = ledger.handle(pe.ChunkComputed("h", BlockRun(0, ()), kv_transfer_params=PARAMS), 3.0)
    assert actions == [pe.SendRelease("d", HandoffReleased("h", "p", EndReason.ABANDONED, PARAMS))]


def test_an_engine_that_only_takes_blocks_gets_no_kv_transfer_params() -> None:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(pulled(), 0.0)
    ledger.handle(GRANT, 2.0)
    actions = ledger.handle(pe.ChunkComputed("h", BlockRun(2, ()), kv_transfer_params=PARAMS), 3.0)
    assert pe.StopComputing("h") in actions
    assert not [action for action in actions if isinstance(action, pe.SendToDecode | pe.Write)]


def test_writes_pair_blocks_of_two_sizes_and_spare_the_hits() -> None:
    """D has blocks of 4 tokens, ours have 8; D holds the first 12 of 22 tokens."""
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=8, kv_compatibility="same"))
    ledger.handle(pulled(22, 12), 0.0)
    ledger.handle(HandoffGrant("h", 1, (0, 1, 2, 3, 4, 5), 12, block_size=4), 1.0)
    (read,) = ledger.handle(pe.LoadRequested("h", BlockRun(0, (30,))), 1.0)
    assert read == pe.ReadHits("h", 1, BlockRun(0, (30,)), BlockRun(0, (0, 1)))
    (first,) = ledger.handle(pe.ChunkComputed("h", BlockRun(1, (31,))), 1.0)
    assert first == pe.Write("h", 1, BlockRun(1, (31,)), BlockRun(3, (3,)), None)
    _, last = ledger.handle(pe.ChunkComputed("h", BlockRun(2, (32,)), pe.FirstToken(7)), 1.0)
    assert isinstance(last, pe.Write)
    assert last.there == BlockRun(4, (4, 5))


def test_a_chunk_that_lies_within_a_larger_block_is_written_into_a_part_of_it() -> None:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(pulled(18), 0.0)
    ledger.handle(HandoffGrant("h", 1, (0, 1, 2), 8, block_size=8), 1.0)
    (write,) = ledger.handle(pe.ChunkComputed("h", BlockRun(2, (42,))), 1.0)
    assert write == pe.Write("h", 1, BlockRun(2, (42,)), BlockRun(1, (1,)), None)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 16)])
def test_checksums_cover_what_the_decode_worker_lacks(ours: int, theirs: int) -> None:
    """Units of 16 tokens, whatever the blocks; D holds 32 of 75 tokens."""
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=ours, kv_compatibility="same", checksums=True))
    num_blocks, granted = -(-75 // ours), tuple(range(-(-75 // theirs)))
    ledger.handle(pulled(75, 32), 0.0)
    grant = HandoffGrant("h", 1, granted, 32, checksums=(10, 11), block_size=theirs)
    ledger.handle(grant, 1.0)
    load = BlockRun(0, tuple(range(32 // ours)))
    ledger.handle(pe.LoadRequested("h", load), 1.0)
    assert ledger.handle(pe.HitsRead("h", True), 1.0) == [pe.VerifyHits("h", load, (10, 11))]
    ledger.handle(pe.HitsVerified("h", True), 1.0)
    rest = BlockRun(32 // ours, tuple(range(32 // ours, num_blocks)))
    ledger.handle(pe.ChunkComputed("h", rest, pe.FirstToken(7)), 1.0)
    of_blocks = tuple(range(20, 20 + len(rest.block_ids) * ours // 16))
    (write,) = ledger.handle(pe.ChunkChecksummed("h", of_blocks), 1.0)
    assert isinstance(write, pe.Write)
    assert write.done is not None
    assert write.done.checksums == (20, 21, 22)


def test_the_decode_side_verifies_the_units_that_hold_tokens() -> None:
    ledger = DecodeLedger(DecodeRules(block_size=32, kv_compatibility="same", checksums=True), lambda: SECRET)
    ledger.handle(Registered("p", 10.0, 1), 0.0)
    ledger.handle(de.Opened("h", "r", (0, 1, 2), 1, 75), 0.0)
    ledger.handle(claim(block_size=16), 1.0)
    ledger.handle(de.HitsChecksummed("h", 1, (10, 11)), 1.0)
    done = HandoffDone("h", 1, 7, None, 0, 0.0, checksums=(20, 21, 22), secret=SECRET)
    assert ledger.handle(de.Done(done), 2.0) == [HEARD, de.Verify("h", 1, "p", (1, 2), (20, 21, 22), 3)]


@pytest.mark.parametrize(("theirs", "kept"), [(4, (8, 9, 10)), (16, (8, 9))])
def test_pull_reads_from_blocks_of_another_size(theirs: int, kept: tuple[int, ...]) -> None:
    """D holds 8 of 18 tokens in blocks of 8."""
    for block_ids in (kept, (*kept, 20)):
        ledger = DecodeLedger(DecodeRules(block_size=8, kv_compatibility="same"), lambda: SECRET)
        ledger.handle(Registered("p", 10.0, 1), 0.0)
        ledger.handle(de.Opened("h", "r", (0, 1, 2), 1, 18, direction=KvDirection.PULL), 0.0)
        ledger.handle(claim(block_size=theirs), 1.0)
        actions = ledger.handle(de.Offered(HandoffReady("h", 1, block_ids, 7, None, 0.0, secret=SECRET), "to p"), 2.0)
        if block_ids == kept:
            assert actions == [de.Fetch("h", 1, "p", BlockRun(1, (1, 2)), BlockRun(8 // theirs, kept), theirs)]
        else:
            assert not any(isinstance(action, de.Fetch) for action in actions)


def test_blocks_are_free_when_the_last_write_has_ended() -> None:
    ledger = prefill_ledger()
    ledger.handle(GRANT, 1.0)
    computed, written = ledger.handle(pe.ChunkComputed("h", BlockRun(2, (22, 23, 24)), pe.FirstToken(7)), 2.0)
    assert computed == pe.Computed("h")
    assert isinstance(written, pe.Write)
    assert written.done == HandoffDone("h", 1, 7, None, 0, 2.0, secret=SECRET)
    assert ledger.handle(pe.Written("h", True), 3.0) == [pe.FreeBlocks("h"), pe.Settle("h", None)]
    assert ledger.num_active == 0


@pytest.mark.parametrize("granted_s", [0.0, 9.0], ids=["granted before", "granted after"])
def test_a_prefill_took_as_long_as_the_engine_was_at_it(granted_s: float) -> None:
    """Two are pulled at once and one later; the engine computes them one after the other."""
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    events: list[tuple[float, Any]] = []
    for name, pulled_s, computed_s in (("a", 0.0, 3.0), ("b", 0.0, 5.0), ("c", 6.0, 7.0)):
        grant = HandoffGrant(name, 1, (0,), 0, secret=SECRET)
        chunk = pe.ChunkComputed(name, BlockRun(0, (len(events),)), pe.FirstToken(7))
        times = pulled_s, max(pulled_s, granted_s), computed_s
        events += zip(times, (pulled(4, 0, name), grant, chunk))
    actions = [action for time_s, event in sorted(events, key=itemgetter(0)) for action in ledger.handle(event, time_s)]
    sent = [action.done for action in actions if isinstance(action, pe.Write)]
    assert [(done.handoff_id, done.prefill_s) for done in sent if done is not None] == [("a", 3), ("b", 2), ("c", 1)]


def sent_ledger() -> PrefillLedger:
    """Everything is computed; the last write is under way."""
    ledger = prefill_ledger()
    ledger.handle(GRANT, 1.0)
    ledger.handle(pe.ChunkComputed("h", BlockRun(2, (22, 23, 24)), pe.FirstToken(7)), 2.0)
    return ledger


def test_done_is_said_again_until_it_is_heard() -> None:
    """The notification may be lost, and only P can connect to D."""
    ledger = sent_ledger()
    ledger.handle(pe.Written("h", True), 3.0)
    assert ledger.handle(Tick(), 3.9) == []
    said = [pe.SendToDecode("d", HandoffDone("h", 1, 7, None, 0, 2.0, secret=SECRET))]
    assert ledger.handle(Tick(), 4.0) == said
    assert ledger.handle(Tick(), 5.0) == said
    ledger.handle(HandoffFetched("h", 1), 5.1)
    assert not ledger.handoffs


def test_done_may_be_heard_before_its_write_is_known_to_have_ended() -> None:
    ledger = sent_ledger()
    assert ledger.handle(HandoffFetched("h", 1), 2.5) == []
    assert ledger.handle(pe.Written("h", True), 3.0) == [pe.FreeBlocks("h"), pe.Settle("h", None)]
    assert not ledger.handoffs


def test_an_abandon_that_crosses_done_is_answered_until_that_is_heard() -> None:
    ledger = sent_ledger()
    ledger.handle(pe.Written("h", True), 3.0)
    (said,) = ledger.handle(HandoffAbandon("h", 1), 3.1)
    assert isinstance(said, pe.SendRelease)
    assert ledger.num_in(PrefillState.RELEASING) == 1
    ledger.handle(pe.ReleaseAcknowledged("h"), 3.2)
    assert not ledger.handoffs


def test_done_for_a_decode_worker_that_has_been_gone_for_long_is_forgotten() -> None:
    ledger = sent_ledger()
    ledger.handle(Registered("d", 10.0, 1), 2.5)
    ledger.handle(pe.Written("h", True), 3.0)
    ledger.handle(LeaseEnded("d"), 4.0)
    ledger.handle(Tick(), 33.0)
    assert ledger.handoffs
    ledger.handle(Tick(), 34.0)
    assert not ledger.handoffs


def test_a_decode_worker_hears_that_its_prefill_is_being_computed() -> None:
    ledger = prefill_ledger(progress_s=2.0)
    ledger.handle(GRANT, 1.0)
    said = [pe.SendToDecode("d", HandoffProgress("h", 1, SECRET))]
    assert ledger.handle(Tick(), 2.9) == []
    assert ledger.handle(Tick(), 3.0) == said
    assert ledger.handle(Tick(), 5.0) == said


def test_a_refused_claim_costs_a_prefill_and_needs_no_release() -> None:
    ledger = prefill_ledger()
    actions = ledger.handle(HandoffRefused("h", ""), 1.0)
    freed = [pe.FreeBlocks("h"), pe.Settle("h", EndReason.REFUSED)]
    assert actions == [pe.StopComputing("h"), pe.Computed("h"), *freed]
    assert ledger.counters.num_refused == 1
    assert ledger.counters.ends == {EndReason.REFUSED: 1}


@pytest.mark.parametrize(
    "grant",
    [
        HandoffGrant("h", 1, BLOCKS[:-1], 8),
        HandoffGrant("h", 1, (*BLOCKS, 5), 8),
        HandoffGrant("h", 1, (-1, *BLOCKS[1:]), 8),
        HandoffGrant("h", 1, (0, 0, 2, 3, 4), 8),
        HandoffGrant("h", 1, (2**80, 1, 2, 3, 4), 8),
        HandoffGrant("h", 1, BLOCKS, 4),
    ],
    ids=["few", "many", "negative", "twice", "huge", "other hits"],
)
def test_a_grant_that_does_not_fit_is_given_up(grant: HandoffGrant) -> None:
    ledger = prefill_ledger()
    released = ledger.handle(grant, 1.0)[-1]
    assert released == pe.SendRelease("d", HandoffReleased("h", "p", EndReason.BAD_GRANT))


def returnable_ledger(*, may_return: bool = True) -> PrefillLedger:
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(pulled(may_return=may_return), 0.0)
    return ledger


def test_an_entry_whose_decode_worker_cannot_be_reached_goes_back_to_the_queue() -> None:
    """Nothing was claimed, so there is nothing to release; and this worker may try again later."""
    ledger = returnable_ledger()
    actions = ledger.handle(pe.Unreachable("h"), 1.0)
    assert actions == [pe.StopComputing("h"), pe.Computed("h"), pe.FreeBlocks("h"), pe.Return("h")]
    assert (ledger.counters.num_returned, ledger.counters.num_failed) == (1, 0)
    assert ledger.num_in(PrefillState.RELEASING) == 0
    again = ledger.handle(pulled(), 2.0)
    assert [type(action) for action in again] == [pe.Compute, pe.SendClaim]


def test_an_entry_that_may_not_return_again_is_released() -> None:
    ledger = returnable_ledger(may_return=False)
    actions = ledger.handle(pe.Unreachable("h"), 1.0)
    released = pe.SendRelease("d", HandoffReleased("h", "p", EndReason.CLAIM_FAILED))
    assert actions[-2:] == [pe.Settle("h", EndReason.CLAIM_FAILED), released]
    assert (ledger.counters.num_returned, ledger.counters.num_failed) == (0, 1)


def test_no_entry_of_a_decode_worker_without_a_lease_goes_back() -> None:
    """No one can reach it: its clients are served elsewhere."""
    ledger = PrefillLedger(PrefillRules(worker_id="p", block_size=4, kv_compatibility="same"))
    ledger.handle(LeaseEnded("d"), 0.0)
    ledger.handle(pulled(may_return=True), 1.0)
    actions = ledger.handle(pe.Unreachable("h"), 2.0)
    assert pe.Settle("h", EndReason.CLAIM_FAILED) in actions


def test_a_claim_that_was_sent_keeps_the_entry() -> None:
    ledger = returnable_ledger()
    assert pe.Settle("h", EndReason.CLAIM_FAILED) in ledger.handle(pe.ClaimFailed("h"), 1.0)


def test_a_release_is_said_until_it_is_heard() -> None:
    ledger = prefill_ledger(claim_timeout_s=1.0)
    said = ledger.handle(Tick(), 1.0)[-1]
    assert isinstance(said, pe.SendRelease)
    assert ledger.handle(Tick(), 1.01) == []
    assert ledger.handle(Tick(), 1.06) == [said]
    assert ledger.handle(Tick(), 1.17) == [said]
    ledger.handle(pe.ReleaseAcknowledged("h"), 1.2)
    assert ledger.handle(Tick(), 9.0) == []
    assert (ledger.num_in(PrefillState.RELEASING), ledger.next_tick_s()) == (0, None)


def test_releases_for_a_decode_worker_that_has_been_gone_for_long_are_forgotten() -> None:
    ledger = prefill_ledger(claim_timeout_s=1.0, gone_for_s=5.0)
    ledger.handle(LeaseEnded("d"), 2.0)
    assert ledger.num_in(PrefillState.RELEASING) == 1
    ledger.handle(Tick(), 6.9)
    assert ledger.num_in(PrefillState.RELEASING) == 1
    ledger.handle(Tick(), 9.0)
    assert not ledger.handoffs


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_decode_worker_that_discovery_never_listed_is_told_for_a_limited_time(is_sent: bool) -> None:
    ledger = PrefillLedger(PrefillRules(4, "same", worker_id="p", gone_for_s=30.0))
    handoff_id = HandoffId("d", 1)
    ledger.handle(pulled(4, 0, handoff_id), 0.0)
    if is_sent:
        ledger.handle(HandoffGrant(handoff_id, 1, (7,), 0), 0.0)
        ledger.handle(pe.ChunkComputed(handoff_id, BlockRun(0, (5,)), pe.FirstToken(7)), 10.0)
        ledger.handle(pe.Written(handoff_id, True), 10.0)
    else:
        ledger.handle(pe.Cancelled(handoff_id), 10.0)
    repeated = pe.SendToDecode if is_sent else pe.SendRelease
    assert any(isinstance(action, repeated) for action in ledger.handle(Tick(), 39.9))
    assert ledger.handle(Tick(), 45.0) == []
    assert not ledger.handoffs
    answer = ledger.handle(HandoffAbandon(handoff_id, 1), 50.0)
    assert [type(action) for action in answer] == [pe.SendRelease], "it may ask later"


def test_an_abandon_that_overtakes_its_grant_counts() -> None:
    ledger = prefill_ledger()
    ledger.handle(HandoffAbandon("h", 1), 1.0)
    assert ledger.handle(GRANT, 1.0) == []
    assert ledger.counters.num_abandoned == 1


def test_an_abandon_of_something_unknown_is_answered() -> None:
    (said,) = prefill_ledger().handle(HandoffAbandon(HandoffId("d", 3), 3), 1.0)
    assert isinstance(said, pe.SendRelease)
    assert (said.worker_id, said.message.handoff_id) == ("d", HandoffId("d", 3))


def test_an_entry_that_is_delivered_again_is_settled_only() -> None:
    ledger = prefill_ledger()
    assert [type(a) for a in ledger.handle(pulled(), 1.0)] == [pe.Settle]


def test_what_could_not_be_read_is_computed() -> None:
    ledger = prefill_ledger()
    ledger.handle(GRANT, 1.0)
    ledger.handle(pe.LoadRequested("h", BlockRun(0, (20, 21))), 1.0)
    assert ledger.handle(pe.HitsRead("h", False), 2.0) == [pe.ReportLoaded("h", False)]


def test_a_lost_lease_stops_everything_and_waits_for_what_moves() -> None:
    ledger = prefill_ledger()
    ledger.handle(GRANT, 1.0)
    ledger.handle(pe.ChunkComputed("h", BlockRun(2, (22,))), 1.0)
    assert ledger.handle(LeaseLost(), 2.0) == [pe.StopComputing("h"), pe.Computed("h")]
    actions = ledger.handle(pe.Written("h", False), 3.0)
    assert actions[:2] == [pe.FreeBlocks("h"), pe.Settle("h", EndReason.LEASE_LOST)]
    assert isinstance(actions[2], pe.SendRelease)


# -- leases and tables ------------------------------------------------------------------------------------------------


def test_an_unknown_time_to_live_is_the_longest() -> None:
    leases = PeerLeases()
    leases.ended("p", 5.0)
    assert leases.take_fenced(5.0 + MAX_LEASE_TTL_S - 1) == []
    assert leases.take_fenced(5.0 + MAX_LEASE_TTL_S) == ["p"]


def test_registering_again_in_the_same_term_fences_nothing() -> None:
    leases = PeerLeases()
    leases.registered("p", 10.0, 1)
    assert not leases.registered("p", 10.0, 1)
    assert leases.registered("p", 10.0, 2)


def test_an_entry_overwritten_with_a_shorter_time_does_not_fence_sooner() -> None:
    leases = PeerLeases()
    leases.registered("p", 100.0, 1)
    leases.registered("p", 0.1, 1)
    leases.ended("p", 0.0)
    assert leases.take_fenced(99.0) == []
    leases.ended("p", 50.0)
    assert leases.take_fenced(100.0) == ["p"], "the second end is no news"


def test_a_worker_that_registers_in_a_later_term_is_fenced_at_once() -> None:
    leases = PeerLeases()
    leases.registered("p", 100.0, 1)
    leases.ended("p", 0.0)
    assert not leases.registered("p", 100.0, 1), "its lease has put back what it had"
    assert leases.registered("p", 100.0, 2)
    assert leases.next_fence_s() is None
    assert leases.is_over("p", 1)
    assert leases.is_live("p", 2)


def test_a_claimant_that_reconnects_before_its_old_connection_is_known_as_lost_leaves_nobody_waiting() -> None:
    ledger = decode_ledger()
    ledger.handle(claim(), 1.0)
    ledger.handle(de.Opened("h2", "r2", (5, 6), 0, 8), 1.5)
    ledger.handle(de.Claimed(HandoffClaim("h2", "p", "same", term=1), "again to p"), 2.0)
    actions = ledger.handle(de.ClaimantConnectionLost("to p"), 3.0)
    assert [a.handoff_id for a in actions if isinstance(a, de.ComputeHere)] == ["h"]
    assert ledger.num_grants == 2


def test_a_move_that_the_table_does_not_have_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = prefill_ledger()
    monkeypatch.setitem(PREFILL_TRANSITIONS, ledger.handoffs["h"].state, frozenset())
    with pytest.raises(IllegalTransitionError):
        ledger.handle(GRANT, 2.0)
    assert set(PREFILL_TRANSITIONS) == set(PrefillState)
    assert set(DECODE_TRANSITIONS) == set(DecodeState)
