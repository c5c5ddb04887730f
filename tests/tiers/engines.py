"""An engine with tiers: the mock executor notices each wrong byte of KV, and the pool is too small for its prompts."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.executors.mock import MockExecutor, mock_generate
from kvrelay.tiers.block import Shape, shape_of
from kvrelay.tiers.carrier import ThreadCarrier
from kvrelay.tiers.store import BlockStore
from kvrelay.tiers.tiers import KvTiers

VOCAB_SIZE, EOS = 500, (2,)
DEAR = StepCost(prefill_token_s=1.0)
"""To compute is dear, so everything that is stored is worth loading."""
JOB_S = 2e-5
PATIENCE_S = 60.0


def build_executor(num_blocks: int = 40) -> MockExecutor:
    config = EngineConfig(num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    return MockExecutor(config, MockConfig(speedup_ratio=0), vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


class TimedCarrier(ThreadCarrier):
    """Every job takes ``JOB_S``, so that no price depends on how busy the machine is."""

    def __init__(self, region: MemoryRegion, block_bytes: int) -> None:
        super().__init__(region, block_bytes)
        self._num_readings = 0

    def stopwatch(self) -> float:
        self._num_readings += 1
        return JOB_S * self._num_readings


class TieredEngine:
    """Steps on the test's thread; loads end on the tiers' thread, and are told between steps."""

    def __init__(
        self,
        open_stores: Callable[[Shape], Sequence[BlockStore]],
        *,
        num_blocks: int = 40,
        cost: StepCost = DEAR,
        retention: Literal["value", "recency"] = "recency",
    ) -> None:
        """By recency it is known what the pool evicts next."""
        executor = build_executor(num_blocks)
        config = EngineConfig(
            num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, kv_retention=retention
        )
        self.clock = ManualClock()
        self.core = EngineCore(executor, config, self.clock, worker_id="d")
        self.shape = shape_of("mock", executor.kv_layout)
        self.stores = open_stores(self.shape)
        carrier = TimedCarrier(executor.kv_region, self.shape.block_bytes)
        self.tiers = KvTiers(self.shape, self.stores, lambda: cost, carrier)
        self.core.attach(self.tiers)
        self._ended: queue.Queue[tuple[str, bool, int] | None] = queue.Queue()
        """Ends of loads; None: something has changed that requests may wait for."""
        self.tiers.start(lambda *ended: self._ended.put(ended), lambda: self._ended.put(None))
        self._number = 0

    def ask(
        self, *prompts: Sequence[int], max_tokens: int = 6, mode: PrefillMode = PrefillMode.LOCAL
    ) -> list[list[int]]:
        """The prompts' answers, all asked at once."""
        names = [self.add(prompt, max_tokens=max_tokens, mode=mode) for prompt in prompts]
        answers = self.run()
        return [answers[name] for name in names]

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 6,
        mode: PrefillMode = PrefillMode.LOCAL,
        tenant: str = "",
        is_prefetch: bool = False,
    ) -> str:
        self._number += 1
        name = f"r{self._number}"
        sampling = SamplingParams(
            max_tokens=0 if is_prefetch else max_tokens, cache_salt=tenant or None, is_prefetch=is_prefetch
        )
        self.core.add_request(Request(name, list(prompt), sampling, mode=mode, tenant=tenant))
        return name

    def run(self) -> dict[str, list[int]]:
        """Until nothing is left to do. The tokens of each request."""
        answers: defaultdict[str, list[int]] = defaultdict(list)
        while self.core.has_work() or self.core.has_unfinished():
            while self.core.has_work():
                for output in self.core.step().outputs:
                    answers[output.request_id] += output.token_ids
            if self.core.has_unfinished():
                self._told()
        return answers

    def loaded(self) -> None:
        """Wait for the end of one load, and tell the engine."""
        while not self._told():
            pass

    def _told(self) -> bool:
        """Whether it was the end of a load."""
        ended = self._ended.get(timeout=PATIENCE_S)
        if ended is not None:
            self.core.kv_loaded(*ended)
        return ended is not None

    def close(self) -> None:
        self.core.check_integrity()
        self.tiers.close()
        self.core.executor.shutdown()


def prompt_of(number: int, length: int = 50) -> list[int]:
    return [3 + (number * 131 + at * 7) % (VOCAB_SIZE - 3) for at in range(length)]


def expected(prompt: Sequence[int], num_tokens: int = 6) -> list[int]:
    return mock_generate(list(prompt), num_tokens, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
