"""Explores worlds: every state that can be reached, or long random runs.

``explore`` visits each state once, by its key. It proves for a scenario that no violation can happen, and that from
each state an idle one can be reached without further faults: no hand-off hangs for ever, nothing stays held.
"""

from __future__ import annotations

import gc
import logging
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.handoff.world import Move, Scenario, Violation, World

_Place = tuple[int, World]
"""A state, by its number and as a world."""


@dataclass
class Report:
    """What an exploration has seen."""

    num_states: int = 0
    num_moves: int = 0
    depth: int = 0
    num_faults: int = -1
    """All states after at most so many faults were visited."""
    is_complete: bool = True
    violation: str | None = None
    trace: list[Move] = field(default_factory=list)

    def __str__(self) -> str:
        whole = "all of them" if self.is_complete else f"bounded; all after at most {self.num_faults} faults"
        end = f": {self.violation}" if self.violation else ""
        return f"{self.num_states} states ({whole}), {self.num_moves} moves, depth {self.depth}{end}"


class _Search:
    """One exploration. States are numbers; worlds are kept only while something is still to be done with them."""

    def __init__(self, scenario: Scenario, max_states: int) -> None:
        self.max_states = max_states
        self.report = Report()
        self.ids: dict[tuple[int, ...], int] = {}
        self.parents: list[tuple[int, Move | None]] = []
        self.depths: list[int] = []
        self.sources: list[list[int]] = []
        """By state: the states that lead to it without a fault."""
        self.idle: list[int] = []
        self.first = World.begin(scenario)

    def run(self) -> Report:
        seeds: Iterator[_Place] = iter([(self._add(self.first.key(), 0, None), self.first)])
        max_faults = self.first.scenario.max_faults
        for num_faults in range(max_faults + 1):
            level = list(self._exhausted(seeds, keep=num_faults < max_faults))
            seeds = self._after_faults(level)
            if not self.is_going_on:
                break
            self.report.num_faults = num_faults
        self.report.num_states, self.report.depth = len(self.parents), max(self.depths)
        return self.report

    @property
    def is_going_on(self) -> bool:
        return self.report.is_complete and self.report.violation is None

    def _exhausted(self, seeds: Iterator[_Place], *, keep: bool) -> Iterator[_Place]:
        """Visit everything that ``seeds`` lead to without a fault, nearest first. Yields it if faults may follow."""
        for seed in seeds:
            todo = deque([seed])
            while todo and self.is_going_on:
                number, world = todo.popleft()
                if world.is_idle:
                    self.idle.append(number)
                for move in world.plain_moves():
                    after, is_new = self._visit(number, world, move)
                    if after is None:
                        return
                    if is_new:
                        todo.append(after)
                    self.sources[after[0]].append(number)
                if keep:
                    yield number, world

    def _after_faults(self, level: list[_Place]) -> Iterator[_Place]:
        """What one more fault makes of these worlds, if it is new."""
        for number, world in level:
            for move in world.fault_moves():
                after, is_new = self._visit(number, world, move)
                if after is None:
                    return
                if is_new:
                    yield after

    def _visit(self, number: int, world: World, move: Move) -> tuple[_Place | None, bool]:
        """Where ``move`` leads, and whether that is new. None if the search ends here."""
        self.report.num_moves += 1
        try:
            after = world.after(move)
            after.check()
        except Exception as exc:  # noqa: BLE001 - whatever a side raises, a worker's thread would have ended
            self.report.violation = f"{type(exc).__name__}: {exc}"
            self.report.trace = [*trace(self.parents, number), move]
            return None, False
        key = after.key()
        known = self.ids.get(key)
        if known is not None:
            return (known, after), False
        if len(self.parents) >= self.max_states:
            self.report.is_complete = False
            return None, False
        return (self._add(key, number, move), after), True

    def _add(self, key: tuple[int, ...], parent: int, move: Move | None) -> int:
        number = self.ids[key] = len(self.parents)
        self.depths.append(self.depths[parent] + 1 if number else 0)
        self.parents.append((parent, move))
        self.sources.append([])
        return number


@contextmanager
def undisturbed() -> Iterator[None]:
    """Worlds are freed by their reference counts, and what sides log of a thousand worlds is no news."""
    gc.disable()
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


@undisturbed()
def explore(scenario: Scenario, max_states: int = 1_000_000) -> Report:
    """Visit every state of ``scenario``, those after fewer faults first. Stops at the first violation.

    A state that was visited after fewer faults is not visited again after more: whatever may follow then, may follow
    from there, too.
    """
    search = _Search(scenario, max_states)
    report = search.run()
    hanging = find_hanging(search.sources, search.idle) if search.is_going_on else None
    if hanging is not None:
        report.trace = trace(search.parents, hanging)
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


@undisturbed()
def wander(scenario: Scenario, seed: int, num_moves: int = 20_000) -> Report:
    """One random run: faults until their budget is spent, then on until everything has ended."""
    rng = random.Random(seed)
    world = World.begin(scenario)
    report = Report(is_complete=False)
    for _ in range(num_moves):
        plain, faults = world.plain_moves(), world.fault_moves()
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
        except Exception as exc:  # noqa: BLE001 - whatever a side raises, a worker's thread would have ended
            report.violation = f"{type(exc).__name__}: {exc}"
            return report
    if not world.is_idle:
        report.violation = f"not idle after {num_moves} moves:\n  {world.complain()}"
    return report


__all__ = ["Report", "Violation", "explore", "replay", "wander"]
