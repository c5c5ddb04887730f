"""The rows about answers: are greedy answers those of the same engine without a hand-off, as far as it repeats itself?

An engine may round otherwise in another batch. So the engine alone is asked twice, one prompt at a time and many at
once: its differences from itself are its noise. A hand-off may differ as often, and no more. Pure, but for ``ladder``'s
callers, who ask.

    difference   the first token in which two answers differ. What follows says nothing more.
    tie          a difference at which the engine itself found both tokens as good, within its own noise
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from kvrelay.certify.findings import Verdict
from kvrelay.certify.servers import Answer, Prompt

FALSE_ALARM = 1e-3
"""The rate at which an engine that differs from itself as often would be failed."""
MIN_TIE = 0.05
"""Logprobs of bfloat16 are no finer."""
TIE_FACTOR = 4.0
MAX_NOISE, MAX_OWN_GAP = 0.3, 0.5
"""An engine that differs from itself in more of its answers, or by more in its logprobs, has no answers to compare."""
FIRST_TOKENS = range(16, 500)
"""Token ids that every vocabulary has, without special ones at its beginning."""


def ladder(block_size: int, chunk: int, window: int, longest: int, *, is_short: bool) -> list[int]:
    """Prompt lengths around the edges of blocks, chunks and the attention's window (0: none), up to ``longest``."""
    edges = [1, 2 * block_size, block_size, chunk, window]
    if not is_short:
        edges += [3 * block_size, 7 * block_size, 2 * chunk, 2 * window, chunk + block_size, window + block_size]
    lengths = {edge + step for edge in edges if edge for step in (-1, 0, 1)} | {longest}
    draw = random.Random(len(lengths))
    lengths |= {draw.randint(1, max(1, longest)) for _ in range(2 if is_short else 12)}
    return sorted(length for length in lengths if 1 <= length <= longest)


def make_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Prompt]:
    """Random token ids. Every third begins like one before it, so that caches have a part of it."""
    draw = random.Random(seed)
    tokens = range(FIRST_TOKENS.start, min(vocab_size, 2**31)) if vocab_size > FIRST_TOKENS.stop else FIRST_TOKENS
    prompts: list[Prompt] = []
    for at, length in enumerate(lengths):
        prompt = tuple(draw.choices(tokens, k=length))
        if at % 3 == 2:
            shared = prompts[at - 1][: length - 1]
            prompt = (*shared, *prompt[len(shared) :])
        prompts.append(prompt)
    return prompts


class Comparison(msgspec.Struct, frozen=True):
    """Many answers beside those to the same prompts. ``exposed``: tokens up to the differences, or in all."""

    num_answers: int
    exposed: int
    differing: tuple[int, ...] = ()
    """Numbers of prompts; ties are not among them."""
    num_ties: int = 0
    logprob_gap: float = 0.0
    """The largest difference of logprobs of equal tokens before any difference."""
    first_gaps: tuple[float, ...] = ()
    """Of first tokens: how far their logprobs are apart, if both tell them and the tokens are equal."""
    example: str = ""


def compare(reference: Sequence[Answer], others: Sequence[Answer], tie: float) -> Comparison:
    """``tie``: logprobs that are no further apart are equally good."""
    differing, num_ties, exposed, gap, example = [], 0, 0, 0.0, ""
    first_gaps = []
    for number, (ours, theirs) in enumerate(zip(reference, others, strict=True)):
        at = first_difference(ours, theirs)
        exposed += min(len(ours.tokens), len(theirs.tokens)) if at is None else at + 1
        before = range(min(len(ours.logprobs), len(theirs.logprobs)) if at is None else at)
        if ours.logprobs and theirs.logprobs:
            gaps = [abs(ours.logprobs[each] - theirs.logprobs[each]) for each in before]
            gap = max([gap, *gaps])
            first_gaps += gaps[:1]
        if at is None:
            continue
        if _is_tie(ours, theirs, at, tie):
            num_ties += 1
        else:
            differing.append(number)
            example = example or _example(number, ours, theirs, at)
    return Comparison(len(reference), exposed, tuple(differing), num_ties, gap, tuple(first_gaps), example)


def first_difference(ours: Answer, theirs: Answer) -> int | None:
    """The number of the first token in which they differ."""
    pairs = zip(ours.tokens, theirs.tokens)
    at = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if at is None and len(ours.tokens) != len(theirs.tokens):
        return min(len(ours.tokens), len(theirs.tokens))
    return at


