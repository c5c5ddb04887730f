"""A client says that its turn comes soon: what a tier has of the prompt is in the pool before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.tiers.conftest import PrivateMemory, host_bytes
from tests.tiers.engines import TieredEngine, expected

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason, RequestStatus
from kvrelay.engine.request import Request
from kvrelay.errors import InvalidInputError
from kvrelay.tiers.host import HostStore

HISTORY = list(range(3, 43))
"""10 blocks of 4 tokens; the pool has 16."""


@pytest.fixture
def engine() -> Iterator[TieredEngine]:
    """A pool with 4 blocks of a session, and 12 of another prompt that has pushed out the other 6."""
    built = TieredEngine(
        lambda shape: [HostStore(PrivateMemory(host_bytes(64, shape)), shape)], num_blocks=16, retention="value"
    )
    built.ask(HISTORY, max_tokens=1)
    built.ask(list(range(103, 151)), max_tokens=1)
    assert built.tiers.settle(60.0)
    yield built
    built.close()


def is_answered_at_once(engine: TieredEngine, prompt: list[int]) -> bool:
    """The answer is empty, and the pool stays as it was."""
    cached = engine.core.cached_hashes()
    name = engine.add(prompt, is_prefetch=True)
    (output,) = [output for output in engine.core.scheduler.output.outputs if output.request_id == name]
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    return name not in engine.core.scheduler.requests and engine.core.cached_hashes() == cached


def test_a_turn_finds_in_the_pool_what_was_prefetched_and_nothing_was_computed_for_it(engine: TieredEngine) -> None:
    computed = engine.core.stats().tokens.num_prefilled
    name = engine.add([*HISTORY, 50], is_prefetch=True)
    outputs = engine.core.step().outputs
    engine.loaded()
    while engine.core.has_work():
        outputs += engine.core.step().outputs
    assert [(output.request_id, output.token_ids, output.num_cached_tokens) for output in outputs] == [(name, (), 40)]
    assert engine.core.stats().tokens.num_prefilled == computed
    engine.core.check_integrity()
    assert engine.ask([*HISTORY, 50]) == [expected([*HISTORY, 50])]
    stats = engine.core.stats()
    assert stats.sessions is not None
    assert stats.sessions.tokens_by_place == {"pool": 40, "computed": 0}
    assert (stats.sessions.counts.num_begun, stats.sessions.counts.num_returned) == (3, 1), "a prefetch is no turn"
    assert stats.tokens.num_prefilled == computed + 1


def test_how_soon_a_turn_follows_is_learned_of_prefetches_apart(engine: TieredEngine) -> None:
    assert engine.core.pauses is not None
    engine.add([*HISTORY, 50], is_prefetch=True)
    engine.run()
    engine.clock.advance(0.5)
    before = {kind: fit.share for kind, fit in engine.core.pauses.fits.items()}
    engine.ask([*HISTORY, 50])
    after = {kind: fit.share for kind, fit in engine.core.pauses.fits.items()}
    assert [kind for kind in after if after[kind] > before[kind]] == [("", "prefetch within 2 s")]


def test_what_is_nowhere_or_in_the_pool_needs_no_prefetch(engine: TieredEngine) -> None:
    assert is_answered_at_once(engine, list(range(203, 250)))
    assert is_answered_at_once(engine, [*HISTORY[:16], 50])
    assert engine.core.pauses is not None
    assert engine.core.pauses.counts.num_returned == 0


def test_a_migrated_request_with_all_its_tokens_is_no_prefetch(engine: TieredEngine) -> None:
    finished = Request("migrated", HISTORY, SamplingParams(max_tokens=1), output_token_ids=(50,))
    engine.core.add_request(finished)
    assert finished.token_ids == [*HISTORY, 50]
    assert not engine.core.has_unfinished()


def test_a_prefetch_is_not_in_the_way_of_a_load(engine: TieredEngine) -> None:
    name = engine.add([*HISTORY, 50])
    engine.core.step()
    assert engine.core.scheduler.requests[name].status is RequestStatus.LOADING_KV
    assert is_answered_at_once(engine, [*HISTORY, 51])
    assert is_answered_at_once(engine, [*HISTORY[:4], 51]), "not even one for which there is room"
    assert engine.run()[name] == expected([*HISTORY, 50])


def test_a_prefetch_is_not_in_the_way_of_a_request_that_waits(engine: TieredEngine) -> None:
    name = engine.add([*HISTORY, 50])
    assert is_answered_at_once(engine, [*HISTORY, 51])
    assert engine.run()[name] == expected([*HISTORY, 50])


def test_a_prefetch_takes_no_slot_that_is_not_free(engine: TieredEngine) -> None:
    engine.add([300, 301], max_tokens=2)
    engine.core.step()
    engine.core.scheduler.max_num_running = 1
    assert is_answered_at_once(engine, [*HISTORY, 50])


def test_a_prefetch_takes_half_of_the_free_blocks_at_most(engine: TieredEngine) -> None:
    """It needs 7 blocks, of 16 or, beside a running answer, of 11."""
    name = engine.add(list(range(303, 320)), max_tokens=2)
    while not engine.core.scheduler.num_decoding:
        engine.core.step()
    assert engine.tiers.settle(60.0)
    assert is_answered_at_once(engine, [*HISTORY, 50])
    engine.core.abort(name)


def test_a_prefetch_that_is_aborted_while_it_loads_gives_its_blocks_back_once_the_load_has_ended(
    engine: TieredEngine,
) -> None:
    name = engine.add([*HISTORY, 50], is_prefetch=True)
    engine.core.step()
    engine.core.abort(name)
    assert engine.core.scheduler.requests[name].status is RequestStatus.LOADING_KV
    engine.loaded()
    engine.run()
    assert not engine.core.scheduler.requests
    assert engine.core.pool.num_free == 16


def test_a_prefetch_has_no_answer() -> None:
    with pytest.raises(InvalidInputError, match="max_tokens must be between 0 and 0"):
        SamplingParams(max_tokens=1, is_prefetch=True).validate()
    assert Request("r", [3], SamplingParams(max_tokens=0, is_prefetch=True)).must_prefill_here
