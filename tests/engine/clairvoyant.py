"""How far retention is from the best: engines in virtual time, beside a policy that knows when each session returns.

``python -m tests.engine.clairvoyant`` prints what ``docs/agents.md`` says of the bound: of one engine that serves turn
after turn, without tiers, and of simulated workers with host memory.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

from benchmarks.agents import POLICIES, Outcome, blocks_of, load_of, simulated
from tests.engine.conftest import build_engine

from kvrelay.core.clock import Clock, ManualClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine import core
from kvrelay.engine.cached_free import ByValue, CachedBlock
from kvrelay.engine.core import EngineCore
from kvrelay.engine.pauses import Pause
from kvrelay.engine.request import Request
from kvrelay.engine.step import ModelOutput, SchedulerOutput
from kvrelay.simulate import virtual_tiers
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.virtual_tiers import VirtualHost

Policy = Literal["recency", "value", "next use"]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SIZE = 16
FIRST_PROMPT, NEW_TOKENS = 750, 272
TOOLS = {"read": 0.26, "shell": 1.7, "build": 11.6}
"""Medians in seconds."""
SPREAD, SHORTEST_S, LONGEST_S = 0.8, 0.1, 30.0
STEP_S, PREFILL_TOKEN_S = 2e-4, 3e-5
OVERDUE_S = 1.0
CLUSTER = {
    "sessions": 64,
    "turns": 12,
    "tools": 3,
    "prompt": 1500,
    "answer": 40,
    "rate": 4.0,
    "prefetch_s": 0.0,
    "share": 0.25,
    "block_size": SIZE,
    "mock_costs": False,
    "costs": None,
}
"""The options of ``python -m benchmarks agents``, as they are without any."""


class ByNextUse:
    """The block whose next use is the furthest gives way (Belady, "A study of replacement algorithms", 1966).

    ``next_use_s`` tells it of what is released with this pause. What is overdue by ``overdue_s`` has returned to
    another worker, or was not repeated: there is no next use."""

    def __init__(self, clock: Clock, next_use_s: Callable[[Pause | None], float], overdue_s: float = math.inf) -> None:
        self._clock, self._next_use_s, self._overdue_s = clock, next_use_s, overdue_s
        self._home: dict[int, int] = {}
        self._groups: dict[int, tuple[float, dict[int, None]]] = {}
        """By number, in the order of release: when the blocks are used again, and they."""
        self._number = 0
        self.chance_later = 0.0
        """Of what gave way last: the later its next use is, the less."""

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._home

    def add(self, block_ids: list[int], pause: Pause | None) -> None:
        self._number += 1
        self._groups[self._number] = self._next_use_s(pause), dict.fromkeys(block_ids)
        self._home.update(dict.fromkeys(block_ids, self._number))

    def remove(self, block_id: int) -> None:
        number = self._home.pop(block_id)
        blocks = self._groups[number][1]
        del blocks[block_id]
        if not blocks:
            del self._groups[number]

    def pop(self, count: int, num_children: Sequence[int], cached: Mapping[int, CachedBlock]) -> list[int]:
        number = max(self._groups, key=self._used_again_s)
        self.chance_later = math.exp(-self._used_again_s(number))
        block_id = next(iter(self._groups[number][1]))
        self.remove(block_id)
        return [block_id]

    def _used_again_s(self, number: int) -> float:
        next_use_s = self._groups[number][0]
        return next_use_s if next_use_s + self._overdue_s > self._clock.now() else math.inf

    def bared(self, block_id: int) -> None:
        """Its next use counts."""

    def newest(self) -> Iterator[int]:
        return reversed(self._home)

    def clear(self) -> list[int]:
        blocks, self._home, self._groups = list(self._home), {}, {}
        return blocks


class HostByNextUse(VirtualHost):
    """Of the blocks that may give way, that with the least chance does: nothing grows old."""

    @property
    def _clock(self) -> float:
        return 0.0


class Played(NamedTuple):
    """Prompt tokens that were computed, and the mean first token of later turns."""

    num_computed: int
    first_token_s: float


def _engine(
    policy: Policy, num_blocks: int, clock: ManualClock, next_use_s: Callable[[Pause | None], float]
) -> EngineCore:
    """Its steps take the time of what they compute."""
    by_next_use = ByNextUse(clock, next_use_s)
    with mock.patch.object(core, "ByValue", (lambda *_: by_next_use) if policy == "next use" else ByValue):
        engine = build_engine(
            num_blocks=num_blocks,
            block_size=SIZE,
            max_num_batched_tokens=8192,
            clock=clock,
            kv_retention="recency" if policy == "recency" else "value",
        )
    execute = engine.executor.execute

    def timed(work: SchedulerOutput) -> ModelOutput:
        clock.advance(STEP_S + PREFILL_TOKEN_S * engine.scheduler.step_work().num_prefill_tokens)
        return execute(work)

    engine.executor.execute = timed  # type: ignore[method-assign]
    return engine


def play(policy: Policy, share: float, seed: int, *, num_sessions: int = 64, num_turns: int = 12) -> Played:
    """Turns one after the other, each as it is due or once the one before it has ended. The pool has room for ``share``
    of the sessions at their ends."""
    rng, clock, next_use_s = random.Random(seed), ManualClock(), math.inf
    longest = FIRST_PROMPT + (num_turns - 1) * (NEW_TOKENS + 20)
    engine = _engine(policy, int(num_sessions * (longest // SIZE) * share), clock, lambda _: next_use_s)
    histories = [
        [(131 * number + 7 * at + at * at % 17) % 400 + 3 for at in range(FIRST_PROMPT)]
        for number in range(num_sessions)
    ]
    due = [(0.05 * number, number) for number in range(num_sessions)]
    num_left, waits_s = [num_turns] * num_sessions, list[float]()
    while due:
        due_s, number = heapq.heappop(due)
        clock.advance(max(due_s - clock.now(), 0.0))
        kind = list(TOOLS)[number % len(TOOLS)]
        pause_s = min(max(rng.lognormvariate(math.log(TOOLS[kind]), SPREAD), SHORTEST_S), LONGEST_S)
        num_left[number] -= 1
        next_use_s = clock.now() + pause_s if num_left[number] else math.inf
        name, first_s = f"{number} {num_left[number]}", math.inf
        engine.add_request(Request(name, list(histories[number]), GREEDY))
        while engine.has_work():
            for output in engine.step().outputs:
                first_s = min(first_s, clock.now())
                histories[number] += output.token_ids
        if num_left[number] < num_turns - 1:
            waits_s.append(first_s - due_s)
        histories[number] += [rng.randrange(3, 400) for _ in range(NEW_TOKENS)]
        engine.session_paused(name, kind)
        if num_left[number]:
            heapq.heappush(due, (clock.now() + pause_s, number))
    return Played(engine.stats().tokens.num_prefilled, sum(waits_s) / len(waits_s))


def foresee(setting: tuple[int, int], load: Sequence[Arrival], given: dict[str, Any]) -> Outcome:
    """``benchmarks.agents.simulated`` with pools and host memory that know when each session returns: by the block with
    which its prompt ends."""
    vocab_size, pauses_s = ClusterSpec().vocab_size, dict[int, float]()
    for arrival in load:
        if arrival.after is not None:
            hashes = load[arrival.after].hashes(arrival.after, vocab_size, SIZE)
            pauses_s[hashes[-1]] = arrival.time_s

    def by_next_use(clock: Clock, *_: object) -> ByNextUse:
        def next_use_s(pause: Pause | None) -> float:
            marks = () if pause is None else pause.marks
            return clock.now() + min((pauses_s.get(mark, math.inf) for mark in marks), default=math.inf)

        return ByNextUse(clock, next_use_s, OVERDUE_S)

    with (
        mock.patch.object(core, "ByValue", by_next_use),
        mock.patch.object(virtual_tiers, "VirtualHost", HostByNextUse),
    ):
        return simulated(setting, POLICIES["value"], load, given)


def print_cluster(host_share: float, number: int) -> None:
    """1P1D, a pool for a quarter of the sessions, and host memory for ``host_share``."""
    given = CLUSTER | {"host_share": host_share}
    load = load_of(given, number)
    given["blocks"] = blocks_of(load, given["sessions"] * given["share"])
    recency = simulated((1, 1), POLICIES["recency"], load, given)
    for name, found in (
        ("value", simulated((1, 1), POLICIES["value"], load, given)),
        ("next use", foresee((1, 1), load, given)),
    ):
        tokens, first = found.num_computed / recency.num_computed, found.ttft_s / recency.ttft_s
        print(f"1P1D, host memory for {host_share:.2f}, load {number}, {name}: {tokens:.2f} {first:.2f} of recency's")


if __name__ == "__main__":
    for share in (0.125, 0.25, 0.4375):
        for seed in (1, 2):
            least, most = play("next use", share, seed), play("recency", share, seed)
            value = play("value", share, seed)
            for name, played in (("value", value), ("next use", least)):
                ratios = [mine / theirs for mine, theirs in zip(played, most)]
                print(
                    f"{share:6.2f} of the sessions, seed {seed}, {name}: {ratios[0]:.2f} {ratios[1]:.2f} of recency's"
                )
    for host_share in (0.0, 1 / 3, 1.25):
        for number in (0, 1):
            print_cluster(host_share, number)
