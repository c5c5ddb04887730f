"""Chats in a closed loop beside long prompts at a rate: one decode worker and one prefill worker, on a virtual clock.

The decode worker is a real engine with real placement. The prefill worker is a line of prefills; it moves no KV. Step
times are those that were measured with the bundled checkpoint on two cores. Workers, frontend and client share these
cores, so steps scatter, and some steps beside a busy prefill worker take many times as long. The prefill worker's first
prefill is slow, as on a real machine: it touches its memory for the first time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvrelay.config import DisaggConfig, EngineConfig, MockConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import HandoffId
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import ModelOutput, SchedulerOutput, StepOutput
from kvrelay.executors.mock import MockExecutor
from kvrelay.placement.base import PrefillLoad, PrefillPlace
from kvrelay.placement.cost import CostPlacement, PlacementState
from kvrelay.placement.threshold import DisaggPolicy

Policy = Literal["cost", "threshold", "always", "aggregated"]

STEP = StepCost(0.0021, 0.0033, 6.4e-5, 2e-7, 7.7e-5, 3e-7)
NUM_CHATS, CHAT_TOKENS, CHAT_ANSWER, LONG_TOKENS, LONG_ANSWER = 8, 64, 128, 1024, 8
TTFT_S, ITL_S = 0.5, 0.025
WAY_S = 0.012
"""From push to pull, and from the end of the prefill to its message."""


@dataclass(frozen=True)
class Machine:
    """How far it is from an ideal one. ``noise``: standard deviation of the logarithm of a step's time. Beside a busy
    prefill worker a step takes ``contention`` times as long, and with probability ``stall_chance`` a pause more, of
    ``stall_s`` in the mean. The prefill worker's first prefill takes ``cold`` times as long."""

    noise: float = 0.15
    contention: float = 1.15
    stall_chance: float = 0.03
    stall_s: float = 0.006
    cold: float = 5.0


class _TimedExecutor(MockExecutor):
    """A mock whose steps take what ``take`` says."""

    take = staticmethod(lambda work: None)

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        if work.num_seqs:
            self.take(work)
        return super().execute(work)


@dataclass
class _Prefills:
    """The prefill worker's line."""

    machine: Machine
    rng: random.Random
    free_at_s: float = 0.0
    num_done: int = 0
    due: deque[tuple[float, float, HandoffId, str, float]] = field(default_factory=deque)

    def push(self, num_tokens: int, handoff_id: HandoffId, name: str, now_s: float) -> None:
        seconds = STEP.step_seconds(StepWork(num_tokens)) + STEP.pair_s * num_tokens**2 / 2
        seconds *= self.rng.lognormvariate(0.0, self.machine.noise)
        seconds *= self.machine.cold if not self.num_done else 1.0
        self.num_done += 1
        start_s = max(self.free_at_s, now_s + WAY_S)
        self.free_at_s = start_s + seconds
        self.due.append((self.free_at_s + WAY_S, start_s, handoff_id, name, seconds))

    def is_busy(self, now_s: float) -> bool:
        return any(start_s <= now_s < at_s - WAY_S for at_s, start_s, *_ in self.due)


@dataclass
class Answer:
    """A request: when it was sent, and when each token came."""

    is_chat: bool
    sent_s: float
    tokens_s: list[float] = field(default_factory=list)

    def meets_itl(self) -> bool:
        gaps = np.diff(self.tokens_s)
        return not gaps.size or float(np.percentile(gaps, 99)) <= ITL_S

    def meets_ttft(self) -> bool:
        return self.tokens_s[0] - self.sent_s <= TTFT_S


