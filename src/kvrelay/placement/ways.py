"""Which way a request goes, by one estimate in seconds: the frontend's, the simulator's, and so the advisor's.

    local   the decode worker that would serve the request alone computes its prompt
    queue   that worker queues the prefill, and the first free prefill worker takes it (decode-first)
    pair    a prefill worker P computes it at once, for a decode worker D (prefill-first)

``cost.decide``'s formula prices all three; they differ in the first token:

    local = begun + load + steps for what waits there and for what the worker lacks
    queue = begun + QUEUE_S + mean wait of the P's + prefill of what neither the worker nor P has + KV both ways
    pair  = PAIR_S + BOUND * wait at P + load + prefill of what P lacks + KV to D

*begun* is what is left of the step that the worker runs, half of one in the mean: only then it admits the request. P
computes a pair's prompt meanwhile.

A wait at P costs a pair more than the queue, because the pair is bound to P while the queue's entry is not: if P takes
longer than expected another one takes the entry, or the decode worker after all. But who takes it is chance: a P pulls
while pairs wait for it, too. So the entry waits as long as the P's have to do in the mean, and finds the prefix that
they have in the mean, while a pair picks the P with the shortest wait or the longest prefix. A pair whose P has not
begun when it was to, and as much later as the next best way takes, is given back once: to wait for longer could cost
any amount, and so the request pays twice the best at most (as who rents skis until he has paid their price).

Between local and queue the decode worker decides again when it admits the request, by ``cost.decide``: it knows its
prefix hits and how far its steps scatter. The frontend, which knows what waits everywhere, tells it the wait. Pure.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import msgspec

from kvrelay.core.step_cost import STEP_SHARE, StepCost, StepPace, StepWork, bounded_s, prefill_pairs
from kvrelay.placement.base import TRIAL, Objectives, Situation
from kvrelay.placement.cost import HARM, LATE, local_cost, remote_cost
from kvrelay.placement.pair_cost import PairCosts, own_tokens_of
from kvrelay.placement.seconds import Candidates

PAIR_S = 0.006
"""A pair's first token comes this much later than its computation: messages, and steps that P has begun. Measured with
two prefill and two decode workers in conversations (``python -m benchmarks orders``)."""
QUEUE_S = PAIR_S + 0.004
"""The queue server, the pull, and a first token that comes with its KV take about 4 ms on an idle machine
(docs/performance.md); workers do not publish it."""
BOUND = 1.1
"""Seconds that a second of waiting at one worker costs a pair. Chosen by small simulated loads: at 1 bursts were split
as badly as prefill-first splits them, at 1.25 prompts passed by the prefill worker that held their prefix."""
MANY_TOKENS = 100
"""An objective of the 99th percentile bears one late token of so many."""
CHUNK_TOKENS = 2048
"""Prefill tokens of a step: the default of ``max_num_batched_tokens``, which workers do not publish."""


class Way(enum.StrEnum):
    """Values are metric labels."""

    LOCAL = "local"
    PAIR = "pair"
    QUEUE = "queue"


class Estimate(NamedTuple):
    """Seconds to the first token, and the cost in seconds."""

    first_token_s: float
    cost: float


class Ways(msgspec.Struct, frozen=True, omit_defaults=True):
    """The estimates of one request; None: that way is not open. ``best`` is the cheapest, of equal ones the simplest.
    ``wait_s``: what a later prefill waits in the queue, in the mean. ``begins_within_s``: of the pair, as
    ``core.handoff.Pair`` has it."""

    best: Way
    wait_s: float
    begins_within_s: float = 0.0
    local: Estimate | None = None
    pair: Estimate | None = None
    queue: Estimate | None = None
    is_trial: bool = False
    """``best`` is taken against the costs, so that they are measured."""

    def explained(self, decision: str) -> str:
        """For a person: the estimates, or the decode worker's ``decision`` and why there is no pair."""
        if self.best is Way.PAIR:
            found = f"{Way.PAIR.value};{self}"
        else:
            found = decision if self.pair is None else f"{decision};{Way.PAIR.value}={self.pair.first_token_s:.4f}s"
        return f"{found};{TRIAL}" if self.is_trial and TRIAL not in found else found

    def __str__(self) -> str:
        found = [(way.value, getattr(self, way.value)) for way in Way]
        return ";".join(f"{name}={one.first_token_s:.4f}s" for name, one in found if one is not None)


