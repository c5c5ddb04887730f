"""How far retention is from the best: one engine in virtual time, beside a policy that knows when each session returns.

``python -m tests.engine.clairvoyant`` prints the table of ``docs/agents.md``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple
from unittest import mock

from tests.engine.conftest import build_engine

from kvrelay.core.clock import ManualClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine import core
from kvrelay.engine.cached_free import ByValue, CachedBlock
from kvrelay.engine.core import EngineCore
from kvrelay.engine.pauses import Pause
from kvrelay.engine.request import Request
from kvrelay.engine.step import ModelOutput, SchedulerOutput

Policy = Literal["recency", "value", "next use"]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SIZE = 16
FIRST_PROMPT, NEW_TOKENS = 750, 272
TOOLS = {"read": 0.26, "shell": 1.7, "build": 11.6}
"""Medians in seconds."""
SPREAD, SHORTEST_S, LONGEST_S = 0.8, 0.1, 30.0
STEP_S, PREFILL_TOKEN_S = 2e-4, 3e-5


class ByNextUse:
    """The block whose next use is the furthest gives way (Belady, "A study of replacement algorithms", 1966)."""

    chance_later = 1.0

    def __init__(self) -> None:
        self.next_use_s = math.inf
        """Of what is released now."""
        self._keys: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []
        self._num_released = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._keys

    def add(self, block_ids: list[int], pause: Pause | None) -> None:
        for block_id in block_ids:
            self._num_released += 1
            self._keys[block_id] = -self.next_use_s, self._num_released
            heapq.heappush(self._heap, (self._keys[block_id], block_id))

    def remove(self, block_id: int) -> None:
        del self._keys[block_id]

    def pop(self, count: int, num_children: Sequence[int], cached: Mapping[int, CachedBlock]) -> list[int]:
        while True:
            key, block_id = heapq.heappop(self._heap)
            if self._keys.get(block_id) == key:
                del self._keys[block_id]
                return [block_id]

    def bared(self, block_id: int) -> None:
        """Its next use counts."""

    def newest(self) -> Iterator[int]:
        return reversed(self._keys)

    def clear(self) -> list[int]:
        blocks, self._keys = list(self._keys), {}
        return blocks


class Played(NamedTuple):
    """Prompt tokens that were computed, and the mean first token of later turns."""

    num_computed: int
    first_token_s: float


def _engine(policy: Policy, num_blocks: int, clock: ManualClock) -> tuple[EngineCore, ByNextUse]:
    """Its steps take the time of what they compute."""
    free = ByNextUse()
    with mock.patch.object(core, "ByValue", (lambda *_: free) if policy == "next use" else ByValue):
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
    return engine, free


def play(policy: Policy, share: float, seed: int, *, num_sessions: int = 64, num_turns: int = 12) -> Played:
    """Turns one after the other, each as it is due or once the one before it has ended. The pool has room for ``share``
    of the sessions at their ends."""
    rng, clock = random.Random(seed), ManualClock()
    longest = FIRST_PROMPT + (num_turns - 1) * (NEW_TOKENS + 20)
    engine, free = _engine(policy, int(num_sessions * (longest // SIZE) * share), clock)
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
        free.next_use_s = clock.now() + pause_s if num_left[number] else math.inf
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
