"""The pace of an engine's steps, from the objectives of the requests that it computes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvrelay.core.step_cost import StepCost, StepPace
from kvrelay.engine.request import Request


class Gaps(NamedTuple):
    """The shortest objectives between tokens, in seconds; 0: none has one. ``yielding_s``: of answers that make room
    while prompts are late: their own first token was late, or most of those beside them, and nobody set their
    objective. ``strict_s``: of all others."""

    strict_s: float = 0.0
    yielding_s: float = 0.0


def gaps_of(requests: Iterable[Request], now_s: float) -> Gaps:
    rows = [(request.objectives, request.is_late_at(now_s)) for request in requests if request.objectives is not None]
    are_most_late = 2 * sum(is_late for _, is_late in rows) > len(rows)
    strict_s: list[float] = []
    yielding_s: list[float] = []
    for objectives, is_late in rows:
        yields = is_late or (objectives.has_default_itl and are_most_late)
        (yielding_s if yields else strict_s).append(objectives.itl_s)
    return Gaps(min(strict_s, default=0.0), min(yielding_s, default=0.0))


def pace_of(cost: StepCost, spread: float, gaps: Gaps, prompts: Sequence[Request], now_s: float) -> StepPace:
    """``spread``: of the steps with prefills. ``prompts``: those that have no first token yet."""
    objectives = [request.objectives for request in prompts if request.objectives is not None]
    return StepPace.keeping(
        cost,
        spread,
        gaps.strict_s,
        gaps.yielding_s,
        min([each.ttft_s for each in objectives], default=0.0),
        are_prompts_late=any(request.is_late_at(now_s) for request in prompts),
    )
