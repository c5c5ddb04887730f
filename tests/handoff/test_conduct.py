"""What a prefill worker with a valid lease can delay: twice, and then what it holds and claims is computed here."""

from __future__ import annotations

import pytest

from kvrelay.core.handoff import HandoffOrder
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.base import EndReason, RefusalReason, Registered, Tick
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.handoff.messages import HandoffClaim, HandoffDone, HandoffProgress, HandoffRefused, HandoffReleased

SECRET = 99
RULES = DecodeRules(block_size=4, kv_compatibility="same", silence_timeout_s=10.0, grant_timeout_s=20.0)


class Requests:
    """A ledger whose requests are opened and claimed by name. Both workers have leases."""

    def __init__(self) -> None:
        self.ledger = DecodeLedger(RULES, lambda: SECRET)
        for worker_id in ("bad", "good"):
            self.ledger.handle(Registered(worker_id, 10.0, 1), 0.0)
        self.here: dict[str, EndReason] = {}
        """Requests that are computed here, and why."""
        self.refused: dict[str, str] = {}

    def handle(self, event: de.DecodeEvent, now_s: float) -> None:
        for action in self.ledger.handle(event, now_s):
            if isinstance(action, de.ComputeHere):
                self.here[action.handoff_id] = action.reason
            if isinstance(action, de.SendToPrefill) and isinstance(action.message, HandoffRefused):
                self.refused[action.message.handoff_id] = action.message.reason

    def open(self, name: str, now_s: float) -> None:
        self.handle(de.Opened(name, name, (0, 1), 0, 8), now_s)

    def open_pair(self, name: str, now_s: float, worker_id: str = "bad") -> None:
        """The other half is that worker's."""
        order = HandoffOrder.PREFILL_FIRST
        self.handle(de.Opened(name, name, (0, 1), 0, 8, order, claimant=worker_id), now_s)

    def claim(self, name: str, now_s: float, worker_id: str = "bad") -> None:
        self.handle(de.Claimed(HandoffClaim(name, worker_id, "same", term=1), f"to {worker_id}"), now_s)

    def begin(self, name: str, now_s: float, worker_id: str = "bad") -> None:
        self.open(name, now_s)
        self.claim(name, now_s, worker_id)

    def done(self, name: str, now_s: float) -> None:
        self.handle(de.Done(HandoffDone(name, 1, 7, None, 0, 0.0, None, SECRET)), now_s)

    def progress(self, name: str, now_s: float) -> None:
        self.handle(HandoffProgress(name, 1, SECRET), now_s)


def silent(requests: Requests, name: str, now_s: float) -> None:
    requests.handle(Tick(), now_s + 10.0)


def never_done(requests: Requests, name: str, now_s: float) -> None:
    for second in range(1, 20):
        requests.progress(name, now_s + second)
    requests.handle(Tick(), now_s + 20.0)


def released_late(requests: Requests, name: str, now_s: float) -> None:
    requests.handle(HandoffReleased(name, "bad"), now_s + 9.0)


def disconnected_late(requests: Requests, name: str, now_s: float) -> None:
    requests.handle(de.ClaimantConnectionLost("to bad"), now_s + 9.0)


each_failure = pytest.mark.parametrize("fail", [silent, never_done, released_late, disconnected_late])


@each_failure
def test_after_a_second_failure_a_worker_is_avoided_at_once(fail) -> None:
    requests = Requests()
    for number, now_s in enumerate((0.0, 30.0)):
        requests.begin(f"h{number}", now_s)
        assert f"h{number}" not in requests.refused
        fail(requests, f"h{number}", now_s)
        assert f"h{number}" in requests.here
    requests.begin("h2", 50.0)
    assert requests.refused["h2"] == RefusalReason.AVOIDED
    assert requests.here["h2"] == EndReason.CLAIMANT_AVOIDED
    requests.begin("h3", 50.0, "good")
    assert "h3" not in requests.here


