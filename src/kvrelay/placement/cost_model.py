"""Fits what engine work costs in seconds: the step, and the way through a prefill worker. Pure.

It measures nothing itself: the engine reports its steps, the decode side its remote prefills. The formulas of a step
are in ``core.step_cost``. Steps with and without a prefill are one fit: under overload none is without, and what the
answers in them cost would else stay as a few answers once showed it. ``docs/cost-model.md`` has the sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvrelay.core.step_cost import StepCost, StepWork, are_times, bounded_s
from kvrelay.placement.least_squares import RecursiveLeastSquares

MIN_SPREAD = 1e-3
"""Below it times count as exact."""
SPREAD_SHARE = 0.05
"""Weight of the latest sample in a spread."""
PRIOR_SPREAD, PRIOR_SAMPLES = 0.25, 4
"""Before the first sample, and how many samples that counts as: a busy machine, until it has shown that it is not."""
AGEING_SHARE = 1e-3
"""Of the prior in a spread, for each sample of another kind. A spread that closes its own way would never be measured
again otherwise."""
LEARNING_SAMPLES = 8
"""The errors of the first samples are those of the prior, and say nothing of how times scatter."""
MAX_ERROR = 2.0
"""A larger error counts as this many spreads: a pause of the process, which no choice of ours would have avoided, says
nothing of the times without one."""
MAX_SPREAD = 1.0
"""Times that scatter by more than a factor e say nothing, and the formulas must stay finite."""
MANY_STEPS, SAMPLED_STEPS = 200, 4
"""After so many steps of a kind, every so-manieth is a sample: decode steps, and prefills of less than SHORT_STEP_S."""
SHORT_STEP_S = 0.002
"""A fit takes a hundredth of this."""
MANY_DECODES = 4096
"""``tokens_per_step`` is the mean of the last half to all of so many: an answer's text decides how much is accepted."""


class Spread:
    """How far times scatter about their estimates: the root of the mean squared logarithm of measured / estimated. The
    first LEARNING_SAMPLES do not count."""

    def __init__(self) -> None:
        self._square = PRIOR_SPREAD**2
        self._num_samples = PRIOR_SAMPLES - LEARNING_SAMPLES

    @property
    def value(self) -> float:
        return math.sqrt(self._square)

    def add(self, seconds: float, estimate_s: float) -> None:
        if not (seconds > 0.0 and estimate_s > 0.0):
            return
        self._num_samples += 1
        if self._num_samples <= PRIOR_SAMPLES:
            return
        limit = min(MAX_ERROR * max(self.value, MIN_SPREAD), MAX_SPREAD)
        error = min(max(math.log(seconds) - math.log(estimate_s), -limit), limit)
        self._square += max(SPREAD_SHARE, 1.0 / self._num_samples) * (error * error - self._square)

    def age(self) -> None:
        """Nothing was measured: what is known counts a little less, and the prior a little more."""
        self._square += AGEING_SHARE * (PRIOR_SPREAD**2 - self._square)


def expected_lateness(estimate_s: float, spread: float, limit_s: float) -> float:
    """Seconds beyond ``limit_s``, in the mean, of a time that scatters about ``estimate_s``.

    The time is taken as lognormal with median ``estimate_s``: E max(0, X - limit), the formula of a call option (Black
    and Scholes 1973). Finite and monotone in ``estimate_s``.
    """
    if estimate_s <= 0.0:
        return max(-limit_s, 0.0)
    if limit_s <= 0.0 or spread < MIN_SPREAD:
        return max(estimate_s - limit_s, 0.0)
    above = (math.log(estimate_s) - math.log(limit_s)) / spread
    return max(estimate_s * math.exp(spread * spread / 2) * _normal(above + spread) - limit_s * _normal(above), 0.0)


def _normal(value: float) -> float:
    """The standard normal distribution's cumulative function."""
    return 0.5 * math.erfc(-value / math.sqrt(2.0))


