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
    # Few objectives are not alike, and there may be many answers.
    found = {(request.is_late_at(now_s), request.objectives) for request in requests}
    in_time_s, late_s = (
        min([each.itl_s for is_late, each in found if each is not None and is_late is late], default=0.0)
        for late in (False, True)
    )
    return Gaps(in_time_s, late_s)


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
