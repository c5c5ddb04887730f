"""The models of what the simulator does not run: an executor that only takes time, and the links between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvrelay.core.control_groups import require_memory
from kvrelay.core.layout import MemoryRegion, paged_kv
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import MAX_COST_S, StepWork
from kvrelay.engine.holding import num_holding_blocks
from kvrelay.engine.step import ModelOutput, SchedulerOutput
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loop import StepClock

TOKEN = 1
"""Every token of every answer."""
NUM_DRAWS = 1024

StepTime = Callable[[StepWork, float], float]
"""``step_time(work, now_s)``: the seconds of a step that begins now."""


class FittedStepTime:
    """The fitted cost of the step's work, times a draw from a log-normal distribution whose mean is 1.

    The simulated engine gives an answer one token in each step. With more ``tokens_per_step`` it makes so many steps of
    one, in the same time together: those that only decode take a part of it each, and one that prefills too takes its
    whole time less what the others of its real step will take.
    """

    def __init__(self, costs: Costs, seed: str) -> None:
        self._step, self._spread = costs.step, costs.spread
        self._prefill_spread = costs.prefill_spread or costs.spread
        self._scatters = max(self._spread, self._prefill_spread) > 0.0
        self._rng = np.random.default_rng(list(seed.encode()))
        self._normals = self._draws = np.empty(0)

    def __call__(self, work: StepWork, now_s: float) -> float:
        cost = self._step
        seconds = cost.token_seconds(work)
        if work.num_prefill_tokens and cost.tokens_per_step > 1.0:
            others_s = cost.token_seconds(StepWork(0, 0, work.num_decodes, work.num_context_tokens))
            num_others = cost.tokens_per_step - 1.0 if work.num_decodes else 0.0
            seconds = max(cost.step_seconds(work) - num_others * others_s, seconds)
        if self._scatters:
            self._draw(1)
            if work.num_prefill_tokens:
                spread = self._prefill_spread
                seconds *= math.exp(float(self._normals[0]) * spread - spread**2 / 2)
            else:
                seconds *= float(self._draws[0])
            self.drop(1)
        return seconds

    def decode_seconds(self, num_decodes: int, num_context: int, count: int) -> npt.NDArray[np.float64]:
        """The seconds of the next ``count`` steps, which have ``num_decodes`` rows each and nothing else, the first one
        with ``num_context`` tokens of context. ``drop`` those that were used."""
        context = np.arange(num_context, num_context + count * num_decodes, num_decodes, dtype=np.float64)
        seconds = self._step.step_s + (self._step.decode_s * num_decodes + self._step.context_s * context)
        seconds = np.minimum(seconds, MAX_COST_S) / self._step.tokens_per_step
        if not self._scatters:
            return seconds
        self._draw(count)
        return seconds * self._draws[:count]

    def drop(self, count: int) -> None:
        """So many steps have been computed."""
        self._normals, self._draws = self._normals[count:], self._draws[count:]

    def _draw(self, count: int) -> None:
        """Have draws for ``count`` steps: each as a normal number, and as the factor of a step without a prefill."""
        while len(self._draws) < count:
            # In parts of one size, so that they do not depend on how many are asked for.
            normals = self._rng.standard_normal(NUM_DRAWS)
            draws = np.exp(normals * self._spread - self._spread**2 / 2)
            self._normals, self._draws = np.append(self._normals, normals), np.append(self._draws, draws)


class SimulatedExecutor:
    """Computes nothing: moves its worker's clock ahead by ``step_time``. It has no memory, so blocks hold no KV, and
    are copied in no time."""

    def __init__(self, spec: ClusterSpec, costs: Costs, clock: StepClock, step_time: StepTime) -> None:
        self.num_blocks = costs.num_blocks(spec.engine.block_size, spec.engine.num_blocks)
        # Its blocks hold nothing, but each has two numbers in the pool's lists.
        require_memory(self.num_blocks * 16, "num_blocks", "a simulated KV pool's bookkeeping")
        block_bytes = costs.token_bytes * spec.engine.block_size
        self.num_holding_blocks = num_holding_blocks(spec.kv_buffer_size, block_bytes, self.num_blocks)
        self.num_spill_blocks = 0
        self.kv_layout = paged_kv(1, 1, spec.engine.block_size, 1, "int32")
        self.kv_region = MemoryRegion(0, 0, is_pool=False)
        self.max_model_len = spec.max_model_len
        self.vocab_size = spec.vocab_size
        self.eos_token_ids: tuple[int, ...] = ()
        self.weights_fingerprint = "simulated"
        self.step_work: Callable[[], StepWork] = StepWork
        """The scheduler's account of the scheduled batch; set once there is a scheduler."""
        self.busy_s = 0.0
        self._clock = clock
        self._step_time = step_time

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        if not work.num_seqs:
            return ModelOutput([])
        seconds = self._step_time(self.step_work(), self._clock.now())
        self._clock.ahead_s += seconds
        self.busy_s += seconds
        return ModelOutput([TOKEN] * int(np.count_nonzero(work.samples)))

    def warm_up(self) -> None:
        """Nothing to touch."""

    def prepare(self, sampling: SamplingParams) -> None:
        """Nothing to compile."""

    def check(self) -> None:
        """Nothing can end by itself."""

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """There is no KV: hand-offs go without checksums."""
        raise NotImplementedError

    def copy_blocks(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """There is no KV."""

    def shutdown(self) -> None:
        """Nothing to free."""


class Links:
    """When transfers end. Each worker has one link, full duplex is not assumed: a transfer needs the links of both ends
    for its bytes, first come, first served. The overhead of a transfer occupies no link."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._free_at_s: dict[str, float] = {}
        self.num_bytes: dict[str, int] = {}
        """Moved, by worker."""

    def transfer(self, one: str, other: str, num_tokens: int, now_s: float) -> float:
        """The end of a transfer that is submitted now, in seconds."""
        num_bytes = num_tokens * self._costs.token_bytes
        begin_s = max(now_s, self._free_at_s.get(one, 0.0), self._free_at_s.get(other, 0.0))
        free_s = begin_s + num_bytes / self._costs.link_bytes_per_s
        for worker_id in (one, other):
            self._free_at_s[worker_id] = free_s
            self.num_bytes[worker_id] = self.num_bytes.get(worker_id, 0) + num_bytes
        return free_s + self._costs.transfer_overhead_s
