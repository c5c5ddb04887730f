"""Costs from a live cluster: what its workers publish, and what a small load shows. Pure; ``probe`` asks the cluster.

    published by workers   step costs                        their medians over the workers that do such steps
    what tiers have loaded  bytes and seconds               host_bytes_per_s, disk_bytes_per_s
    two lengths of prompts KV bytes and transfer times       token_bytes, link_bytes_per_s, transfer_overhead_s
    one stream at a time   gaps between tokens, first token  between_steps_s, spread, frontend_request_s
    the same, all remote   how much later first tokens are   queue_hop_s

What the load did not show keeps its default and is named in ``Calibration.not_measured``. Costs of steps that workers
estimate from answers are named as such.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from operator import sub
from typing import Any

import msgspec
import numpy as np

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.step_cost import CostSource, StepCost, StepWork, median_cost
from kvrelay.core.tier_stats import StoreStats
from kvrelay.errors import InvalidInputError
from kvrelay.simulate.costs import Costs, check_costs

MAX_SPREAD = 1.0


class Stream(msgspec.Struct, frozen=True):
    """One request of the probe, alone in the cluster. ``tokens_s``: arrival of each token after the sending."""

    prompt_tokens: int
    tokens_s: tuple[float, ...]


class Counters(msgspec.Struct, frozen=True):
    """Summed over all workers since their start: transfers that ended, their bytes and seconds, and remote prefills."""

    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_remote: int = 0

    def since(self, earlier: Counters) -> Counters:
        return Counters(*map(sub, msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)))


class Phase(msgspec.Struct, frozen=True):
    """Streams with prompts of one length, and what the workers counted meanwhile."""

    streams: tuple[Stream, ...]
    counted: Counters


class Calibration(msgspec.Struct, frozen=True):
    """``is_step_estimated``: some worker's costs of steps are estimates."""

    costs: Costs
    not_measured: tuple[str, ...]
    is_step_estimated: bool = False


class _Load(msgspec.Struct):
    step_cost: StepCost | None = None
    step_cost_source: CostSource = CostSource.MEASURED
    kv_total_blocks: int = 0


class _Peer(msgspec.Struct):
    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class _Transfer(msgspec.Struct):
    peers: list[_Peer] = []


class _Decode(msgspec.Struct):
    num_remote_done: int = 0


class _Tiers(msgspec.Struct):
    stores: dict[str, StoreStats] = {}


class _Worker(msgspec.Struct):
    """The part of a worker's status that calibration reads."""

    worker_id: str
    role: str = ""
    model: str = ""
    block_size: int = 0
    step_spread: float = 0.0
    load: _Load = msgspec.field(default_factory=_Load)
    transfer: _Transfer = msgspec.field(default_factory=_Transfer)
    decode: _Decode = msgspec.field(default_factory=_Decode)
    kv_tiers: _Tiers | None = None


def read_status(status: dict[str, Any]) -> list[_Worker]:
    """The workers of ``kvrelay status --json``. Raises InvalidInputError without a worker or with one unreadable."""
    try:
        workers = msgspec.convert(status["workers"], list[_Worker])
    except (*UNREADABLE, KeyError) as exc:
        raise InvalidInputError(f"the status of the cluster is not readable: {exc}") from exc
    if not workers:
        raise InvalidInputError("the cluster has no worker; start one, then calibrate again")
    models = sorted({worker.model for worker in workers})
    if len(models) > 1:
        raise InvalidInputError(f"the cluster serves {', '.join(models)}; calibrate with the workers of one model only")
    return workers


def counters_of(workers: Sequence[_Worker]) -> Counters:
    peers = [peer for worker in workers for peer in worker.transfer.peers]
    return Counters(
        sum(peer.num_transfers for peer in peers),
        sum(peer.num_bytes for peer in peers),
        sum(peer.seconds for peer in peers),
        sum(worker.decode.num_remote_done for worker in workers),
    )


def fit(
    workers: Sequence[_Worker],
    phases: Sequence[Phase],
    machine: str,
    busy: Sequence[_Worker] | None = None,
    remote: Sequence[Phase] = (),
) -> Calibration:
    """Costs of the workers' model. ``workers``: their status after the probe's streams one by one; ``busy``: after
    those that came at once, whose steps are what a load meets (None: there were none). ``remote``: streams one by one
    whose prompts all went to prefill workers, which the cluster's own policy may not do. Raises InvalidInputError if no
    worker publishes step costs."""
    alone, _ = _step_of(workers)
    step, missing = _step_of(busy or workers)
    found: dict[str, float | int] = _client_costs(alone, phases) | _transfer_costs(remote or phases)
    found |= _queue_costs(phases, remote) | _kv_of(workers) | _prefill_spread_of(busy or workers)
    found |= _tier_costs(busy or workers)
    measurable = (
        *("kv_tokens", "prefill_spread"),
        *("between_steps_s", "spread", "frontend_request_s"),
        *("token_bytes", "link_bytes_per_s", "transfer_overhead_s"),
        *("host_bytes_per_s", "disk_bytes_per_s"),
        *("hop_s", "queue_hop_s", "frontend_token_s", "start_s", "drain_s"),
    )
    estimated = [worker for worker in workers if worker.load.step_cost_source is CostSource.ESTIMATED]
    costs = msgspec.structs.replace(Costs(), step=step, machine=machine, model=workers[0].model, **found)
    check_costs(costs, "measured")
    unmeasured = (*(f"step.{name}" for name in missing), *(name for name in measurable if name not in found))
    return Calibration(costs, unmeasured, bool(estimated))


