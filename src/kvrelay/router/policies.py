"""The routing policies: pure functions from the candidates' numbers to a score each; the highest score wins.

A policy sees columns (one entry a candidate) and nothing else: no workers, no clock, no index. Ties are drawn at
random from the router's seeded generator, so that equal workers share the load.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvrelay.config import RouterConfig
from kvrelay.placement.seconds import (
    BALANCE_WEIGHT,
    FEW,
    PENDING_WEIGHT,
    Candidates,
    FloatColumn,
    Seconds,
    decode_seconds,
    own_tokens,
    prefill_seconds,
    totals_of_few,
)


def pick_best(scores: FloatColumn, rng: random.Random) -> int:
    """The highest score; ties are drawn at random."""
    tied: Sequence[int]
    if len(scores) <= FEW:
        values = scores.tolist()
        best = max(values)
        tied = [row for row, value in enumerate(values) if value == best]
    else:
        (tied,) = (scores == scores.max()).nonzero()
    return int(tied[0]) if len(tied) == 1 else int(rng.choice(tied))


def pick_softmax(scores: FloatColumn, temperature: float, rng: random.Random) -> int:
    """Draw with probability proportional to exp(score / temperature), scores scaled to a range of one.

    Without the scaling, the effect of a temperature would depend on the length of the prompts.
    """
    finite = np.isfinite(scores)
    low, high = float(scores[finite].min()), float(scores[finite].max())
    if high == low:
        return pick_best(scores, rng)
    weights = np.where(finite, np.exp((scores - high) / (high - low) / temperature), 0.0)
    cumulative = np.cumsum(weights)
    at = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return min(at, int(np.flatnonzero(finite)[-1]))


class Policy(ABC):
    """Scores candidates. ``uses_overlap``: the policy needs prefix look-ups. ``anticipates``: a placed prompt counts as
    held before the worker's events report it. ``uses_costs``: the policy compares seconds if costs are known."""

    uses_overlap = False
    anticipates = False
    uses_costs = False

    @abstractmethod
    def scores(self, candidates: Candidates) -> FloatColumn:
        """One score per candidate, ``-inf`` for those that must not be chosen. Called once per decision."""

    def pick(self, scores: FloatColumn, rng: random.Random) -> int:
        """The index of the chosen candidate."""
        return pick_best(scores, rng)


class KvWeightsPolicy(Policy):
    """The work that a worker would have before this request's first token, and while decoding it.

        cost = 0.7 * pending prefill + own * (1 + 0.02 * recent) + decode_weight * context in flight
        own = prompt - overlap_weight * overlap

    all in tokens; the score is the negative cost. Pending prefill counts less than own, because waiting delays this
    request, but computing a prefix twice takes capacity from all; the weights were found by replaying traces. The
    policy knows no speeds: a token of context costs the same on every worker.

    ``recent`` (0 to 1) is the number of tokens placed on the worker in the last minutes, over that of the worker that
    got the most. It decides near-ties: while load is low, a new prefix goes to the worker that got the least. Otherwise
    chance would distribute the prefixes, unevenly and for good.

    The pull of a prefix is exactly the prefill that it saves, in the same unit as load. So a hot prefix spreads to a
    second worker once the first is busier by more than that. Placed prompts count as held while they are still being
    prefilled, so the prefixes of a burst are not all computed anew.
    """

    uses_overlap = True
    anticipates = True

    def __init__(self, overlap_weight: float, decode_weight: float, temperature: float) -> None:
        self._overlap_weight = overlap_weight
        self._decode_weight = np.asarray(decode_weight)
        self._temperature = temperature

    def scores(self, candidates: Candidates) -> FloatColumn:
        load = candidates.load
        own = candidates.prompt_tokens - (self._overlap_weight * candidates.block_size) * candidates.overlap_blocks
        if self._overlap_weight > 1.0:
            np.maximum(own, 0.0, out=own)
        cost = (
            PENDING_WEIGHT * load.prefill_tokens
            + own * (1.0 + BALANCE_WEIGHT * load.recent_share)
            + self._decode_weight * load.context_tokens
        )
        return -cost

    def pick(self, scores: FloatColumn, rng: random.Random) -> int:
        if self._temperature > 0:
            return pick_softmax(scores, self._temperature, rng)
        return pick_best(scores, rng)


