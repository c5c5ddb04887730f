"""A data-parallel group in small: engines, the coordinator, and messages that are late, reordered and repeated.

A state is a value. ``moves`` are all things that may happen next, ``after`` makes one of them happen. The real state
machines decide; what is modelled here is the engine's loop, the collective and the network:

    asleep ──a request or a message──> loop ──begin_round──> in step n ──every rank has entered n──> loop
       ^                                 │
       └──────── NO_STEP ────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvrelay.dp.protocol import Coordinator, Participant, Round, StartStep

T = TypeVar("T")

LOOP, IN_STEP, ASLEEP = "loop", "in step", "asleep"
Move = tuple[str, int, int]
"""What happens, to which rank, with which step."""


class Violation(AssertionError):
    """The protocol does what it must never do."""


@dataclass(frozen=True)
class Scenario:
    """``requests``: the number of steps that each takes; any of them may arrive at any rank at any time."""

    num_ranks: int = 2
    lookahead: int = 1
    requests: tuple[int, ...] = (1, 2)
    num_repeats: int = 1


class RankState(NamedTuple):
    phase: str = ASLEEP
    local_step: int = 0
    coord_step: int = 0
    num_entered: int = 0
    """Collectives entered. The k-th of one rank meets the k-th of the others."""
    num_batches: int = 0
    """Steps that its requests still need."""
    must_clean: bool = False


class State(NamedTuple):
    ranks: tuple[RankState, ...]
    coordinator: int = 0
    starts: tuple[int, ...] = ()
    """StartStep messages on their way."""
    notices: tuple[tuple[int, int], ...] = ()
    """StepsUntil messages on their way: rank, step."""
    num_arrived: int = 0
    num_repeated: int = 0
    last_real: int = 0


def first_state(scenario: Scenario) -> State:
    return State(tuple(RankState() for _ in range(scenario.num_ranks)))


def moves(scenario: Scenario, state: State) -> Iterator[Move]:
    for rank, each in enumerate(state.ranks):
        if state.num_arrived < len(scenario.requests):
            yield "arrive", rank, 0
        if each.phase == LOOP:
            yield "round", rank, 0
        if each.phase == IN_STEP and all(other.num_entered >= each.num_entered for other in state.ranks):
            yield "leave step", rank, 0
    may_repeat = state.num_repeated < scenario.num_repeats
    for step in dict.fromkeys(state.starts):
        yield "coordinate", 0, step
        if may_repeat:
            yield "coordinate, and again later", 0, step
    for rank, step in dict.fromkeys(state.notices):
        yield "notify", rank, step
        if may_repeat:
            yield "notify, and again later", rank, step


def after(scenario: Scenario, state: State, move: Move) -> State:
    """Raises Violation."""
    kind, rank, step = move
    if kind.endswith("again later"):
        state = state._replace(num_repeated=state.num_repeated + 1)
    if kind.startswith("coordinate"):
        return _coordinate(scenario, state, step, is_kept="again" in kind)
    each = state.ranks[rank]
    if kind == "arrive":
        batches = each.num_batches + scenario.requests[state.num_arrived]
        state = state._replace(num_arrived=state.num_arrived + 1)
        return _put(state, rank, each._replace(num_batches=batches, phase=_awake(each)))
    if kind.startswith("notify"):
        if "again" not in kind:
            state = state._replace(notices=_without(state.notices, (rank, step)))
        participant = _participant(each)
        participant.notified(step)
        return _put(state, rank, each._replace(coord_step=participant.coord_step, phase=_awake(each)))
    if kind == "leave step":
        return _put(state, rank, each._replace(phase=LOOP))
    return _round(scenario, state, rank)


def is_quiet(scenario: Scenario, state: State) -> bool:
    """All requests are answered, no message is on its way, every rank sleeps."""
    is_over = state.num_arrived == len(scenario.requests) and not state.starts and not state.notices
    return is_over and all(each.phase == ASLEEP and not each.num_batches for each in state.ranks)


def check(scenario: Scenario, state: State) -> None:
    """What must hold in every state. Raises Violation."""
    steps = [each.num_entered for each in state.ranks]
    if max(steps) > state.last_real + scenario.lookahead + 1:
        raise Violation(f"step {max(steps)} is superfluous: the last with a request was {state.last_real}")
    for rank, each in enumerate(state.ranks):
        if each.num_entered != each.local_step:
            raise Violation(f"rank {rank} counts step {each.local_step} in its collective {each.num_entered}")
    if is_quiet(scenario, state) and len(set(steps)) > 1:
        raise Violation(f"only some ranks ran the last step: {steps}")


def _coordinate(scenario: Scenario, state: State, step: int, *, is_kept: bool) -> State:
    if not is_kept:
        state = state._replace(starts=_without(state.starts, step))
    coordinator = Coordinator(scenario.lookahead)
    coordinator.step = state.coordinator
    told = coordinator.start_step(step)
    if told is None:
        return state
    if told.step <= state.coordinator:
        raise Violation(f"every rank is told of step {told.step} again")
    notices = tuple(sorted((*state.notices, *((rank, told.step) for rank in range(scenario.num_ranks)))))
    return state._replace(coordinator=coordinator.step, notices=notices)


def _round(scenario: Scenario, state: State, rank: int) -> State:
    each = state.ranks[rank]
    participant = _participant(each)
    kind, start = participant.begin_round(has_batch=each.num_batches > 0)
    each = each._replace(local_step=participant.local_step, coord_step=participant.coord_step)
    if isinstance(start, StartStep):
        state = state._replace(starts=tuple(sorted((*state.starts, start.step))))
    if kind is Round.NO_STEP:
        phase = LOOP if each.must_clean else ASLEEP
        return _put(state, rank, each._replace(phase=phase, must_clean=False))
    each = each._replace(phase=IN_STEP, num_entered=each.num_entered + 1)
    if kind is Round.REAL:
        left = each.num_batches - 1
        each = each._replace(num_batches=left, must_clean=left == 0)
        state = state._replace(last_real=max(state.last_real, each.num_entered))
    return _put(state, rank, each)


def _participant(each: RankState) -> Participant:
    participant = Participant()
    participant.local_step, participant.coord_step = each.local_step, each.coord_step
    return participant


def _awake(each: RankState) -> str:
    return LOOP if each.phase == ASLEEP else each.phase


def _put(state: State, rank: int, each: RankState) -> State:
    return state._replace(ranks=(*state.ranks[:rank], each, *state.ranks[rank + 1 :]))


def _without(items: tuple[T, ...], item: T) -> tuple[T, ...]:
    at = items.index(item)
    return (*items[:at], *items[at + 1 :])


@dataclass
class Report:
    num_states: int
    violation: str = ""
    trace: tuple[Move, ...] = ()

    def __str__(self) -> str:
        return f"{self.num_states} states; {self.violation or 'no violation'} {self.trace or ''}"


def explore(scenario: Scenario, max_states: int = 3_000_000) -> Report:
    """Visit every state that can be reached, breadth first; from each one, all ranks must get to sleep again.

    Stops at the first violation, with the shortest way to it.
    """
    first = first_state(scenario)
    parents: dict[State, tuple[State, Move] | None] = {first: None}
    sources: dict[State, list[State]] = {first: []}
    quiet: list[State] = []
    todo = [first]
    for state in todo:
        if is_quiet(scenario, state):
            quiet.append(state)
        for move in moves(scenario, state):
            try:
                following = after(scenario, state, move)
                check(scenario, following)
            except Violation as exc:
                return Report(len(parents), str(exc), (*_trace(parents, state), move))
            if following not in parents:
                parents[following] = (state, move)
                sources[following] = []
                todo.append(following)
                assert len(todo) < max_states, "the scenario is too large to be explored"
            sources[following].append(state)
    stuck = parents.keys() - _reaching(sources, quiet)
    if stuck:
        worst = min(stuck, key=lambda state: len(_trace(parents, state)))
        return Report(len(parents), f"the group never sleeps again: {worst}", _trace(parents, worst))
    return Report(len(parents))


def _reaching(sources: dict[State, list[State]], goals: list[State]) -> set[State]:
    """The states from which one of ``goals`` can be reached."""
    found, todo = set(goals), list(goals)
    while todo:
        for state in sources[todo.pop()]:
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


def _trace(parents: dict[State, tuple[State, Move] | None], state: State) -> tuple[Move, ...]:
    way: list[Move] = []
    while (source := parents[state]) is not None:
        state, move = source
        way.append(move)
    return tuple(reversed(way))