@each_failure
def test_everything_else_that_it_holds_is_computed_here_at_the_same_moment(fail) -> None:
    requests = Requests()
    requests.begin("h0", 0.0)
    fail(requests, "h0", 0.0)
    requests.begin("h1", 30.0)
    for name in ("h2", "h3"):
        requests.begin(name, 38.9)
    requests.begin("fine", 38.9, "good")
    for second in (39, 44, 48):
        for name in ("h2", "h3", "fine"):
            requests.progress(name, second)
    fail(requests, "h1", 30.0)
    assert requests.here.keys() == {"h0", "h1", "h2", "h3"}


def test_a_pair_does_not_wait_for_its_avoided_half() -> None:
    """A frontend does not know that the decode worker avoids it, and its claim comes only when it has begun."""
    requests = Requests()
    for number, now_s in enumerate((0.0, 20.0)):
        requests.begin(f"h{number}", now_s)
        requests.open_pair(f"waits{number}", now_s + 5.0)
        assert f"waits{number}" not in requests.here
        silent(requests, f"h{number}", now_s)
    assert requests.here["waits1"] == EndReason.CLAIMANT_AVOIDED
    requests.open_pair("new", 31.0)
    requests.open_pair("fine", 31.0, "good")
    assert requests.here["new"] == EndReason.CLAIMANT_AVOIDED
    assert "fine" not in requests.here


def test_an_avoided_half_that_claims_before_the_request_has_blocks_is_refused_at_once() -> None:
    requests = Requests()
    for number, now_s in enumerate((0.0, 20.0)):
        requests.begin(f"h{number}", now_s)
        silent(requests, f"h{number}", now_s)
    requests.handle(de.Expected("early", "bad"), 31.0)
    claim = HandoffClaim("early", "bad", "same", term=1, order=HandoffOrder.PREFILL_FIRST)
    requests.handle(de.Claimed(claim, "to bad"), 31.0)
    assert requests.refused["early"] == RefusalReason.AVOIDED
    requests.open_pair("early", 65.0)
    assert "early" in requests.here, "it has been told so, and claims no more"


def test_done_makes_up_for_a_failure() -> None:
    requests = Requests()
    for number, now_s in enumerate((0.0, 30.0, 60.0)):
        requests.begin(f"slow{number}", now_s)
        silent(requests, f"slow{number}", now_s)
        requests.begin(f"well{number}", now_s + 11.0)
        requests.done(f"well{number}", now_s + 12.0)
    assert requests.refused == {}


def test_a_quick_release_is_no_failure() -> None:
    """Else a client whose requests no engine takes could have an honest worker avoided."""
    requests = Requests()
    for number in range(5):
        requests.begin(f"h{number}", number)
        requests.handle(HandoffReleased(f"h{number}", "bad"), number + 0.5)
    assert requests.here.keys() == {f"h{number}" for number in range(5)}
    assert requests.refused == {}


def test_an_avoided_worker_gets_another_chance_later_and_one_only() -> None:
    requests = Requests()
    for number, now_s in enumerate((0.0, 20.0)):
        requests.begin(f"h{number}", now_s)
        silent(requests, f"h{number}", now_s)
    requests.begin("later", 30.0 + RULES.avoid_s)
    assert "later" not in requests.refused
    silent(requests, "later", 30.0 + RULES.avoid_s)
    requests.begin("again", 41.0 + RULES.avoid_s)
    assert requests.refused["again"] == RefusalReason.AVOIDED


def test_an_entry_that_was_pulled_and_is_not_claimed_is_computed_here_a_second_after_a_later_one_was_claimed() -> None:
    """The queue is in order: whoever pulled it keeps silent."""
    requests = Requests()
    requests.open("pulled", 0.0)
    requests.open("claimed", 0.1)
    requests.open("queued", 0.2)
    requests.claim("claimed", 5.0, "good")
    requests.handle(Tick(), 5.9)
    assert requests.here == {}
    assert requests.ledger.next_tick_s() == 6.0
    requests.handle(Tick(), 6.0)
    assert requests.here == {"pulled": EndReason.OVERTAKEN}


def test_a_claim_within_that_second_is_granted_as_ever() -> None:
    requests = Requests()
    requests.open("pulled", 0.0)
    requests.begin("claimed", 0.1, "good")
    requests.claim("pulled", 1.0, "good")
    requests.handle(Tick(), 5.0)
    assert requests.here == requests.refused == {}