def _is_tie(ours: Answer, theirs: Answer, at: int, tie: float) -> bool:
    """Both engines found the best two tokens as good, and they are the same two."""
    if at >= min(len(ours.tops), len(theirs.tops)):
        return False
    tops = ours.tops[at], theirs.tops[at]
    if any(len(top) < 2 for top in tops) or set(tops[0]) != set(tops[1]):
        return False
    return all(max(top.values()) - min(top.values()) <= tie for top in tops)


def _example(number: int, ours: Answer, theirs: Answer, at: int) -> str:
    said = [answer.tokens[at] if at < len(answer.tokens) else "the end" for answer in (ours, theirs)]
    return f"prompt {number}, token {at}: {said[1]} instead of {said[0]}"


def tie_of(noise_gap: float) -> float:
    """How close two logprobs must be to be a tie, by the engine's own noise."""
    return max(MIN_TIE, TIE_FACTOR * noise_gap)


def chance(found: Comparison, noise: Comparison) -> float:
    """The chance of so many differences or more if a hand-off added none: given the sum of both, those of ``found``
    are binomial by the tokens that each was exposed to."""
    total = len(found.differing) + len(noise.differing)
    share = found.exposed / max(1, found.exposed + noise.exposed)
    counts = range(len(found.differing), total + 1)
    return sum(math.comb(total, count) * share**count * (1 - share) ** (total - count) for count in counts)


def chance_of_stable(num_times: int, num_prompts: int) -> float:
    """The chance that one of ``num_prompts`` prompts, asked ``num_times`` at each side, has one answer at the one side
    always and at the other never, if both sides answer alike (Bonferroni)."""
    return min(1.0, num_prompts / math.comb(2 * num_times, num_times))


def judge_answers(
    found: Comparison, noise: Comparison, num_stable: int | None = None, num_times: int = 0
) -> tuple[Verdict, str]:
    """``num_stable``: of the differing prompts, how many differ each time when both sides are asked ``num_times``;
    None: they have not been asked again."""
    ties = f", {found.num_ties} at a tie of the engine's own" if found.num_ties else ""
    count = len(found.differing)
    if not count:
        same = f"{found.num_answers} of {found.num_answers} greedy answers are those of the engine alone"
        return Verdict.PASS, f"{same}{ties}"
    said = f"{count} of {found.num_answers} greedy answers differ from those of the engine alone{ties}; "
    said += f"the engine differs from itself in {len(noise.differing)} of {noise.num_answers}"
    p = chance(found, noise)
    if p < FALSE_ALARM:
        return Verdict.FAIL, f"{said}; by chance that happens in {p:.1g} of runs ({found.example})"
    if num_stable:
        p = chance_of_stable(num_times, found.num_answers)
        return Verdict.FAIL, (
            f"{said}; {num_stable} differ each of {num_times} times that both were asked, which happens by chance in "
            f"{p:.1g} of runs ({found.example})"
        )
    if num_stable is None and len(noise.differing) > MAX_NOISE * noise.num_answers:
        return Verdict.WARN, f"{said}: with an engine that differs from itself so often this proves nothing"
    if num_stable is not None or noise.differing:
        return Verdict.PASS, f"{said}: no more than its own noise explains"
    return Verdict.WARN, f"{said}: too few to tell a wrong answer from rounding ({found.example})"


def judge_logprobs(found: Comparison, noise: Comparison) -> tuple[Verdict, str]:
    """Of first tokens: they depend on all of the prompt's KV, and differ when the token is still the same."""
    if not found.first_gaps:
        return Verdict.SKIP, "the server tells no logprobs, or no first token is equal"
    own = max(noise.first_gaps, default=0.0)
    limit = tie_of(own)
    worst = max(found.first_gaps)
    num_off = sum(gap > limit for gap in found.first_gaps)
    if own > MAX_OWN_GAP:
        return Verdict.WARN, f"first tokens' logprobs of the engine alone are {own:.2g} apart: so they prove nothing"
    said = f"first tokens' logprobs are at most {worst:.2g} apart, those of the engine alone {own:.2g}"
    if num_off > max(1, len(found.first_gaps) // 50) or worst > 4 * limit:
        return Verdict.FAIL, f"{said}; {num_off} of {len(found.first_gaps)} are further apart than {limit:.2g}"
    return Verdict.PASS, said
