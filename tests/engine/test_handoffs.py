from __future__ import annotations

import pytest

from kvrelay.core.handoff import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffGrant,
    HandoffRefused,
    HandoffReleased,
)
from kvrelay.engine.block_pool import BlockPool, BlockState
from kvrelay.engine.handoffs import Handoff, HandoffLedger

SIZE = 4


def claim(handoff: Handoff, worker_id: str = "p") -> HandoffClaim:
    return HandoffClaim(handoff.handoff_id, worker_id, "same")


def done(handoff: Handoff, generation: int) -> HandoffDone:
    return HandoffDone(handoff.handoff_id, generation, 7, None, 0, 0.0)


class Setting:
    """A pool of 12 with one request: blocks 0-1 are a prefix hit, 2-4 wait for a remote prefill."""

    def __init__(self) -> None:
        self.pool = BlockPool(12, SIZE)
        blocks = self.pool.allocate(5)
        assert blocks == [0, 1, 2, 3, 4]
        self.pool.cache_blocks([0, 1], None, [10, 11], [10, 11], [1] * 8)
        self.ledger = HandoffLedger(self.pool, "d", grant_timeout_s=100.0, max_attempts=2)
        self.handoff = self.ledger.open("r", tuple(blocks), 2, deadline_s=30.0)

    def granted(self, worker_id: str = "p", now_s: float = 0.0) -> HandoffGrant:
        answer = self.ledger.grant(claim(self.handoff, worker_id), now_s)
        assert isinstance(answer, HandoffGrant)
        return answer

    def states(self, *blocks: int) -> set[BlockState]:
        return {self.pool.state(block) for block in blocks}


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_before_a_claim_nobody_may_write_so_blocks_are_free_at_once(setting: Setting) -> None:
    setting.ledger.close(setting.handoff.handoff_id)
    setting.pool.release([0, 1, 2, 3, 4])
    assert setting.pool.num_free == 12
    assert setting.ledger.drain_abandons() == []
    answer = setting.ledger.grant(claim(setting.handoff), 0.0)
    assert isinstance(answer, HandoffRefused)
    assert setting.ledger.counters.num_refused == 1


def test_a_grant_quarantines_what_is_written_and_pins_what_is_read(setting: Setting) -> None:
    grant = setting.granted()
    assert (grant.generation, grant.block_ids, grant.num_cached_tokens) == (1, (0, 1, 2, 3, 4), 8)
    assert setting.states(2, 3, 4) == {BlockState.QUARANTINED}
    assert setting.states(0, 1) == {BlockState.IN_USE}
    assert setting.pool.num_refs(0) == 2, "the prefill worker reads it, whatever becomes of the request"


def test_a_grant_can_be_found_until_it_ends(setting: Setting) -> None:
    assert setting.ledger.find_grant(setting.handoff.handoff_id, 1) is None
    setting.granted("p1")
    grant = setting.ledger.find_grant(setting.handoff.handoff_id, 1)
    assert grant is not None
    assert (grant.claimant, grant.pinned, grant.quarantined) == ("p1", (0, 1), (2, 3, 4))
    setting.ledger.done(done(setting.handoff, 1))
    assert setting.ledger.find_grant(setting.handoff.handoff_id, 1) is None


def test_done_ends_the_quarantine_and_the_hand_off(setting: Setting) -> None:
    setting.granted()
    assert setting.ledger.done(done(setting.handoff, 1)) is setting.handoff
    assert setting.states(0, 1, 2, 3, 4) == {BlockState.IN_USE}
    assert setting.pool.num_refs(0) == 1
    assert (setting.ledger.num_open, setting.ledger.num_grants) == (0, 0)
    assert setting.ledger.done(done(setting.handoff, 1)) is None, "said twice"
    assert setting.ledger.counters.num_stale == 1


def test_a_closed_hand_off_stays_quarantined_until_released(setting: Setting) -> None:
    setting.granted()
    setting.ledger.close(setting.handoff.handoff_id)
    assert setting.ledger.drain_abandons() == [("p", HandoffAbandon(setting.handoff.handoff_id, 1))]
    setting.pool.release([0, 1, 2, 3, 4])
    assert setting.states(2, 3, 4) == {BlockState.QUARANTINED}
    assert setting.states(0, 1) == {BlockState.IN_USE}
    assert setting.pool.num_free == 7
    assert setting.ledger.released(HandoffReleased(setting.handoff.handoff_id, 1, None, "p")) is None
    assert setting.pool.num_free == 12


@pytest.mark.parametrize("worker_id", ["", "q"])
def test_only_the_claimant_can_say_that_it_has_stopped(setting: Setting, worker_id: str) -> None:
    setting.granted("p")
    forged = HandoffReleased(setting.handoff.handoff_id, 1, None, worker_id)
    assert setting.ledger.released(forged) is None
    assert setting.states(2, 3, 4) == {BlockState.QUARANTINED}
    assert (setting.ledger.num_open, setting.ledger.num_grants, setting.ledger.counters.num_stale) == (1, 1, 1)


def test_done_of_a_closed_hand_off_releases_it_as_well(setting: Setting) -> None:
    setting.granted()
    setting.ledger.close(setting.handoff.handoff_id)
    setting.pool.release([0, 1, 2, 3, 4])
    assert setting.ledger.done(done(setting.handoff, 1)) is None
    assert setting.pool.num_free == 12
    assert setting.ledger.counters.num_stale == 1