class KvPolicy(KvWeightsPolicy):
    """The default: the lowest cost in seconds (``placement/seconds.py``); by weights until costs are known."""

    uses_costs = True

    def scores(self, candidates: Candidates) -> FloatColumn:
        if candidates.costs is not None and candidates.loads is None and len(candidates) <= FEW:
            return -np.array(totals_of_few(candidates, candidates.costs, self._overlap_weight))
        seconds = self.seconds(candidates)
        return super().scores(candidates) if seconds is None else -seconds.total

    def seconds(self, candidates: Candidates) -> Seconds | None:
        """The terms of the cost; None if the weights decide."""
        costs, load = candidates.costs, candidates.load
        if costs is None:
            return None
        overlap = (self._overlap_weight * candidates.block_size) * candidates.overlap_blocks
        own, loads = own_tokens(candidates.prompt_tokens, overlap), candidates.loads
        first_token, lost_prefix = prefill_seconds(own, load, costs, loads)
        decode = decode_seconds(candidates.prompt_tokens, candidates.num_output, load, costs)
        return Seconds(first_token, lost_prefix, decode, None if loads is None else loads.seconds)


class DynamoV0Policy(Policy):
    """The formula of NVIDIA Dynamo's first KV-aware router, from published load only:

    logit = 2 * overlap_blocks * block_size / prompt_tokens - cache_usage - waiting / max_waiting_of_all
    """

    uses_overlap = True

    def scores(self, candidates: Candidates) -> FloatColumn:
        overlap = candidates.overlap_blocks * (candidates.block_size / max(candidates.prompt_tokens, 1))
        waiting = candidates.load.num_waiting / max(candidates.load.num_waiting.max(), 1)
        logits: FloatColumn = 2.0 * overlap - candidates.load.cache_usage - waiting
        return logits


class RoundRobinPolicy(Policy):
    """Workers in turn, in the order in which they were added. The score is minus the distance to the turn."""

    def __init__(self) -> None:
        self._next = 0

    def scores(self, candidates: Candidates) -> FloatColumn:
        distance = (np.arange(len(candidates)) - self._next) % len(candidates)
        return -distance.astype(np.float64)

    def pick(self, scores: FloatColumn, rng: random.Random) -> int:
        at = int(scores.argmax())
        self._next = at + 1
        return at


class RandomPolicy(Policy):
    """Every candidate with the same probability."""

    def scores(self, candidates: Candidates) -> FloatColumn:
        return np.zeros(len(candidates))


class LeastLoadedPolicy(Policy):
    """The worker with the fewest tokens in flight (pending prefill and context); ignores prefixes."""

    def scores(self, candidates: Candidates) -> FloatColumn:
        return -(candidates.load.prefill_tokens + candidates.load.context_tokens)


class PowerOfTwoPolicy(LeastLoadedPolicy):
    """The less loaded of two random candidates: late load samples cannot send all requests to one worker."""

    def pick(self, scores: FloatColumn, rng: random.Random) -> int:
        eligible = [at for at, score in enumerate(scores.tolist()) if score != -math.inf]
        pair = rng.sample(eligible, 2) if len(eligible) > 2 else eligible
        return pair[pick_best(scores[pair], rng)]


_UNWEIGHTED: dict[str, type[Policy]] = {
    "dynamo-v0": DynamoV0Policy,
    "round-robin": RoundRobinPolicy,
    "random": RandomPolicy,
    "least-loaded": LeastLoadedPolicy,
    "power-of-two": PowerOfTwoPolicy,
}


def build_policy(config: RouterConfig) -> Policy:
    """The policy that ``config.router`` names."""
    if config.router in _UNWEIGHTED:
        return _UNWEIGHTED[config.router]()
    kind = KvPolicy if config.router == "kv" else KvWeightsPolicy
    return kind(config.overlap_weight, config.decode_weight, config.temperature)
