"""Sessions of agents in one engine: what is kept of them while their tools run."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.clairvoyant import play
from tests.engine.conftest import build_engine

from kvrelay.core.clock import ManualClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request

SIZE = 4
TOOLS = {"read": 1.0, "build": 9.0}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def turn(engine: EngineCore, name: str, history: list[int], tenant: str = "") -> None:
    """One turn: its prompt is ``history``, to which the answer is added."""
    engine.add_request(Request(name, history, GREEDY, tenant=tenant))
    while engine.has_work():
        for output in engine.step().outputs:
            history += output.token_ids
    engine.check_integrity()


def talk(retention: Literal["value", "recency"]) -> EngineCore:
    """120 turns of ten sessions, which grow from 10 blocks; in a pool of 160 half of them find room at the end. Half
    of them call a tool of 1 s, the others one of 9 s."""
    clock = ManualClock()
    engine = build_engine(
        num_blocks=160, block_size=SIZE, kv_retention=retention, clock=clock, max_num_batched_tokens=512
    )
    histories = [[(7 * session + at) % 400 + 3 for at in range(40)] for session in range(10)]
    due_s = [0.1 * session for session in range(10)]
    for number in range(120):
        session = min(range(10), key=due_s.__getitem__)
        clock.advance(max(due_s[session] - clock.now(), 0.0))
        histories[session].append(number + 3)
        turn(engine, f"r{number}", histories[session])
        tool = "build" if session % 2 else "read"
        engine.session_paused(f"r{number}", tool)
        due_s[session] = clock.now() + TOOLS[tool]
    return engine


def test_sessions_with_short_tools_are_kept_and_others_give_way() -> None:
    value, recency = talk("value"), talk("recency")
    assert value.scheduler.num_generated_tokens == recency.scheduler.num_generated_tokens
    assert value.stats().tokens.num_prefilled < 0.9 * recency.stats().tokens.num_prefilled
    sessions = value.stats().sessions
    assert sessions is not None
    assert (sessions.counts.num_begun, sessions.counts.num_returned, sessions.num_paused) == (120, 110, 10)
    assert recency.stats().sessions is None


def test_one_that_knows_the_future_computes_less_than_both_policies() -> None:
    recency, value, best = [
        play(policy, 0.25, 1, num_sessions=12, num_turns=10) for policy in ("recency", "value", "next use")
    ]
    assert best.num_computed < min(recency.num_computed, value.num_computed)
    assert best.first_token_s < min(recency.first_token_s, value.first_token_s)


def test_a_turn_finds_its_session_by_its_prompt() -> None:
    engine = build_engine(block_size=SIZE)
    history = list(range(3, 23))
    turn(engine, "r1", history)
    history += [90, 91, 92]
    turn(engine, "r2", history)
    assert engine.pauses is not None
    counts = engine.pauses.counts
    # 20 tokens and an answer of 4, whose last token has no KV: 5 blocks, which the second prompt repeats.
    assert (counts.num_begun, counts.num_returned, counts.returned_tokens, counts.pool_tokens) == (2, 1, 20, 20)
    assert counts.num_missed == 0


def test_a_foreign_key_is_no_turn_of_the_session() -> None:
    engine = build_engine(block_size=SIZE)
    history = list(range(3, 23))
    turn(engine, "r1", history, tenant="a")
    turn(engine, "r2", [*history, 90], tenant="b")
    assert engine.pauses is not None
    assert engine.pauses.counts.num_returned == 0


def test_a_turn_that_is_aborted_while_it_waits_ends_the_pause() -> None:
    engine = build_engine(block_size=SIZE)
    history = list(range(3, 23))
    turn(engine, "r1", history)
    engine.add_request(Request("r2", [*history, 90], GREEDY))
    engine.abort("r2")
    engine.check_integrity()
    assert engine.pauses is not None
    assert (engine.pauses.counts.num_returned, engine.pauses.counts.returned_tokens, len(engine.pauses)) == (1, 0, 0)


Hint = tuple[str, float, bool]
"""What a flooding key says after an answer, tool and seconds, and whether it then keeps its session up."""
HINTS = st.lists(
    st.tuples(
        st.sampled_from(("", "a", "b")), st.sampled_from((0.0, 0.5, 1.0, 4.0, 16.0, 60.0, 86400.0)), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


def num_found(hints: list[Hint], retention: Literal["value", "recency"]) -> int:
    """Cached tokens of a key with six sessions that return after 2 s, while another key sends two requests for each of
    its turns. The pool has room for about half of what both have sent."""
    clock = ManualClock()
    engine = build_engine(
        num_blocks=160, block_size=SIZE, kv_retention=retention, clock=clock, max_num_batched_tokens=512
    )
    histories = [[(7 * session + at) % 400 + 3 for at in range(40)] for session in range(6)]
    flood: list[int] = []
    num_hits = 0
    for number in range(48):
        clock.advance(2.0 / 6)
        before = engine.scheduler.admission.num_hit_tokens
        histories[number % 6].append(number + 3)
        turn(engine, f"h{number}", histories[number % 6], "honest")
        num_hits += engine.scheduler.admission.num_hit_tokens - before
        for at in (2 * number, 2 * number + 1):
            tool, within_s, returns = hints[at % len(hints)]
            if not flood or not returns or len(flood) > 200:
                flood = [(131 * at + 7 * token) % 480 + 3 for token in range(40)]
            turn(engine, f"l{at}", flood, "liar")
            flood.append(7)
            engine.session_paused(f"l{at}", tool, within_s=within_s)
    return num_hits


@settings(max_examples=15, deadline=None)
@given(HINTS)
def test_a_key_that_floods_and_lies_harms_itself_only(hints: list[Hint]) -> None:
    """The other key finds what it finds by recency, or more. Its own wrong guesses count, too."""
    assert num_found(hints, "value") > 0.98 * num_found(hints, "recency")


@pytest.mark.parametrize("request_id", ["unknown", ""])
def test_news_of_requests_that_are_not_known_changes_nothing(request_id: str) -> None:
    engine = build_engine(block_size=SIZE)
    turn(engine, "r1", list(range(3, 23)))
    engine.session_paused(request_id, "bash")
    assert engine.pauses is not None
    assert list(engine.pauses.fits) == [("", "")]