def ways_of(
    prefill: Candidates,
    decode: Candidates,
    costs: PairCosts,
    pair: tuple[int, int],
    alone: int,
    num_here: float,
    objectives: Objectives,
    *,
    is_local_open: bool = True,
    is_queue_open: bool = True,
) -> Ways | None:
    """``pair``: the rows of P and D; ``alone``: that of the decode worker without a pair, at which ``num_here`` tokens
    wait to be computed. ``prefill.load`` has what waits at each P, for whatever reason, and of that as
    ``others_prefill_tokens`` what is not this frontend's pairs. None unless ``costs`` are in seconds."""
    if prefill.costs is None or decode.costs is None or costs.unit != "s":
        return None
    row, column = pair
    situation = _situation(decode, decode.costs.of(alone), alone, num_here, objectives)
    begun_s = _step_seconds(situation) / 2 if situation.num_decodes else 0.0
    there, load, token_s = prefill.costs.of(row), prefill.load, prefill.costs.prefill_token_s
    waits_s = token_s * load.prefill_tokens
    num_loaded, load_s = _loaded(prefill, row)
    own = max(int(own_tokens_of(prefill)[row]) - num_loaded, 1)
    own_s = load_s + there.prefill_seconds(own, num_before=prefill.prompt_tokens - own)
    move_s = float(costs.transfer[row, column])
    here = msgspec.structs.replace(situation, load_s=begun_s + situation.load_s)
    found = {Way.LOCAL: Estimate(*local_cost(here))} if is_local_open else {}
    begins_s = PAIR_S + BOUND * float(waits_s[row])
    paired = _elsewhere(situation, begins_s + own_s + move_s)
    if is_queue_open:
        paired = Estimate(paired.first_token_s, paired.cost + _late_second(situation, decode.num_output, move_s))
    found[Way.PAIR] = paired
    pulled_s = _pulled_seconds(prefill, decode, costs, alone, there)
    if is_queue_open and pulled_s < math.inf:
        found[Way.QUEUE] = _elsewhere(situation, begun_s + QUEUE_S + float(waits_s.mean()) + pulled_s)
    best = min(found, key=lambda way: found[way].cost)
    if best is Way.PAIR:
        waits_s[row] += own_s
    others = [estimate.first_token_s for way, estimate in found.items() if way is not Way.PAIR]
    within_s = begins_s + min(others) if others else 0.0
    estimates = found.get(Way.LOCAL), found.get(Way.PAIR), found.get(Way.QUEUE)
    return Ways(best, bounded_s(float(waits_s.mean())), bounded_s(within_s), *estimates)


def is_surely_local(decode: Candidates, row: int, num_here: float, objectives: Objectives) -> bool:
    """Whether the worker in that row computes the prompt in one step that costs less than the mere way to another one,
    so that ``ways_of`` needs no look: it would answer the same."""
    costs, load = decode.costs, decode.load
    if costs is None or decode.loads is not None:
        return False
    num_cached = decode.block_size * float(decode.overlap_blocks[row])
    num_tokens = decode.prompt_tokens - num_cached + num_here
    running = float(load.num_requests[row])
    context = float(load.context_tokens[row]) if running else 0.0
    step_s = float(costs.prefill_s[row]) + float(costs.decode_s[row]) * running + float(costs.context_s[row]) * context
    step_s += (
        float(costs.prefill_token_s[row]) + float(costs.pair_s[row]) * (num_cached + num_tokens / 2)
    ) * num_tokens
    begun_s = step_s / 2 if running else 0.0
    return (
        num_tokens <= CHUNK_TOKENS
        and step_s <= STEP_SHARE * objectives.itl_s
        and begun_s + step_s <= objectives.ttft_s
        and begun_s + step_s * (1.0 + HARM * max(running, 1.0)) <= PAIR_S
    )