def _step_of(workers: Sequence[_Worker]) -> tuple[StepCost, tuple[str, ...]]:
    """What these workers publish, and the names of what none has measured."""
    given = [(worker.role, worker.load.step_cost) for worker in workers]
    fitted = [(role, cost) for role, cost in given if cost is not None]
    if not fitted:
        raise InvalidInputError(
            "no worker publishes step costs: ask each worker something, see its log, or write costs.json by hand"
        )
    return median_cost(fitted)


def _client_costs(step: StepCost, phases: Sequence[Phase]) -> dict[str, float | int]:
    """From streams that were alone: a gap is a decode step and the time between steps. The first token of the shortest
    prompts has the frontend's time on top of the prefill and both hops."""
    gaps: list[float] = []
    estimates: list[float] = []
    rest: list[float] = []
    shortest = min((stream.prompt_tokens for phase in phases for stream in phase.streams), default=0)
    for stream in (stream for phase in phases for stream in phase.streams):
        if stream.prompt_tokens == shortest and stream.tokens_s:
            prefill_s = step.prefill_seconds(stream.prompt_tokens)
            rest.append(stream.tokens_s[0] - prefill_s - 2 * Costs().hop_s)
        # The second token may wait for the hand-off.
        for number, gap_s in enumerate(np.diff(stream.tokens_s)[1:], 2):
            work = StepWork(num_decodes=1, num_context_tokens=stream.prompt_tokens + number)
            gaps.append(float(gap_s))
            estimates.append(step.step_seconds(work))
    found: dict[str, float | int] = {}
    if rest:
        found["frontend_request_s"] = max(statistics.median(rest), 0.0)
    # Tokens that were read together have gaps of 0, which say nothing of steps.
    pairs = [(gap, estimate) for gap, estimate in zip(gaps, estimates) if gap > 0.0]
    if len(pairs) >= 8:
        found["between_steps_s"] = max(statistics.median(gap - estimate for gap, estimate in pairs), 0.0)
        logs = np.log([gap for gap, _ in pairs])
        # The quartiles' distance of a normal distribution is 1.349 deviations; single pauses do not count.
        found["spread"] = min(float(np.subtract(*np.percentile(logs, (75, 25)))) / 1.349, MAX_SPREAD)
    return found


def _transfer_costs(phases: Sequence[Phase]) -> dict[str, float | int]:
    """A line through (bytes, seconds) of a mean transfer of each phase; from one phase only its ratio. If the line does
    not rise, the transfers were too small to tell a bandwidth."""
    used = [phase for phase in phases if phase.counted.num_transfers > 0 and phase.counted.num_bytes > 0]
    found: dict[str, float | int] = {}
    remote_tokens = sum(phase.counted.num_remote * phase.streams[0].prompt_tokens for phase in used if phase.streams)
    if remote_tokens:
        found["token_bytes"] = max(round(sum(phase.counted.num_bytes for phase in used) / remote_tokens), 1)
    points = sorted(
        (counted.num_bytes / counted.num_transfers, counted.seconds / counted.num_transfers)
        for counted in (phase.counted for phase in used)
    )
    if len(points) >= 2 and points[-1][0] > 1.5 * points[0][0] and points[-1][1] > points[0][1]:
        (few, short_s), (many, long_s) = points[0], points[-1]
        found["link_bytes_per_s"] = (many - few) / (long_s - short_s)
        found["transfer_overhead_s"] = max(short_s - few / found["link_bytes_per_s"], 0.0)
    elif len(points) >= 2:
        # Larger transfers take no longer, so they are all overhead.
        found["transfer_overhead_s"] = min(seconds for _, seconds in points)
    elif points and points[-1][1] > 0.0:
        found["link_bytes_per_s"] = points[-1][0] / points[-1][1]
    return found


def _queue_costs(phases: Sequence[Phase], remote: Sequence[Phase]) -> dict[str, float | int]:
    """A short prompt's first token is later by queue and transfer than that of one that was computed where its answer
    is."""
    local = [phase for phase in phases if phase.streams and not phase.counted.num_remote]
    away = [phase for phase in remote if phase.streams and phase.counted.num_transfers]
    if not local or not away:
        return {}
    near, far = (min(some, key=lambda phase: phase.streams[0].prompt_tokens) for some in (local, away))
    if near.streams[0].prompt_tokens != far.streams[0].prompt_tokens:
        return {}
    firsts_s = [statistics.median(one.tokens_s[0] for one in phase.streams if one.tokens_s) for phase in (near, far)]
    transfer_s = far.counted.seconds / far.counted.num_transfers
    return {"queue_hop_s": max(firsts_s[1] - firsts_s[0] - transfer_s, 0.0)}


def _prefill_spread_of(workers: Sequence[_Worker]) -> dict[str, float | int]:
    """What the workers that take requests have learnt themselves. A stream that is alone shows less: answers and
    prompts that run beside each other slow each other."""
    spreads = [worker.step_spread for worker in workers if worker.role != "prefill" and worker.step_spread > 0.0]
    return {"prefill_spread": min(statistics.median(spreads), MAX_SPREAD)} if spreads else {}


def _tier_costs(workers: Sequence[_Worker]) -> dict[str, float | int]:
    """What the workers have loaded, over the time that it took."""
    found: dict[str, float | int] = {}
    for medium in ("host", "disk"):
        tiers = [worker.kv_tiers for worker in workers if worker.kv_tiers is not None]
        stores = [one.stores[medium] for one in tiers if medium in one.stores]
        if seconds := sum(store.load_s for store in stores):
            found[f"{medium}_bytes_per_s"] = sum(store.loaded_bytes for store in stores) / seconds
    return found


def _kv_of(workers: Sequence[_Worker]) -> dict[str, float | int]:
    """Of the worker whose pool holds least."""
    least = min(worker.block_size * worker.load.kv_total_blocks for worker in workers)
    return {"kv_tokens": least} if least else {}
