"""One simulation of the search: a candidate, a part of the load and its speed in; the figures that are compared out.

A ``Setting`` is all that the simulations share, so that a process gets it once. A simulation that is only to say
whether a share of the requests meets the objectives ends as soon as that is certain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

import msgspec

from kvrelay.config import DisaggConfig, EngineConfig, TiersConfig
from kvrelay.placement.base import Objectives
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.learnt import learnt_by_serving
from kvrelay.simulate.result import RequestResult, SimulationResult, summary
from kvrelay.simulate.simulation import simulate

NUM_LOOKS = 64
"""How often a simulation is asked whether its answer is certain, while requests arrive."""
NUM_COMPARED_LATENCIES = 200
NOTHING = {"p50": 0.0, "p90": 0.0, "p99": 0.0}


class Memory(msgspec.Struct, frozen=True):
    """KV beyond the pool: bytes for each worker, in memory and on disk that the workers of a host share."""

    host_bytes: int = 0
    disk_bytes: int = 0

    def tiers(self, num_workers: int) -> TiersConfig:
        """Of a host with so many workers. ``DIR``: its name says nothing in a simulation."""
        disk = f"DIR,{self.disk_bytes * num_workers}" if self.disk_bytes else ""
        return TiersConfig(host_kv_cache=str(self.host_bytes * num_workers), disk_kv_cache=disk)


NO_MEMORY = Memory()


class Candidate(msgspec.Struct, frozen=True):
    """A cluster to try. ``both`` workers are aggregated; else ``prefill`` and ``decode`` are above 0. A worker takes
    ``tp`` slots. ``max_local_prefill_length`` None: the policy is ``cost``, else ``threshold``."""

    prefill: int
    decode: int
    both: int
    tp: int = 1
    chunk: int = 2048
    max_local_prefill_length: int | None = None

    @property
    def is_split(self) -> bool:
        return self.both == 0

    def __str__(self) -> str:
        policy = "cost" if self.max_local_prefill_length is None else f"threshold {self.max_local_prefill_length}"
        return f"{self.size}{f' tp {self.tp}' if self.tp > 1 else ''}, chunks {self.chunk}, {policy}"

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.both

    @property
    def size(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.is_split else f"{self.both} aggregated"

    def command(self, objectives: Objectives, num_blocks: int = 0, memory: Memory = NO_MEMORY) -> str:
        """The command line that runs it on one machine."""
        parts = ["kvrelay serve MODEL", f"--prefill {self.prefill}", f"--decode {self.decode or self.both}"]
        if self.tp > 1:
            parts.append(f"--tp {self.tp}")
        parts.append(f"--max-num-batched-tokens {self.chunk}")
        if self.max_local_prefill_length is None:
            parts.append("--disagg-policy cost")
        else:
            parts.append(f"--disagg-policy threshold --max-local-prefill-length {self.max_local_prefill_length}")
        parts.append(f"--slo-ttft-ms {objectives.ttft_s * 1e3:g} --slo-itl-ms {objectives.itl_s * 1e3:g}")
        if num_blocks:
            parts.append(f"--num-blocks {num_blocks}")
        tiers = memory.tiers(self.num_workers)
        parts += [f"--host-kv-cache {tiers.host_kv_cache}"] * (memory.host_bytes > 0)
        parts += [f"--disk-kv-cache {tiers.disk_kv_cache}"] * (memory.disk_bytes > 0)
        return " ".join(parts)


class Setting(msgspec.Struct, frozen=True):
    """``loads``: the same load by seed, the first one being what was asked for; ``costs``: by ranks of a worker;
    ``num_blocks``: KV blocks of a worker, 0 for what the costs say."""

    loads: tuple[tuple[int, Sequence[Arrival]], ...]
    costs: Mapping[int, Costs]
    objectives: Objectives
    num_blocks: int = 0

    @property
    def arrivals(self) -> Sequence[Arrival]:
        return self.loads[0][1]


class Trial(msgspec.Struct, frozen=True):
    """A simulation to run: the first ``num_requests`` of load number ``load``, ``factor`` times as fast (pauses of
    sessions keep their length).

    It may end early once the share of requests that meet the objectives is certain to be below ``give_up_below``, or
    not below ``enough``.
    """

    candidate: Candidate
    num_requests: int
    factor: float = 1.0
    load: int = 0
    give_up_below: float = 0.0
    enough: float = math.inf
    memory: Memory = NO_MEMORY


class Outcome(msgspec.Struct, frozen=True):
    """``goodput``: the share within both objectives; ``ttft_met`` and ``itl_met``: within each of them. Of all requests
    that have ended or are late for certain. ``most``: what the share of all requests can be at most.
    ``ttft_ms`` and ``itl_ms``: p50, p90, p99. ``late``: the P99s in units of their objectives, added up. ``error``: of
    the first request that failed. ``computed``: the share of the prompt tokens that were not cached. ``later_ttft_ms``:
    the mean of prompts that begin as an earlier one."""

    is_whole: bool
    goodput: float
    most: float
    least: float
    ttft_met: float
    itl_met: float
    good_tokens_per_s: float
    ttft_ms: tuple[float, float, float]
    itl_ms: tuple[float, float, float]
    late: float
    ttft_sample_ms: tuple[float, ...]
    """Sorted; at most NUM_COMPARED_LATENCIES, for plots."""
    error: str = ""
    computed: float = 1.0
    later_ttft_ms: float = 0.0

    @property
    def score(self) -> tuple[float, float]:
        return (self.goodput, -self.late) if self.is_whole else (self.most, -math.inf)


class Tally:
    """Which of ``results`` meet the objectives, and which do not for certain, as the simulation goes on."""

    def __init__(self, trial: Trial, objectives: Objectives) -> None:
        self._trial, self._objectives = trial, objectives
        self.num_met = self.num_missed = 0
        self.is_certain = False
        self._open: list[RequestResult] | None = None

    def look(self, now_s: float, results: Sequence[RequestResult]) -> bool:
        """Whether the answer is certain, and the simulation may end."""
        still: list[RequestResult] = []
        for result in results if self._open is None else self._open:
            if result.is_done or result.error:
                self.num_met += (is_met := result.meets(self._objectives))
                self.num_missed += not is_met
            elif (result.tokens_s[0] if result.tokens_s else now_s) - result.sent_s > self._objectives.ttft_s:
                self.num_missed += 1
            else:
                still.append(result)
        self._open = still
        total = len(results)
        self.is_certain = (
            total - self.num_missed < self._trial.give_up_below * total or self.num_met >= self._trial.enough * total
        )
        return self.is_certain


def run_trial(setting: Setting, trial: Trial) -> Outcome:
    """Simulate. Raises ConfigError, InvalidInputError for what cannot be."""
    candidate, objectives = trial.candidate, setting.objectives
    seed, load = setting.loads[trial.load]
    arrivals = [
        one if one.after is not None else msgspec.structs.replace(one, time_s=one.time_s / trial.factor)
        for one in load[: trial.num_requests]
    ]
    local = candidate.max_local_prefill_length
    size = EngineConfig().block_size
    pool_tokens = size * setting.costs[candidate.tp].num_blocks(size, setting.num_blocks)
    spec = ClusterSpec(
        prefill=candidate.prefill,
        decode=candidate.decode,
        both=candidate.both,
        engine=EngineConfig(max_num_batched_tokens=candidate.chunk, num_blocks=setting.num_blocks),
        disagg=DisaggConfig(
            disagg_policy="cost" if local is None else "threshold",
            slo_ttft_ms=objectives.ttft_s * 1e3,
            slo_itl_ms=objectives.itl_s * 1e3,
            max_local_prefill_length=256 if local is None else local,
        ),
        max_model_len=min(max(one.prompt_tokens + one.answer_tokens for one in load) + 1, pool_tokens),
        tiers=trial.memory.tiers(min(candidate.num_workers, ClusterSpec().workers_per_host)),
    )
    tally = Tally(trial, objectives)
    looks_every_s = max(max(one.time_s for one in arrivals) / NUM_LOOKS, objectives.ttft_s / 4)
    costs = setting.costs[candidate.tp]
    result = simulate(
        spec,
        arrivals,
        costs,
        seed=seed,
        watch=tally.look,
        watch_interval_s=looks_every_s,
        learnt=learnt_by_serving(costs, spec.engine),
    )
    return outcome_of(result, objectives, tally, later_turns(arrivals))


def later_turns(arrivals: Sequence[Arrival]) -> set[int]:
    """The numbers of those whose prompts begin as an earlier one."""
    seen: set[int] = set()
    found: set[int] = set()
    for number, one in enumerate(arrivals):
        if one.hash_ids:
            if one.hash_ids[0] in seen:
                found.add(number)
            seen.add(one.hash_ids[0])
    return found


def outcome_of(result: SimulationResult, objectives: Objectives, tally: Tally, later: Set[int]) -> Outcome:
    """The figures of a simulation that has ended, early if ``tally`` was certain."""
    is_whole = not tally.is_certain
    if is_whole:
        tally.look(result.end_s, result.requests)
    decided, total = tally.num_met + tally.num_missed, len(result.requests)
    good = [one for one in result.done if one.meets(objectives)]
    num_ttft = sum(one.ttft_s <= objectives.ttft_s for one in result.done)
    num_itl = sum(one.keeps_gaps(objectives) for one in result.done)
    found = result.latencies()
    ttft, itl = ([1e3 * found.get(of, NOTHING)[p] for p in NOTHING] for of in ("ttft_s", "itl_s"))
    times = sorted(1e3 * one.ttft_s for one in result.done)
    return Outcome(
        is_whole=is_whole,
        goodput=tally.num_met / decided if decided else 0.0,
        most=(total - tally.num_missed) / total,
        least=tally.num_met / total,
        ttft_met=num_ttft / decided if decided else 0.0,
        itl_met=num_itl / decided if decided else 0.0,
        good_tokens_per_s=sum(len(one.tokens_s) for one in good) / result.end_s if result.end_s else 0.0,
        ttft_ms=(ttft[0], ttft[1], ttft[2]),
        itl_ms=(itl[0], itl[1], itl[2]),
        late=found["ttft_s"]["p99"] / objectives.ttft_s + found["itl_s"]["p99"] / objectives.itl_s
        if found
        else math.inf,
        ttft_sample_ms=tuple(times[:: -(-len(times) // NUM_COMPARED_LATENCIES) or 1]),
        error=result.first_error,
        computed=result.num_computed_tokens / max(sum(one.prompt_tokens for one in result.done), 1),
        later_ttft_ms=1e3 * summary([one.ttft_s for one in result.done if one.index in later])["mean"],
    )
