"""Every way in which an output can lie to what is known."""

from __future__ import annotations

import pytest

from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.frontend.cluster.worker_link import MissingTokensError, unseen_part

LOGPROBS = tuple(PositionLogprobs(TokenLogprob(token, -1.0, 1)) for token in (7, 8, 9))


def output(position: int, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("r", (7, 8, 9), finish, LOGPROBS, position=position)


def test_what_follows_is_taken_as_it_is() -> None:
    assert unseen_part(output(4), 4) == output(4)


def test_a_gap_raises_missing_tokens() -> None:
    with pytest.raises(MissingTokensError, match="tokens 3 to 4 of r are missing"):
        unseen_part(output(5), 3)


def test_of_an_overlap_the_rest_is_taken() -> None:
    assert unseen_part(output(4), 6) == TokenOutput("r", (9,), None, LOGPROBS[2:], position=6)


@pytest.mark.parametrize("num_known", [7, 8, 20])
def test_a_duplicate_adds_nothing(num_known: int) -> None:
    assert unseen_part(output(4), num_known) is None


def test_an_end_is_never_dropped() -> None:
    assert unseen_part(output(4, FinishReason.LENGTH), 7) == TokenOutput("r", (), FinishReason.LENGTH, (), position=7)
