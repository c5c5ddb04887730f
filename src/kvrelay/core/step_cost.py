"""The time of engine work in seconds: one step, and the steps of a prefill. Values and formulas only.

A step has ``p`` prefill tokens, and ``d`` decodes over ``c`` tokens of context. ``q`` counts its pairs of a prefill
token and a token before it in the same prompt, of this step or computed earlier (``prefill_pairs``):

    step_s = step + decode * d + context * c                                        without a prefill
    step_s = prefill + prefill_token * p + pair * q + decode * d + context * c      with one
    token_s = step_s / tokens_per_step                                              between two tokens of a sequence

``tokens_per_step`` is 1, or with speculative decoding more: what a decode gets from a step in the mean.
``placement.cost_model`` fits the coefficients. ``docs/cost-model.md`` has the sources.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

MAX_COST_S = 3600.0
"""No estimate is longer: it stands for never."""
MIN_CHUNK_TOKENS = 16
"""A prefill always gets on, whatever the running answers' objective: by a block."""
MAX_CHUNK_TOKENS = 1 << 30
STEP_SHARE = 0.7
"""Share of the objective between tokens that a step may take; the rest is for the way to the client."""
MARGIN = 2.0
"""Standard deviations of a step's time below the objective: of a normal distribution 98 % lie below it."""
LATE_FACTOR = 4.0
"""Times the objective between tokens of answers that yield, while prompts are late. Answers that were late do: neither
meets its objectives any more, and the sooner these prompts are computed, the fewer others are late."""
MIN_STEP_FACTOR = 2.0
"""A step may take so many times as long as before its first prompt token, whatever the objective between tokens. Less,
and the prompts that wait outnumber the answers: while c prompt tokens join per step, only c * answer / prompt run."""
TIGHT_STEP_FACTOR, TIGHT_SHARE = 1.5, 0.9
"""If so many times are within this share of the objective, such a step ends at that share: beyond it every answer that
runs would miss the objective. The rest is for the steps that follow, each with a little more context."""
ARRIVAL_SHARE = 0.25
"""Share of the objective for the first token: a request that arrives waits for the step that runs."""
MAX_TOKENS_PER_STEP = 1000.0
DECODE_FIELDS = ("step_s", "decode_s", "context_s", "tokens_per_step")
PREFILL_FIELDS = ("prefill_s", "prefill_token_s", "pair_s")