class StepCostModel:
    """Fits StepCost to the steps of one engine."""

    def __init__(self, prior: StepCost | None = None) -> None:
        prior = prior or StepCost()
        self._steps = RecursiveLeastSquares(msgspec.structs.astuple(prior)[:-1])
        self._cost: StepCost | None = None
        self._num_decode_steps = self._num_short_prefills = 0
        self._spread = Spread()
        self._tokens_per_step = prior.tokens_per_step
        self._num_decodes = self._num_accepted = 0.0

    @property
    def cost(self) -> StepCost:
        """The coefficients of now; the prior before the first sample."""
        if self._cost is None:
            step_s, prefill_s, prefill_token_s, pair_s, decode_s, context_s = self._steps.coefficients
            self._cost = StepCost(
                step_s, prefill_s, prefill_token_s, pair_s, decode_s, context_s, self._tokens_per_step
            )
        return self._cost

    @property
    def num_samples(self) -> int:
        return self._steps.num_samples

    @property
    def num_rejected(self) -> int:
        return self._steps.num_rejected

    @property
    def relative_error(self) -> float:
        """Mean of the last steps' |measured - predicted| / measured."""
        return self._steps.relative_error

    @property
    def spread(self) -> float:
        """How far the times of steps with a prefill scatter about their estimates."""
        return self._spread.value

    def add(self, work: StepWork, seconds: float) -> None:
        """A step has taken ``seconds``. Impossible times are counted and ignored."""
        if work.num_decodes:
            self._count_tokens(work.num_decodes, work.num_accepted_tokens)
        if work.num_prefill_tokens > 0:
            if seconds < SHORT_STEP_S:
                self._num_short_prefills += 1
                if self._num_short_prefills > MANY_STEPS and self._num_short_prefills % SAMPLED_STEPS:
                    return
            estimate_s = self.cost.step_seconds(work)
            prefill = (1.0, work.num_prefill_tokens, work.num_prefill_pairs)
            if self._steps.add((0.0, *prefill, work.num_decodes, work.num_context_tokens), seconds):
                self._spread.add(seconds, estimate_s)
                self._cost = None
        else:
            self._add_decode(work.num_decodes, work.num_context_tokens, seconds)

    def _count_tokens(self, num_decodes: int, num_accepted: int) -> None:
        self._num_decodes += num_decodes
        self._num_accepted += num_accepted
        if self._num_accepted:
            self._tokens_per_step, self._cost = 1.0 + self._num_accepted / self._num_decodes, None
        if self._num_decodes > MANY_DECODES:
            self._num_decodes, self._num_accepted = self._num_decodes / 2, self._num_accepted / 2

    def add_decodes(self, num_decodes: int, num_context: int, seconds: Sequence[float]) -> None:
        """Like ``add`` for steps without a prefill one after another, the same decodes in each: ``num_context`` tokens
        of context in the first one, and another for each decode in each step."""
        for number, step_s in enumerate(seconds):
            self._add_decode(num_decodes, num_context + number * num_decodes, step_s)

    def _add_decode(self, num_decodes: int, num_context: int, seconds: float) -> None:
        # Steady decoding says the same again and again: after a while a part of it is enough.
        self._num_decode_steps += 1
        if self._num_decode_steps > MANY_STEPS and self._num_decode_steps % SAMPLED_STEPS:
            return
        if self._steps.add((1.0, 0.0, 0.0, 0.0, num_decodes, num_context), seconds):
            self._cost = None
        self._spread.age()


class RemoteCost(msgspec.Struct, frozen=True):
    """Coefficients of a remote prefill, as its decode worker sees it, in seconds.

    From its push to its first token: ``overhead_s``, plus ``wait_token_s`` for each token ahead of it at a prefill
    worker, plus its own prefill (``prefill_s``, ``prefill_token_s``), plus ``transfer_token_s`` per token for the KV
    that arrives after the prefill. The queue drains 1 / ``wait_token_s`` tokens per second and worker.
    """

    overhead_s: float = 0.01
    wait_token_s: float = 5e-5
    transfer_token_s: float = 1e-6
    prefill_s: float = 0.006
    prefill_token_s: float = 5e-5

    @property
    def is_sound(self) -> bool:
        return are_times(msgspec.structs.astuple(self))

    def seconds(self, num_tokens: int, num_ahead_tokens: float) -> float:
        """The time to the first token of ``num_tokens``, with ``num_ahead_tokens`` ahead of it at each worker."""
        own = self.prefill_s + (self.prefill_token_s + self.transfer_token_s) * num_tokens
        return bounded_s(self.overhead_s + self.wait_token_s * max(num_ahead_tokens, 0.0) + own)


class RemoteCostModel:
    """Fits RemoteCost to the remote prefills of one decode worker."""

    def __init__(self, prior: RemoteCost | None = None) -> None:
        prior = prior or RemoteCost()
        self._cost: RemoteCost | None = None
        self._way = RecursiveLeastSquares((prior.overhead_s, prior.wait_token_s, prior.transfer_token_s))
        self._prefill = RecursiveLeastSquares((prior.prefill_s, prior.prefill_token_s))
        self._spread = Spread()

    @property
    def spread(self) -> float:
        """How far remote prefills scatter about their estimates."""
        return self._spread.value

    @property
    def cost(self) -> RemoteCost:
        if self._cost is None:
            self._cost = RemoteCost(*self._way.coefficients, *self._prefill.coefficients)
        return self._cost

    @property
    def num_samples(self) -> int:
        return self._way.num_samples

    @property
    def relative_error(self) -> float:
        """Of the way without the prefill itself."""
        return self._way.relative_error

    @property
    def num_rejected(self) -> int:
        return self._way.num_rejected + self._prefill.num_rejected

    def begin_anew(self) -> None:
        """Forget all samples: the next one replaces what was known."""
        self._way.begin_anew()
        self._prefill.begin_anew()
        self._spread = Spread()
        self._cost = None

    def add(self, num_tokens: int, num_ahead_tokens: float, seconds: float, prefill_s: float) -> None:
        """A prefill of ``num_tokens`` took ``seconds`` from push to first token; its worker computed for ``prefill_s``.

        Impossible times are counted and ignored.
        """
        estimate_s = self.cost.seconds(num_tokens, num_ahead_tokens)
        if not 0.0 < prefill_s <= seconds:
            # Durations of two machines: they may differ, but the part cannot be longer than the whole.
            prefill_s = 0.0
        elif not self._prefill.add((1.0, num_tokens), prefill_s):
            prefill_s = 0.0
        if self._way.add((1.0, num_ahead_tokens, num_tokens), seconds - prefill_s):
            self._spread.add(seconds, estimate_s)
        self._cost = None
