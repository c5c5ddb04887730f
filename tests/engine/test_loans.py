"""Opening a hand-off: every engine names it, and asks for its prefill, in the same way."""

from __future__ import annotations

from kvrelay.core.handoff import HandoffId
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.loans import HandoffIds, remote_prefill
from kvrelay.engine.request import PrefillMode, Request


def request_of(handoff_number: int = 0) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(), mode=PrefillMode.REMOTE, handoff_number=handoff_number)


def test_a_half_of_a_pair_keeps_its_number_and_uses_up_none() -> None:
    ids = HandoffIds("d")
    found = [ids.of(request_of(number)) for number in (0, 77, 0)]
    assert found == [HandoffId("d", 1), HandoffId("d", 77), HandoffId("d", 2)]


def test_the_prefill_names_its_decode_worker_and_its_blocks() -> None:
    asked = remote_prefill(request_of(), HandoffId("d", 1), SamplingParams(seed=3), (5, 6), 2)
    assert (asked.decode_worker_id, asked.request_id, asked.token_ids) == ("d", "r", (1, 2, 3))
    assert (asked.block_ids, asked.num_cached_tokens, asked.sampling.seed) == ((5, 6), 2, 3)
