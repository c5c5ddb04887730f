"""The pace of an engine's steps, from the objectives of the requests that it computes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvrelay.core.step_cost import StepCost, StepPace
from kvrelay.engine.request import Request


class Gaps(NamedTuple):
    """The shortest objectives between tokens, in seconds: of answers that are in time, and of those whose first token
    is late. 0: none has one."""

    in_time_s: float = 0.0
    late_s: float = 0.0


def gaps_of(requests: Iterable[Request], now_s: float) -> Gaps:
    in_time_s: list[float] = []
    late_s: list[float] = []
    for request in requests:
        objectives = request.objectives
        if objectives is not None:
            (late_s if request.is_late_at(now_s) else in_time_s).append(objectives.itl_s)
    return Gaps(min(in_time_s, default=0.0), min(late_s, default=0.0))


def pace_of(cost: StepCost, spread: float, gaps: Gaps, prompts: Sequence[Request], now_s: float) -> StepPace:
    """``spread``: of the steps with prefills. ``prompts``: those that have no first token yet."""
    objectives = [request.objectives for request in prompts if request.objectives is not None]
    return StepPace.keeping(
        cost,
        spread,
        gaps.in_time_s,
        gaps.late_s,
        min([each.ttft_s for each in objectives], default=0.0),
        are_prompts_late=any(request.is_late_at(now_s) for request in prompts),
    )