def test_a_release_by_the_claimant_gives_the_request_back(setting: Setting) -> None:
    setting.granted()
    released = HandoffReleased(setting.handoff.handoff_id, 1, "out of memory", "p")
    assert setting.ledger.released(released) == "r"
    assert setting.ledger.released(released) is None
    assert setting.ledger.counters.num_stale == 1
    assert setting.states(2, 3, 4) == {BlockState.IN_USE}, "the request still has them"


def test_what_the_claimant_gives_up_comes_back_whatever_it_was_granted(setting: Setting) -> None:
    setting.granted()
    given_up = HandoffReleased(setting.handoff.handoff_id, 0, "no answer", "p")
    assert setting.ledger.released(HandoffReleased(setting.handoff.handoff_id, 0, None, "q")) is None
    assert setting.states(2, 3, 4) == {BlockState.QUARANTINED}, "that was somebody else's"
    assert setting.ledger.released(given_up) == "r"
    assert setting.states(2, 3, 4) == {BlockState.IN_USE}
    assert setting.ledger.released(given_up) is None
    assert (setting.ledger.counters.num_released, setting.ledger.counters.num_stale) == (1, 1)


def test_a_claim_that_was_never_heard_of_can_be_given_up(setting: Setting) -> None:
    assert setting.ledger.released(HandoffReleased(setting.handoff.handoff_id, 0, None, "p")) == "r"
    assert isinstance(setting.ledger.grant(claim(setting.handoff), 0.0), HandoffRefused)


def test_giving_up_leaves_what_another_computes(setting: Setting) -> None:
    setting.granted("p1")
    setting.granted("p2")
    assert setting.ledger.released(HandoffReleased(setting.handoff.handoff_id, 0, None, "p1")) is None
    assert setting.states(2, 3, 4) == {BlockState.FREE}
    assert setting.ledger.done(done(setting.handoff, 2)) is setting.handoff


def test_a_claim_that_its_withdrawal_has_overtaken_is_refused(setting: Setting) -> None:
    setting.granted("p1")
    assert setting.ledger.released(HandoffReleased(setting.handoff.handoff_id, 0, None, "p2")) is None
    answer = setting.ledger.grant(claim(setting.handoff, "p2"), 0.0)
    assert isinstance(answer, HandoffRefused)
    assert setting.ledger.done(done(setting.handoff, 1)) is setting.handoff


def test_a_second_claimant_gets_fresh_blocks_and_the_first_is_told_to_stop(setting: Setting) -> None:
    setting.granted("p1")
    second = setting.granted("p2")
    assert second.generation == 2
    assert second.block_ids[:2] == (0, 1)
    assert not set(second.block_ids[2:]) & {2, 3, 4}
    assert setting.ledger.drain_abandons() == [("p1", HandoffAbandon(setting.handoff.handoff_id, 1))]
    assert setting.states(2, 3, 4) == {BlockState.QUARANTINED}
    assert setting.pool.num_refs(2) == 0
    # The first one finishes after all: too late, but it has stopped.
    assert setting.ledger.done(done(setting.handoff, 1)) is None
    assert setting.states(2, 3, 4) == {BlockState.FREE}
    assert setting.ledger.done(done(setting.handoff, 2)) is setting.handoff
    setting.pool.check_integrity()


def test_a_second_claimant_is_refused_without_fresh_blocks(setting: Setting) -> None:
    setting.granted("p1")
    assert setting.pool.allocate(6) is not None
    answer = setting.ledger.grant(claim(setting.handoff, "p2"), 0.0)
    assert isinstance(answer, HandoffRefused)
    assert "no free blocks" in answer.reason
    assert setting.ledger.done(done(setting.handoff, 1)) is setting.handoff


def test_claims_are_bounded(setting: Setting) -> None:
    setting.granted("p1")
    setting.granted("p2")
    answer = setting.ledger.grant(claim(setting.handoff, "p3"), 0.0)
    assert isinstance(answer, HandoffRefused)
    assert setting.ledger.is_exhausted(setting.handoff)


def test_a_fenced_peer_gives_everything_back(setting: Setting) -> None:
    setting.granted("p1")
    setting.granted("p2")
    assert setting.ledger.peer_gone("p1") == [], "its generation is not the current one"
    assert setting.states(2, 3, 4) == {BlockState.FREE}
    assert setting.ledger.peer_gone("p2") == ["r"]
    assert setting.ledger.num_grants == 0
    assert setting.pool.num_quarantined == 0
    assert setting.ledger.counters.num_fenced == 2


def test_deadlines_before_and_after_the_claim(setting: Setting) -> None:
    assert setting.ledger.expired(29.0) == []
    assert setting.ledger.expired(30.0) == [setting.handoff]
    setting.granted(now_s=20.0)
    assert setting.ledger.expired(119.0) == []
    assert setting.ledger.expired(120.0) == [setting.handoff]


def test_messages_about_unknown_hand_offs_are_counted(setting: Setting) -> None:
    assert setting.ledger.done(HandoffDone("other", 1, 7, None, 0, 0.0)) is None
    assert setting.ledger.released(HandoffReleased("other", 1)) is None
    assert setting.ledger.done(done(setting.handoff, 0)) is None
    assert setting.ledger.counters.num_stale == 3
    assert setting.ledger.num_open == 1
