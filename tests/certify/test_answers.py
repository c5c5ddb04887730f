"""The verdict over greedy answers, with engines whose noise is invented: how often it fails a sound one, and that it
fails wrong ones."""

from __future__ import annotations

import math
import random

import pytest

from kvrelay.certify.answers import (
    FALSE_ALARM,
    chance,
    chance_of_stable,
    compare,
    first_difference,
    judge_answers,
    judge_logprobs,
    ladder,
    make_prompts,
)
from kvrelay.certify.findings import Verdict
from kvrelay.certify.servers import Answer

NUM_PROMPTS, NUM_TOKENS = 30, 12


def engine(draw: random.Random, flip: float) -> list[Answer]:
    """Each token is another one with this chance, and then so is the rest."""
    found = []
    for number in range(NUM_PROMPTS):
        at = next((token for token in range(NUM_TOKENS) if draw.random() < flip), NUM_TOKENS)
        tokens = [f"{number}.{token}" if token < at else f"other {draw.random()}" for token in range(NUM_TOKENS)]
        found.append(Answer(tuple(tokens)))
    return found


def test_an_engine_that_differs_from_itself_is_not_failed() -> None:
    """Of 400 sound runs with noise, FALSE_ALARM allows 0.4; two would be a wrong test."""
    draw, num_failed = random.Random(3), 0
    for _ in range(400):
        reference, again, remote = (engine(draw, 0.02) for _ in range(3))
        verdict, _ = judge_answers(compare(reference, remote, 0.0), compare(reference, again, 0.0))
        num_failed += verdict is Verdict.FAIL
    assert num_failed <= 1


def test_answers_that_differ_more_often_than_the_engine_does_are_failed() -> None:
    draw = random.Random(4)
    reference, again = engine(draw, 0.01), engine(draw, 0.01)
    verdict, reason = judge_answers(compare(reference, engine(draw, 0.5), 0.0), compare(reference, again, 0.0))
    assert verdict is Verdict.FAIL
    assert "prompt 0, token" in reason


def test_one_answer_that_differs_every_time_is_failed_by_asking_again() -> None:
    reference = engine(random.Random(5), 0.0)
    wrong = [Answer(("x", *reference[0].tokens[1:])), *reference[1:]]
    found, noise = compare(reference, wrong, 0.0), compare(reference, reference, 0.0)
    assert judge_answers(found, noise)[0] is Verdict.WARN
    assert judge_answers(found, noise, num_stable=0, num_times=8)[0] is Verdict.PASS
    assert judge_answers(found, noise, num_stable=1, num_times=8)[0] is Verdict.FAIL
    assert chance_of_stable(8, NUM_PROMPTS) == pytest.approx(
        NUM_PROMPTS * (math.factorial(8) ** 2) / math.factorial(16)
    )
    assert chance_of_stable(8, NUM_PROMPTS) < 3 * FALSE_ALARM


def test_the_chance_is_the_binomial_one() -> None:
    reference = engine(random.Random(6), 0.0)
    wrong = [Answer(("x",) * NUM_TOKENS)] * 3 + reference[3:]
    found, noise = compare(reference, wrong, 0.0), compare(reference, reference, 0.0)
    # Three differences, all here; exposed are 27 * 12 + 3 tokens here and 30 * 12 there.
    assert chance(found, noise) == pytest.approx((327 / (327 + 360)) ** 3)


def test_a_tie_of_the_engines_own_is_no_difference() -> None:
    def answer(token: str, logprobs: dict[str, float]) -> Answer:
        return Answer((token,), (logprobs[token],), (logprobs,))

    near, far = {"a": -0.70, "b": -0.72}, {"a": -0.1, "b": -2.4}
    assert compare([answer("a", near)], [answer("b", near)], 0.05).num_ties == 1
    assert compare([answer("a", far)], [answer("b", far)], 0.05).differing == (0,)


def test_logprobs_that_are_further_apart_than_the_engines_own_are_failed() -> None:
    def answers(shift: float) -> list[Answer]:
        return [Answer(("a", "b"), (-1.0 - shift, -1.0)) for _ in range(10)]

    noise = compare(answers(0.0), answers(0.01), 0.0)
    assert judge_logprobs(compare(answers(0.0), answers(0.02), 0.0), noise)[0] is Verdict.PASS
    assert judge_logprobs(compare(answers(0.0), answers(0.5), 0.0), noise)[0] is Verdict.FAIL


def test_an_answer_that_ends_early_differs_at_its_end() -> None:
    assert first_difference(Answer(("a", "b")), Answer(("a",))) == 1
    assert first_difference(Answer(("a", "b")), Answer(("a", "b"))) is None


def test_the_ladder_has_all_edges_and_nothing_beyond() -> None:
    lengths = ladder(16, 512, 128, 600, is_short=True)
    assert {1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 511, 512, 513, 600} <= set(lengths)
    assert max(lengths) == 600
    prompts = make_prompts(lengths, 1000, seed=1)
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts == make_prompts(lengths, 1000, seed=1)


def test_an_engine_without_answers_of_its_own_proves_nothing() -> None:
    draw = random.Random(8)
    reference, again, remote = (engine(draw, 0.5) for _ in range(3))
    found, noise = compare(reference, remote, 0.0), compare(reference, again, 0.0)
    assert len(noise.differing) == NUM_PROMPTS
    verdict, reason = judge_answers(found, noise)
    assert verdict is Verdict.WARN
    assert "proves nothing" in reason
