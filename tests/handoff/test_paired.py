"""Prefill-first, step by step: both workers hear of a request by themselves, so either may be ahead of the other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.handoff.events import pulled

from kvrelay.core.handoff import HandoffOrder, KvDirection
from kvrelay.core.layout import BlockRun
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, LeaseEnded, RefusalReason, Registered, Tick
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.handoff.messages import (
    HandoffClaim,
    HandoffGrant,
    HandoffProgress,
    HandoffReady,
    HandoffRecall,
    HandoffRefused,
    HandoffReleased,
)
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules

FIRST = HandoffOrder.PREFILL_FIRST
BLOCKS = (0, 1, 2, 3, 4)
CLAIM = de.Claimed(HandoffClaim("h", "p", "same", order=FIRST, term=1), "to p")
OPENED = de.Opened("h", "r", BLOCKS, 2, 20, FIRST, claimant="p")
RELEASED = HandoffReleased("h", "p")


def decode_ledger() -> DecodeLedger:
    ledger = DecodeLedger(DecodeRules(block_size=4, kv_compatibility="same", early_claim_timeout_s=1.0))
    ledger.handle(Registered("p", 10.0, 1), 0.0)
    return ledger


def granted(actions: list[Any]) -> bool:
    return any(isinstance(action, de.SendGrant) for action in actions)


def computed_here(actions: list[Any]) -> list[EndReason]:
    return [action.reason for action in actions if isinstance(action, de.ComputeHere)]


def refused(actions: list[Any]) -> list[str]:
    return [
        a.message.reason for a in actions if isinstance(a, de.SendToPrefill) and isinstance(a.message, HandoffRefused)
    ]


def recalls(actions: list[Any]) -> list[HandoffRecall]:
    messages = [action.message for action in actions if isinstance(action, de.SendToPrefill)]
    return [message for message in messages if isinstance(message, HandoffRecall)]


# -- the decode side --------------------------------------------------------------------------------------------------


def test_nothing_is_queued_and_the_claimant_is_granted() -> None:
    ledger = decode_ledger()
    assert ledger.handle(de.Expected("h", "p"), 0.0) == []
    assert ledger.handle(OPENED, 0.0) == []
    assert granted(ledger.handle(CLAIM, 0.1))


def test_a_claim_waits_for_blocks_for_as_long_as_its_request_does() -> None:
    ledger = decode_ledger()
    assert ledger.handle(CLAIM, 0.0) == []
    ledger.handle(de.Expected("h", "p"), 0.5)
    assert ledger.next_tick_s() is None
    assert ledger.handle(Tick(), 25.0) == []
    assert granted(ledger.handle(OPENED, 25.0))


def test_a_claim_without_a_request_is_refused_and_its_request_computed_here() -> None:
    ledger = decode_ledger()
    ledger.handle(CLAIM, 0.0)
    assert refused(ledger.handle(Tick(), 1.0)) == [RefusalReason.UNKNOWN]
    ledger.handle(de.Expected("h", "p"), 2.0)
    assert computed_here(ledger.handle(OPENED, 2.0)) == [EndReason.RELEASED]
    assert not ledger.handoffs
    assert not ledger.declined


def test_a_late_claimant_is_asked_once_and_what_it_gives_back_is_no_failure() -> None:
    ledger = decode_ledger()
    ledger.handle(de.Expected("h", "p", 3.0), 0.0)
    assert not recalls(ledger.handle(OPENED, 0.0))
    ledger.handle(CLAIM, 0.1)
    assert ledger.next_tick_s() == 3.0
    assert not recalls(ledger.handle(Tick(), 2.9))
    assert recalls(ledger.handle(Tick(), 3.0)) == [HandoffRecall("h", 1)]
    assert not recalls(ledger.handle(Tick(), 6.0))
    (grant,) = ledger.handoffs["h"].grants
    assert not computed_here(ledger.handle(HandoffProgress("h", 1, grant.secret), 7.0)), "it had begun"
    assert computed_here(ledger.handle(RELEASED, 8.0)) == [EndReason.RECALLED]
    assert not ledger.conduct.failures
    assert not ledger.handoffs


def test_a_claimant_that_was_late_to_claim_is_asked_after_its_grant() -> None:
    ledger = decode_ledger()
    ledger.handle(de.Expected("h", "p", 1.0), 0.0)
    ledger.handle(OPENED, 0.0)
    assert not recalls(ledger.handle(Tick(), 1.5)), "nobody holds it"
    ledger.handle(CLAIM, 2.0)
    assert recalls(ledger.handle(Tick(), 2.0)) == [HandoffRecall("h", 1)]


@pytest.mark.parametrize("is_expected", [True, False])
def test_a_claim_that_its_own_release_has_overtaken_is_refused(is_expected: bool) -> None:
    """Over two connections. P has forgotten the hand-off: it would neither use a grant nor hear an abandon."""
    ledger = decode_ledger()
    ledger.handle(RELEASED, 0.0)
    assert refused(ledger.handle(CLAIM, 0.1)) == [RefusalReason.GIVEN_UP]
    if is_expected:
        ledger.handle(de.Expected("h", "p"), 0.2)
    assert computed_here(ledger.handle(OPENED, 0.3)) == [EndReason.RELEASED]
    assert not ledger.handoffs
    assert not ledger.early


@pytest.mark.parametrize("gone", [RELEASED, de.ClaimantGone("h"), de.ClaimantConnectionLost("to p")])
@pytest.mark.parametrize("claimed", [True, False])
def test_a_claimant_that_goes_while_blocks_are_awaited_is_not_waited_for(gone: de.DecodeEvent, claimed: bool) -> None:
    if not claimed and isinstance(gone, de.ClaimantConnectionLost):
        pytest.skip("no connection is known before the claim")
    ledger = decode_ledger()
    ledger.handle(de.Expected("h", "p"), 0.0)
    if claimed:
        ledger.handle(CLAIM, 0.0)
    ledger.handle(gone, 0.1)
    assert computed_here(ledger.handle(OPENED, 5.0)) == [EndReason.RELEASED]
    assert not ledger.handoffs


def test_a_claimant_whose_lease_has_ended_is_not_waited_for() -> None:
    ledger = decode_ledger()
    ledger.handle(LeaseEnded("p"), 0.0)
    ledger.handle(de.Expected("h", "p"), 0.0)
    assert computed_here(ledger.handle(OPENED, 0.1)) == [EndReason.CLAIMANT_LEASE_ENDED]
    ledger.handle(Registered("q", 10.0, 1), 0.0)
    ledger.handle(de.Opened("i", "r", BLOCKS, 2, 20, FIRST, claimant="q"), 0.1)
    assert computed_here(ledger.handle(LeaseEnded("q"), 0.2)) == [EndReason.CLAIMANT_LEASE_ENDED]


def test_the_end_of_a_claimants_lease_ends_no_read_under_way() -> None:
    """Its engine computes the prompt only when nothing writes into its blocks any more."""
    ledger = decode_ledger()
    ledger.handle(msgspec.structs.replace(OPENED, direction=KvDirection.PULL), 0.0)
    (sent,) = ledger.handle(CLAIM, 1.0)
    ready = HandoffReady("h", 1, (7, 8, 9), 5, None, 0.0, secret=sent.message.secret)
    assert [type(action) for action in ledger.handle(de.Offered(ready, "to p"), 2.0)] == [de.Fetch]
    assert ledger.handle(LeaseEnded("p"), 3.0) == []
    assert computed_here(ledger.handle(de.FetchEnded("h", 1, False), 4.0)) == [EndReason.READ_FAILED]


def test_the_frontend_ends_the_wait_for_a_claim_but_no_grant() -> None:
    ledger = decode_ledger()
    ledger.handle(OPENED, 0.0)
    assert computed_here(ledger.handle(de.ClaimantGone("h"), 0.1)) == [EndReason.CLAIMANT_LOST]
    ledger.handle(de.Opened("i", "r", BLOCKS, 2, 20, FIRST, claimant="p"), 0.0)
    assert granted(ledger.handle(de.Claimed(HandoffClaim("i", "p", "same", order=FIRST, term=1), "to p"), 0.1))
    assert ledger.handle(de.ClaimantGone("i"), 0.2) == []
    assert ledger.handle(de.ClaimantGone("unknown"), 0.2) == []


def test_a_request_that_ends_before_it_has_blocks_takes_its_claim_along() -> None:
    ledger = decode_ledger()
    ledger.handle(de.Expected("h", "p"), 0.0)
    ledger.handle(CLAIM, 0.0)
    assert refused(ledger.handle(de.Closed("h"), 0.1)) == [RefusalReason.UNKNOWN]
    assert not ledger.expected
    assert not ledger.early


def test_no_one_else_may_claim_or_give_up() -> None:
    ledger = decode_ledger()
    ledger.handle(Registered("q", 10.0, 1), 0.0)
    ledger.handle(de.Expected("h", "p"), 0.0)
    ledger.handle(de.Claimed(HandoffClaim("h", "q", "same", order=FIRST, term=1), "to q"), 0.0)
    ledger.handle(HandoffReleased("h", "r"), 0.0)
    assert refused(ledger.handle(OPENED, 0.1)) == [RefusalReason.ANOTHER_CLAIMANT]
    assert granted(ledger.handle(CLAIM, 0.2))


# -- the prefill side -------------------------------------------------------------------------------------------------


def prefill_ledger(**rules: float) -> PrefillLedger:
    ledger = PrefillLedger(
        PrefillRules(worker_id="p", block_size=4, kv_compatibility="same", claim_timeout_s=5.0, **rules)
    )
    ledger.handle(Registered("d", 10.0, 1), 0.0)
    ledger.handle(pulled(num_cached=0, order=FIRST), 0.0)
    return ledger


def grant(num_cached_tokens: int, block_ids: tuple[int, ...] = BLOCKS) -> pe.Granted:
    return HandoffGrant("h", 1, block_ids, num_cached_tokens)


def writes(actions: list[Any]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(a.here.block_ids, a.there.block_ids) for a in actions if isinstance(a, pe.Write)]


def test_only_what_the_decode_worker_lacks_is_written() -> None:
    ledger = prefill_ledger()
    ledger.handle(pe.ChunkComputed("h", BlockRun(0, (10, 11))), 0.0)
    assert writes(ledger.handle(grant(12), 0.1)) == []
    last = pe.ChunkComputed("h", BlockRun(2, (12, 13, 14)), pe.FirstToken(7))
    (write,) = [action for action in ledger.handle(last, 0.2) if isinstance(action, pe.Write)]
    assert (write.here, write.there.block_ids) == (BlockRun(3, (13, 14)), (3, 4))
    assert write.done is not None


def test_a_chunk_that_is_computed_after_the_grant_is_trimmed_too() -> None:
    ledger = prefill_ledger()
    ledger.handle(grant(4), 0.1)
    assert writes(ledger.handle(pe.ChunkComputed("h", BlockRun(0, (10, 11))), 0.2)) == [((11,), (1,))]


@pytest.mark.parametrize("num_cached_tokens", [-4, 3, 20, 24])
def test_hits_that_cannot_be_end_the_hand_off(num_cached_tokens: int) -> None:
    ledger = prefill_ledger()
    assert pe.StopComputing("h") in ledger.handle(grant(num_cached_tokens), 0.1)


def test_a_claim_waits_longer_than_decode_first() -> None:
    assert prefill_ledger(paired_claim_timeout_s=40.0).next_tick_s() == 40.0


def test_what_has_been_granted_can_be_given_back() -> None:
    ledger = prefill_ledger()
    assert ledger.handle(pe.Recalled("h", 1), 0.1) == [], "there is no such grant"
    ledger.handle(grant(4), 0.1)
    assert ledger.handle(pe.Recalled("h", 2), 0.2) == []
    actions = ledger.handle(pe.Recalled("h", 1), 0.2)
    assert pe.StopComputing("h") in actions
    assert pe.Settle("h", EndReason.RECALLED) in actions
    (release,) = [action for action in actions if isinstance(action, pe.SendRelease)]
    assert release.message == HandoffReleased("h", "p", EndReason.RECALLED.value)
    assert ledger.counters.num_failed == 0


def test_the_frontend_can_cancel() -> None:
    ledger = prefill_ledger()
    actions = ledger.handle(pe.Cancelled("h"), 0.1)
    assert pe.StopComputing("h") in actions
    assert pe.FreeBlocks("h") in actions
    assert ledger.handle(pe.Cancelled("h"), 0.1) == []
    assert ledger.handle(pe.Cancelled("unknown"), 0.1) == []
