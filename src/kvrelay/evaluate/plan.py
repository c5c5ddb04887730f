"""How much is measured: with how many requests, at which points and in how many starts all fits a budget of time. Pure.

    wishes     what the sections would measure, the most important first
    pace       what requests and starts take on this machine, as the calibration has found
    plan       requests for each point, and the estimated seconds, which sum to at most the budget

First the points get fewer requests, at least MIN_REQUESTS. If that is not enough, each server is started once for all
its rounds. Then points are left out, the least important first, and named.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.core.step_cost import StepWork
from kvrelay.evaluate.load import EvaluatedLoad, Point
from kvrelay.simulate.costs import Costs

MIN_REQUESTS = 6
"""Of a point: one that has answered fewer shows nothing."""
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Of the seconds of sending that are wanted at each point; with 0 it has the fewest requests."""
POINT_S = 1.5
"""A guess of what a point takes besides its requests."""
WARM_TOKENS = 16
"""The longest answer of a warm-up."""


class Pace(msgspec.Struct, frozen=True):
    """In seconds: a server's start and end, a warm-up, and one request alone. ``per_s``: requests that 1P1D answers in
    a second. All for the requests that are sent, which may be shorter than the load's."""

    start_s: float
    warm_s: float
    alone_s: float
    per_s: float

    def rate_of(self, point: Point) -> float:
        """Requests in a second; those that clients do not wait for come at the point's own rate."""
        return point.rate or min(self.per_s, max(point.concurrency, 1) / self.alone_s)

    def num_at(self, point: Point, send_s: float) -> int:
        """Requests of a point that sends for so long; each client has one at least."""
        return max(MIN_REQUESTS, point.concurrency, round(send_s * self.rate_of(point)))

    def point_s(self, point: Point, num: int) -> float:
        """Of so many requests, from the warm-up to the last answer, which had company; or of idleness."""
        if point.idle_s:
            return POINT_S + point.idle_s
        return POINT_S + self.warm_s + num / self.rate_of(point) + 2 * self.alone_s


def pace_of(costs: Costs, load: EvaluatedLoad, start_s: float, per_s: float = 0.0) -> Pace:
    """``per_s`` 0: not measured yet, so estimated for decode steps of sixteen on cores that prefills share."""
    prompt, answer, step = load.mean_prompt, load.mean_answer, costs.step
    prefill_s = step.prefill_seconds(round(prompt))
    token_s = step.token_seconds(StepWork(0, 0, 1, round(prompt))) + costs.between_steps_s / step.tokens_per_step
    warm_s = 2 * prefill_s + min(answer, WARM_TOKENS) * token_s
    added_s = (step.decode_s + step.context_s * prompt) / step.tokens_per_step
    estimated = 1.0 / (prefill_s + answer * (token_s / 16 + added_s))
    return Pace(start_s, warm_s, max(prefill_s + answer * token_s, 1e-3), per_s or estimated)


class Wish(msgspec.Struct, frozen=True):
    """What a section would measure: so many servers, each at all ``points``, the most important first; and how long it
    simulates. ``section``: its name, and after " / " the part of it that has these points."""

    section: str
    num_cases: int = 0
    points: tuple[Point, ...] = ()
    simulated_s: float = 0.0

    @property
    def of(self) -> str:
        """The section without the part of it."""
        return _section_of(self.section)


class Share(msgspec.Struct, frozen=True):
    """What a wish gets: requests by the point's name, and how long all of it takes. ``left_out``: points, or the whole
    of a wish that would only simulate."""

    section: str
    requests: dict[str, int]
    seconds: float
    left_out: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """``is_held``: a server is started once for all rounds, not once for each."""

    shares: tuple[Share, ...] = ()
    is_held: bool = False

    @property
    def seconds(self) -> float:
        return sum(share.seconds for share in self.shares)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return not any(share.left_out for share in self.shares)

    def seconds_of(self, section: str) -> float:
        """Of all wishes of the section."""
        return sum(share.seconds for share in self.shares if _section_of(share.section) == section)

    def has(self, section: str) -> bool:
        """Whether there is time for any of it; a section that wished nothing has all."""
        return section not in self.sections or self.seconds_of(section) > 0.0

    @property
    def sections(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_section_of(share.section) for share in self.shares))

    def left_out_of(self, section: str) -> tuple[str, ...]:
        return tuple(
            point for share in self.shares if _section_of(share.section) == section for point in share.left_out
        )

    def requests_of(self, section: str) -> dict[str, int]:
        """By point, of all wishes of the section."""
        return {at: num for share in self.shares if share.section == section for at, num in share.requests.items()}


def _section_of(name: str) -> str:
    """Without the part of it."""
    return name.partition(" / ")[0]


def plan_of(wishes: Sequence[Wish], pace: Pace, rounds: int, send_s: float, budget_s: float) -> Plan:
    """The plan with most requests that takes at most ``budget_s``. ``send_s``: wanted of each point."""
    everything = [wish.points for wish in wishes]
    for is_held, points in ((False, everything), (True, everything), (True, _fitting(wishes, pace, rounds, budget_s))):
        for part in SHARES:
            starts = 1 if is_held else rounds
            shares = [
                share_of(wish, own, pace, rounds, starts, part * send_s)
                for wish, own in zip(wishes, points, strict=True)
            ]
            plan = Plan(tuple(shares), is_held)
            if plan.seconds <= budget_s:
                return plan
    raise AssertionError("what fits with the fewest requests does not fit")


def _fitting(wishes: Sequence[Wish], pace: Pace, rounds: int, budget_s: float) -> list[tuple[Point, ...] | None]:
    """Of the wishes in their order, the points that still fit; None: not even the simulation of one without points."""
    found, taken_s = list[tuple[Point, ...] | None](), list[float]()

    def fits(wish: Wish, points: tuple[Point, ...]) -> bool:
        return sum([*taken_s, share_of(wish, points, pace, rounds, 1).seconds]) <= budget_s

    for wish in wishes:
        points: tuple[Point, ...] = ()
        for point in wish.points:
            if fits(wish, (*points, point)):
                points = (*points, point)
        found.append(points if points or (not wish.points and fits(wish, ())) else None)
        taken_s.append(share_of(wish, found[-1], pace, rounds, 1).seconds)
    return found


def share_of(
    wish: Wish, points: Sequence[Point] | None, pace: Pace, rounds: int, starts: int, send_s: float = 0.0
) -> Share:
    """What a wish takes with these of its points, in so many starts of each server; None: nothing of it."""
    if points is None:
        return Share(wish.section, {}, 0.0, tuple(point.name for point in wish.points) or (wish.section,))
    requests = {point.name: pace.num_at(point, send_s) for point in points}
    sent_s = rounds * sum(pace.point_s(point, requests[point.name]) for point in points)
    seconds = wish.num_cases * (starts * pace.start_s * bool(points) + sent_s) + wish.simulated_s
    left_out = tuple(point.name for point in wish.points if point.name not in requests)
    return Share(wish.section, requests, seconds, left_out)