class CostSource(enum.StrEnum):
    """Where the cost of an engine's steps comes from. Values are metric labels."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    """From what answers show, not from steps."""
    STALE = "stale"
    """It was measured, and is not any more: it counts for nothing."""
    NONE = "none"


class StepWork(msgspec.Struct, frozen=True):
    """What one step computes; counts as in the module's formula. ``num_accepted_tokens``: drafted tokens that the
    decodes got beyond one for each. They take no time of their own."""

    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_decodes: int = 0
    num_context_tokens: int = 0
    num_accepted_tokens: int = 0


class StepCost(msgspec.Struct, frozen=True):
    """Coefficients of the step's time, in seconds: per step without and with a prefill, per prefill token, pair, decode
    and context token; then what a decode gets from a step, in tokens. The defaults are the prior: a GPU of the middle
    class with a model of some billion parameters."""

    step_s: float = 0.004
    prefill_s: float = 0.006
    prefill_token_s: float = 5e-5
    pair_s: float = 5e-9
    decode_s: float = 5e-5
    context_s: float = 1e-9
    tokens_per_step: float = 1.0

    @property
    def is_sound(self) -> bool:
        """Whether these can be coefficients at all: a worker may publish anything."""
        *times, tokens_per_step = msgspec.structs.astuple(self)
        has_steps = max(self.step_s, self.decode_s, self.context_s) > 0.0
        return are_times(times) and has_steps and 1.0 <= tokens_per_step <= MAX_TOKENS_PER_STEP

    def step_seconds(self, work: StepWork) -> float:
        """The time of one step."""
        return bounded_s(self._own_seconds(work) + self._decode_seconds(work.num_decodes, work.num_context_tokens))

    def token_seconds(self, work: StepWork) -> float:
        """The time between two tokens of a sequence that decodes in such steps."""
        return self.step_seconds(work) / self.tokens_per_step

    def step_limit_s(self, itl_s: float, spread: float) -> float:
        """How long a step with prefills may take beside answers with that objective between tokens. The slowest tokens
        are to keep it as well, so the step has to keep it although its time scatters."""
        return min(STEP_SHARE, math.exp(-MARGIN * spread)) * itl_s * self.tokens_per_step

    def prefill_seconds(
        self,
        num_tokens: int,
        *,
        num_before: int = 0,
        num_ahead: int = 0,
        chunk: int = 2048,
        num_decodes: int = 0,
        num_context: int = 0,
    ) -> float:
        """The time of the steps that prefill ``num_tokens`` after ``num_before`` others of the same prompt, ``chunk``
        in each. They also prefill ``num_ahead`` tokens of other prompts, none of which is longer."""
        if num_tokens <= 0:
            return 0.0
        num_steps = math.ceil((num_ahead + num_tokens) / max(chunk, 1))
        pairs = prefill_pairs(num_tokens, num_before) + num_ahead * min(num_ahead, num_tokens) / 2
        base = self.prefill_s + self._decode_seconds(num_decodes, num_context)
        tokens_s = self.prefill_token_s * (num_ahead + num_tokens)
        return bounded_s(num_steps * base + tokens_s + self.pair_s * pairs)

    def added_seconds(self, num_tokens: int, *, num_before: int = 0, chunk: int = 2048) -> float:
        """What the same prefill adds to steps that run anyway: each running answer is this much later."""
        num_steps = math.ceil(max(num_tokens, 0) / max(chunk, 1))
        alone = self.prefill_seconds(num_tokens, num_before=num_before, chunk=chunk)
        return max(alone - num_steps * min(self.step_s, self.prefill_s), 0.0)

    def extra_seconds(self, num_tokens: int, num_before: int) -> float:
        """What these tokens of a prompt add to its prefill, after ``num_before`` others that are computed or loaded."""
        return num_tokens * self.prefill_token_s + prefill_pairs(num_tokens, num_before) * self.pair_s

    def tokens_within(self, seconds: float, num_before: int) -> int:
        """The most tokens whose ``extra_seconds`` are at most ``seconds``."""
        seconds = max(seconds, 0.0)
        token_s = self.prefill_token_s + self.pair_s * num_before
        # The root of token_s * n + pair_s / 2 * n * n = seconds, without a difference of large numbers.
        divisor = token_s + math.sqrt(token_s * token_s + 2.0 * self.pair_s * seconds)
        return int(min(2.0 * seconds / divisor, MAX_CHUNK_TOKENS)) if divisor > 0.0 else MAX_CHUNK_TOKENS

    def _own_seconds(self, work: StepWork) -> float:
        if work.num_prefill_tokens <= 0:
            return self.step_s
        tokens_s = self.prefill_token_s * work.num_prefill_tokens
        return self.prefill_s + tokens_s + self.pair_s * work.num_prefill_pairs

    def _decode_seconds(self, num_decodes: int, num_context: int) -> float:
        return self.decode_s * num_decodes + self.context_s * num_context


class StepPace(msgspec.Struct, frozen=True):
    """How long the steps of one engine may take, in seconds. ``limit_s``: with prefills beside running answers;
    ``most_s``: the same if prompts would hardly get on otherwise; ``ttft_s``: the shortest objective for a first token,
    which counts while no answer runs. 0: there is none."""

    cost: StepCost = StepCost()
    limit_s: float = 0.0
    most_s: float = 0.0
    ttft_s: float = 0.0

    @classmethod
    def keeping(
        cls,
        cost: StepCost,
        spread: float,
        itl_s: float,
        yielding_itl_s: float = 0.0,
        ttft_s: float = 0.0,
        *,
        are_prompts_late: bool = False,
    ) -> StepPace:
        """The pace that keeps these objectives, each the shortest of its kind, 0 if there is none: between tokens of
        answers, ``yielding_itl_s`` of those that yield to late prompts, and for the first tokens of prompts.
        ``spread``: of the steps with prefills."""
        yielding_itl_s *= LATE_FACTOR if are_prompts_late else 1.0
        shortest_s = min([limit_s for limit_s in (itl_s, yielding_itl_s) if limit_s != 0.0], default=0.0)
        most_s = TIGHT_SHARE * shortest_s * cost.tokens_per_step
        return cls(cost, cost.step_limit_s(shortest_s, spread), most_s, ttft_s)

    def prefill_budget(
        self,
        max_num_tokens: int,
        *,
        num_before: int = 0,
        num_decodes: int = 0,
        num_context: int = 0,
        prompts: Iterable[tuple[int, int]] = (),
    ) -> int:
        """The prefill tokens of the next step, at most ``max_num_tokens``. Without a sound cost or a possible objective
        nothing is limited. ``prompts``: those that get tokens first, in order: how many each still needs, after how
        many that have been computed. Behind them comes one after ``num_before`` tokens that needs any number."""
        has_objective = num_decodes > 0 and self.limit_s != 0.0
        limit_s = self.limit_s if has_objective else ARRIVAL_SHARE * self.ttft_s
        if not 0.0 < limit_s < math.inf or not self.cost.is_sound:
            return max_num_tokens
        decodes_s = self.cost._decode_seconds(num_decodes, num_context)
        own_s = max(self.cost.step_s, self.cost.prefill_s) + decodes_s
        least_s = MIN_STEP_FACTOR * own_s
        if has_objective and TIGHT_STEP_FACTOR * own_s <= self.most_s:
            least_s = min(least_s, self.most_s)
        limit_s = max(limit_s, least_s)
        left_s = limit_s - self.cost.prefill_s - decodes_s
        budget = 0
        for num_tokens, before in (*prompts, (MAX_CHUNK_TOKENS, num_before)):
            count = min(self.cost.tokens_within(left_s, before), num_tokens)
            budget += count
            if count < num_tokens:
                break
            left_s -= self.cost.extra_seconds(count, before)
        return min(max(budget, MIN_CHUNK_TOKENS), max_num_tokens)


def prefill_pairs(num_tokens: int, num_before: int) -> int:
    """Of ``num_tokens`` of a prompt after ``num_before`` others, with those others and among each other."""
    return num_tokens * num_before + num_tokens * num_tokens // 2


def are_times(coefficients: Sequence[float]) -> bool:
    """Whether they are zero or above, and at most MAX_COST_S together. A sum with a NaN compares false."""
    return sum(coefficients) <= MAX_COST_S and min(coefficients) >= 0.0


def bounded_s(seconds: float) -> float:
    """A finite time, zero or above; NaN counts as never."""
    return min(max(seconds, 0.0), MAX_COST_S) if seconds == seconds else MAX_COST_S  # noqa: PLR0124


def median_cost(fitted: Sequence[tuple[str, StepCost]]) -> tuple[StepCost, tuple[str, ...]]:
    """Of workers of one model, by role: per coefficient the median of those that have measured such steps, and the
    names of what none has.

    A worker that has not publishes its prior. Those count whose role is for such steps; else the others, because by
    cost a decode worker may prefill all short prompts itself.
    """
    values: dict[str, float] = {}
    missing: list[str] = []
    prior = StepCost()
    for names, other in ((DECODE_FIELDS, "prefill"), (PREFILL_FIELDS, "decode")):
        moved = [(role, cost) for role, cost in fitted if any(getattr(cost, n) != getattr(prior, n) for n in names)]
        costs = [cost for role, cost in moved if role != other] or [cost for _, cost in moved] or [prior]
        values |= {name: statistics.median(getattr(cost, name) for cost in costs) for name in names}
        if not moved:
            missing += names
    return StepCost(**values), tuple(missing)
