"""Explores worlds: every state that can be reached (breadth first), or long random runs.

``explore`` visits each state once, by its key. It proves for a scenario that no violation can happen, and that from
each state an idle one can be reached without further faults: no hand-off hangs for ever, nothing stays held.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from tests.handoff.world import Move, Scenario, Violation, World


@dataclass
class Report:
    """What an exploration has seen."""

    num_states: int = 0
    num_moves: int = 0
    depth: int = 0
    is_complete: bool = True
    violation: str | None = None
    trace: list[Move] = field(default_factory=list)

    def __str__(self) -> str:
        whole = "all of them" if self.is_complete else "bounded"
        end = f": {self.violation}" if self.violation else ""
        return f"{self.num_states} states ({whole}), {self.num_moves} moves, depth {self.depth}{end}"


def explore(scenario: Scenario, max_states: int = 1_000_000) -> Report:
    """Visit every state of ``scenario``. Stops at the first violation, with the shortest way to it."""
    report = Report()
    first = World.begin(scenario)
    ids = {first.key(): 0}
    parents: list[tuple[int, Move | None]] = [(0, None)]
    depths = [0]
    sources: list[list[int]] = [[]]
    """By state: the states that lead to it without a fault."""
    idle: list[int] = []
    todo: deque[tuple[int, World]] = deque([(0, first)])
    while todo:
        number, world = todo.popleft()
        if world.is_idle:
            idle.append(number)
        for move in world.moves():
            report.num_moves += 1
            try:
                after = world.after(move)
                after.check()
            except AssertionError as exc:
                report.violation = f"{type(exc).__name__}: {exc}"
                report.trace = [*trace(parents, number), move]
                report.num_states, report.depth = len(parents), max(depths)
                return report
            key = after.key()
            known = ids.get(key)
            if known is None:
                known = ids[key] = len(parents)
                parents.append((number, move))
                depths.append(depths[number] + 1)
                sources.append([])
                todo.append((known, after))
                if len(parents) >= max_states:
                    report.num_states, report.depth, report.is_complete = len(parents), max(depths), False
                    return report
            if move[0] not in World.FAULTS:
                sources[known].append(number)
    report.num_states, report.depth = len(parents), max(depths)
    hanging = find_hanging(sources, idle)
    if hanging is not None:
        report.trace = trace(parents, hanging)
        stuck = replay(scenario, report.trace)
        report.violation = f"from here nothing leads to an idle state:\n  {stuck.complain()}"
    return report


def find_hanging(sources: list[list[int]], idle: list[int]) -> int | None:
    """The first state from which no idle one can be reached without a fault."""
    reached = bytearray(len(sources))
    todo = list(idle)
    for number in idle:
        reached[number] = 1
    while todo:
        for source in sources[todo.pop()]:
            if not reached[source]:
                reached[source] = 1
                todo.append(source)
    hanging = reached.find(0)
    return None if hanging < 0 else hanging


def trace(parents: list[tuple[int, Move | None]], number: int) -> list[Move]:
    """How a state is reached."""
    moves: list[Move] = []
    while number:
        number, move = parents[number]
        assert move is not None
        moves.append(move)
    return moves[::-1]


def replay(scenario: Scenario, moves: list[Move]) -> World:
    """The world after ``moves``."""
    world = World.begin(scenario)
    for move in moves:
        world.apply(move)
    return world


def wander(scenario: Scenario, seed: int, num_moves: int = 20_000) -> Report:
    """One random run: faults until their budget is spent, then on until everything has ended."""
    rng = random.Random(seed)
    world = World.begin(scenario)
    report = Report(is_complete=False)
    for _ in range(num_moves):
        moves = world.moves()
        plain = [move for move in moves if move[0] not in World.FAULTS]
        faults = moves[len(plain) :]
        if world.is_idle and not world.net and len(plain) <= 1:
            return report
        if faults and rng.random() < 0.05:
            move = rng.choice(faults)
        else:
            # Time is slow beside everything else.
            busy = [move for move in plain if move != ("advance",)]
            move = rng.choice(busy) if busy and rng.random() < 0.9 else rng.choice(plain)
        report.num_moves += 1
        report.trace.append(move)
        try:
            world.apply(move)
            world.check()
        except AssertionError as exc:
            report.violation = f"{type(exc).__name__}: {exc}"
            return report
    if not world.is_idle:
        report.violation = f"not idle after {num_moves} moves:\n  {world.complain()}"
    return report


__all__ = ["Report", "Violation", "explore", "replay", "wander"]