def _elsewhere(situation: Situation, seconds: float) -> Estimate:
    return Estimate(*remote_cost(situation, bounded_s(seconds)))


def _late_second(situation: Situation, num_output: float, move_s: float) -> float:
    """The cost of a pair's second token beyond the objective: it waits for the KV, for which with the queue the first
    one does. One late token in a hundred is borne, and what is late by chance only. The KV of the last step is not
    hidden, and a decode step runs when it arrives."""
    if num_output >= MANY_TOKENS:
        return 0.0
    last_s = move_s * min(CHUNK_TOKENS / max(situation.num_tokens, 1), 1.0)
    # The tokens of that step come together.
    due_s = situation.objectives.itl_s * situation.cost.tokens_per_step
    late_s = max(last_s + 1.5 * _step_seconds(situation) - due_s, 0.0)
    return LATE * late_s * max(situation.objectives.ttft_s / situation.objectives.itl_s, 1.0)


def _step_seconds(situation: Situation) -> float:
    """A step of the decode worker, with a chunk of what waits there."""
    decodes = situation.num_decodes, situation.num_context
    step_s = situation.cost.step_seconds(StepWork(0, 0, *decodes))
    if not situation.num_here:
        return step_s
    chunk = min(situation.num_here, situation.chunk)
    chunk_s = situation.cost.step_seconds(StepWork(chunk, prefill_pairs(chunk, 0), *decodes))
    return max(step_s, min(chunk_s, situation.cost.step_limit_s(situation.objectives.itl_s, 0.0)))


def _pulled_seconds(prefill: Candidates, decode: Candidates, costs: PairCosts, alone: int, there: StepCost) -> float:
    """A prefill that any P takes from the queue: it reads what the decode worker holds, computes what neither has and
    writes what the decode worker lacks. Of the P's the mean, which a random one holds, counts."""
    missing, mean = float(own_tokens_of(decode)[alone]), float(own_tokens_of(prefill).mean())
    own = min(mean, missing)
    move_s = float(costs.transfer[:, alone].min()) * (missing + mean - own) / max(missing, 1.0)
    return there.prefill_seconds(max(int(own), 1), num_before=prefill.prompt_tokens - int(own)) + move_s


def _situation(decode: Candidates, cost: StepCost, alone: int, num_here: float, objectives: Objectives) -> Situation:
    num_decodes = int(decode.load.num_requests[alone])
    num_context = int(decode.load.context_tokens[alone]) if num_decodes else 0
    num_stored, load_s = _loaded(decode, alone)
    num_tokens = max(int(own_tokens_of(decode)[alone]) - num_stored, 1)
    # As the worker's own scheduler cuts, but for how far its steps scatter, which only it knows.
    chunk = StepPace.keeping(cost, 0.0, objectives.itl_s).prefill_budget(
        CHUNK_TOKENS, num_before=num_tokens // 2, num_decodes=num_decodes, num_context=num_context
    )
    return Situation(
        num_tokens=num_tokens,
        waited_s=0.0,
        num_here=int(num_here),
        num_remote_tokens=0,
        num_remote_prefills=0,
        chunk=chunk,
        num_decodes=num_decodes,
        num_context=num_context,
        is_here_open=True,
        cost=cost,
        objectives=objectives,
        num_stored=num_stored,
        load_s=load_s,
        num_cached=max(decode.prompt_tokens - num_tokens - num_stored, 0),
    )


def _loaded(half: Candidates, row: int) -> tuple[int, float]:
    """Tokens that this worker would load, and their seconds."""
    return (0, 0.0) if half.loads is None else (int(half.loads.tokens[row]), float(half.loads.seconds[row]))
