"""One decode worker and one prefill worker of equal speed, on clocks that only their steps move.

The decode worker is a real engine with real placement by cost. The prefill worker is a line of prefills of the same
timing model; only its answers matter here, so it moves no KV.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvrelay.config import DisaggConfig, EngineConfig, MockConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.step import StepOutput
from kvrelay.executors.mock import MockExecutor
from kvrelay.placement.base import PrefillLoad, PrefillPlace
from kvrelay.placement.cost import CostPlacement, PlacementState
from kvrelay.placement.threshold import DisaggPolicy

TIMES = MockConfig(speedup_ratio=2)
BLOCK_SIZE, CHUNK = 16, 2048
STEP_OVERHEAD_S = 0.001
"""What a step costs beside the device: scheduling, output."""


@dataclass
class PrefillWorker:
    """Computes one prefill after the other. ``way_s``: from push to pull, and from the last chunk to the message."""

    way_s: float
    free_at_s: float = 0.0
    busy_s: float = 0.0
    due: deque[tuple[float, HandoffId, str, float]] = field(default_factory=deque)
    """When each one's message arrives, its hand-off, request, and seconds of computing."""

    def push(self, prefill: RemotePrefillRequest, now_s: float) -> None:
        num_tokens = len(prefill.token_ids) - prefill.num_cached_tokens
        num_steps = -(-num_tokens // CHUNK)
        per_step_s = TIMES.prefill_base_s / TIMES.speedup_ratio + STEP_OVERHEAD_S
        seconds = num_steps * per_step_s + TIMES.prefill_token_s / TIMES.speedup_ratio * num_tokens
        start_s = max(self.free_at_s, now_s + self.way_s)
        self.free_at_s = start_s + seconds
        self.busy_s += seconds
        self.due.append((self.free_at_s + self.way_s, prefill.handoff_id, prefill.request_id, seconds))


class BurstSimulation:
    """``num_workers`` 0: the decode worker alone."""

    def __init__(self, num_workers: int = 1, way_s: float = 0.01, **engine: float) -> None:
        settings: dict[str, Any] = {"num_blocks": 16384, "max_num_seqs": 256, **engine}
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=CHUNK, **settings)
        self.clock = ManualClock()
        executor = MockExecutor(config, TIMES, vocab_size=512, sleep=self._pass_time)
        self.engine = EngineCore(executor, config, self.clock, worker_id="d")
        self.workers = [PrefillWorker(way_s) for _ in range(num_workers)]
        policy = DisaggPolicy(DisaggConfig(disagg_policy="cost"))
        self.placement = CostPlacement(policy, self._prefill_load, self._placed, self.clock)
        self.places: dict[PrefillPlace, int] = {}
        self.first_token_s: dict[str, float] = {}
        self.arrived_s: dict[str, float] = {}

    def _pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds + STEP_OVERHEAD_S)

    def _prefill_load(self) -> PrefillLoad:
        now_s = self.clock.now()
        num_queued = sum(due_s - seconds > now_s for worker in self.workers for due_s, _, _, seconds in worker.due)
        return PrefillLoad(len(self.workers), num_queued)

    def _placed(self, place: PrefillPlace) -> None:
        self.places[place] = self.places.get(place, 0) + 1

    def add(self, name: str, num_tokens: int, max_tokens: int = 8, priority: int = 0) -> None:
        """A request arrives now. Its prompt is like no other's."""
        first = len(self.arrived_s)
        prompt = [(first * 7919 + place * 31 + place // 512) % 512 for place in range(num_tokens)]
        placement = PlacementState(self.placement, self.placement.objectives())
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(name, prompt, sampling, priority=priority, placement=placement)
        self.arrived_s[name] = self.clock.now()
        self.engine.add_request(request)

    def step(self) -> None:
        """Take in what has arrived and step; if there is nothing to do, wait for the next message."""
        self._take_in()
        if not self.engine.has_work():
            due = [worker.due[0][0] for worker in self.workers if worker.due]
            self.clock.advance(max(min(due) - self.clock.now(), 0.0) if due else 0.001)
            return
        output = self.engine.step(self._announce)
        self._announce(output)

    def _announce(self, output: StepOutput) -> None:
        now_s = self.clock.now()
        for prefill in output.remote_prefills:
            min(self.workers, key=lambda worker: worker.free_at_s).push(prefill, now_s)
        for token in output.outputs:
            if token.token_ids:
                self.first_token_s.setdefault(token.request_id, now_s)

    def _take_in(self) -> None:
        for worker in self.workers:
            while worker.due and worker.due[0][0] <= self.clock.now():
                _, handoff_id, request_id, seconds = worker.due.popleft()
                self.placement.prefill_took(request_id, seconds)
                assert self.engine.resume_handoff(handoff_id, 1, 7, None)
                self.engine.end_loan(handoff_id, 1)

    def run(self, num_prompts: int, *, chats_every_s: float = 0.25) -> None:
        """A burst of prompts of 8,000 tokens, and chats until the last of them has its first token."""
        prompts = [f"long-{number}" for number in range(num_prompts)]
        for name in prompts:
            self.add(name, 8000)
        num_chats = 0
        while self.engine.has_unfinished():
            is_burst_over = self.first_token_s.keys() >= set(prompts)
            while not is_burst_over and self.clock.now() >= num_chats * chats_every_s:
                self.add(f"chat-{num_chats}", 30, 16)
                num_chats += 1
            self.step()

    def last_first_token_s(self) -> float:
        """Of the burst."""
        return max(seconds for name, seconds in self.first_token_s.items() if name.startswith("long"))

    def slowest_chat_s(self) -> float:
        """Its time to the first token."""
        waits = [seconds - self.arrived_s[name] for name, seconds in self.first_token_s.items() if name[0] == "c"]
        return max(waits)