class GoodputSimulation:
    """``policy`` as of ``--disagg-policy``; ``aggregated`` has no prefill worker."""

    def __init__(self, policy: Policy, rate: float, *, seed: int = 0, machine: Machine | None = None) -> None:
        self.machine = machine or Machine()
        # Arrivals are the same for every policy.
        self._arrivals, self._rng = random.Random(f"{rate} {seed}"), random.Random(f"{rate} {seed} d")
        self._policy = DisaggPolicy(DisaggConfig(disagg_policy="cost" if policy == "aggregated" else policy))
        config = EngineConfig(block_size=16, num_blocks=8192, max_num_seqs=64, max_num_batched_tokens=2048)
        self.clock = ManualClock()
        executor = _TimedExecutor(config, MockConfig(speedup_ratio=0), vocab_size=512)
        executor.take = self._pass_time  # type: ignore[method-assign]
        self.engine = EngineCore(executor, config, self.clock, worker_id="d")
        self.prefills = _Prefills(self.machine, random.Random(f"{rate} {seed} p"))
        self._num_workers = 0 if policy == "aggregated" else 1
        self.places: dict[PrefillPlace, int] = {}
        self.placement = CostPlacement(self._policy, self._prefill_load, self._placed, self.clock)
        self.open: dict[str, Answer] = {}
        self.answers: list[Answer] = []
        self._rate, self._next_long_s = rate, self._arrivals.expovariate(rate)

    def _prefill_load(self) -> PrefillLoad:
        now_s = self.clock.now()
        return PrefillLoad(self._num_workers, sum(start_s > now_s for _, start_s, *_ in self.prefills.due))

    def _placed(self, place: PrefillPlace) -> None:
        self.places[place] = self.places.get(place, 0) + 1

    def _pass_time(self, work: SchedulerOutput) -> None:
        seconds = STEP.step_seconds(self.engine.scheduler.step_work())
        seconds *= self._rng.lognormvariate(0.0, self.machine.noise)
        if self.prefills.is_busy(self.clock.now()):
            seconds *= self.machine.contention
            if self._rng.random() < self.machine.stall_chance:
                seconds += self._rng.expovariate(1.0 / self.machine.stall_s)
        self.clock.advance(seconds)

    def _send(self, is_chat: bool) -> None:
        name = f"{'chat' if is_chat else 'long'}-{len(self.answers) + len(self.open)}"
        num_tokens, num_answer = (CHAT_TOKENS, CHAT_ANSWER) if is_chat else (LONG_TOKENS, LONG_ANSWER)
        prompt = [self._rng.randrange(512) for _ in range(num_tokens)]
        request = Request(name, prompt, SamplingParams(max_tokens=num_answer))
        self.open[name] = Answer(is_chat, self.clock.now())
        if self._policy.is_by_cost:
            request.placement = PlacementState(self.placement, self.placement.objectives())
        else:
            place = self._policy.decide(
                prompt_length=num_tokens, num_cached_tokens=0, prefill_load=self._prefill_load()
            )
            request.mode = PrefillMode.REMOTE if place is PrefillPlace.REMOTE else PrefillMode.LOCAL
            self._placed(place)
        self.engine.add_request(request)

    def run(self, seconds: float) -> None:
        """Send load for ``seconds``; what has not ended then does not count."""
        for _ in range(NUM_CHATS):
            self._send(is_chat=True)
        while self.clock.now() < seconds:
            self._arrive()
            self._take_in()
            if self.engine.has_work():
                self._announce(self.engine.step(self._announce))
            else:
                self.clock.advance(0.0005)

    def _arrive(self) -> None:
        while self._next_long_s <= self.clock.now():
            self._next_long_s += self._arrivals.expovariate(self._rate)
            self._send(is_chat=False)

    def _announce(self, output: StepOutput) -> None:
        now_s = self.clock.now()
        for prefill in output.remote_prefills:
            num_tokens = len(prefill.token_ids) - prefill.num_cached_tokens
            self.prefills.push(num_tokens, prefill.handoff_id, prefill.request_id, now_s)
        for token in output.outputs:
            answer = self.open[token.request_id]
            answer.tokens_s += [now_s] * len(token.token_ids)
            if token.finish_reason is not None:
                self.answers.append(self.open.pop(token.request_id))
                if answer.is_chat:
                    self._send(is_chat=True)

    def _take_in(self) -> None:
        while self.prefills.due and self.prefills.due[0][0] <= self.clock.now():
            _, _, handoff_id, request_id, seconds = self.prefills.due.popleft()
            self.placement.prefill_took(request_id, seconds)
            assert self.engine.resume_handoff(handoff_id, 1, 7, None)
            self.engine.end_loan(handoff_id, 1)

    def goodput(self) -> float:
        """The share of answers that meet both objectives."""
        return sum(answer.meets_ttft() and answer.meets_itl() for answer in self.answers) / len(self.answers)
