"""The request state machine: its table is closed, and illegal moves raise."""

import pytest

from kvrelay.core.status import (
    FINISH_STATUS,
    TRANSITIONS,
    FinishReason,
    Outcome,
    RequestStatus,
    check_transition,
    outcome_of,
)
from kvrelay.errors import IllegalTransitionError


def test_every_status_has_a_row_and_finished_ones_are_final():
    assert set(TRANSITIONS) == set(RequestStatus)
    for status in RequestStatus:
        assert status.is_finished == (not TRANSITIONS[status])


def test_every_unfinished_status_can_reach_an_end():
    for status in RequestStatus:
        if not status.is_finished:
            assert RequestStatus.FINISHED_ABORTED in TRANSITIONS[status]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (RequestStatus.WAITING, RequestStatus.PREFILL_SENDING),
        (RequestStatus.REMOTE_PREFILLING, RequestStatus.PREEMPTED),
        (RequestStatus.FINISHED_STOPPED, RequestStatus.RUNNING),
        (RequestStatus.PREFILL_SENDING, RequestStatus.RUNNING),
    ],
)
def test_moves_that_the_table_lacks_raise(old, new):
    with pytest.raises(IllegalTransitionError, match=old.name):
        check_transition(old, new)


def test_a_disaggregated_request_passes_these_states():
    for old, new in [
        (RequestStatus.WAITING, RequestStatus.REMOTE_PREFILLING),
        (RequestStatus.REMOTE_PREFILLING, RequestStatus.RUNNING),
        (RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH),
    ]:
        check_transition(old, new)


def test_each_finish_reason_has_its_status():
    assert set(FINISH_STATUS) == set(FinishReason)
    assert all(status.is_finished for status in FINISH_STATUS.values())


def test_each_status_of_an_answer_has_its_outcome():
    statuses = {
        Outcome.ANSWERED: ("200",),
        Outcome.REFUSED: ("429",),
        Outcome.FAILED: ("500", "502", "503", "504", "broken"),
        Outcome.INVALID: ("400", "401", "404", "408", "413", "422"),
        Outcome.DISCONNECTED: ("disconnected",),
    }
    assert {outcome: {outcome_of(status) for status in of} for outcome, of in statuses.items()} == {
        outcome: {outcome} for outcome in Outcome
    }
