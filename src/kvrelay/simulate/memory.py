"""How much host memory and disk for KV is worth it to a cluster: a few sizes, simulated one after the other.

    what prompts repeat ──> 1, 2, 4, 8 times a worker's pool, until that is enough ──> stop once more gains nothing
                                                                                  ──> then a disk for all of it

A size is worth it if the goodput, or the mean first token of later turns, is better by more than NOISE. Fewer computed
tokens alone are told, but gain nothing at the load's own rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from kvrelay.config import EngineConfig
from kvrelay.config.byte_sizes import shown_bytes
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.pool import Runner
from kvrelay.simulate.trial import NO_MEMORY, Candidate, Memory, Outcome, Setting, Trial
from kvrelay.simulate.verdict import NOISE

MAX_SIZES = 4
ENOUGH = 1.25
"""Host memory of so many times what is repeated holds all of it: a set of its places may be full before others."""


class TriedMemory(msgspec.Struct, frozen=True):
    """What the load is like with it. ``computed``: the share of the prompt tokens. ``later_ttft_ms``: the mean of turns
    that repeat an earlier prompt's beginning."""

    memory: Memory
    computed: float
    later_ttft_ms: float
    goodput: float

    def gains_on(self, other: TriedMemory) -> bool:
        is_sooner = self.later_ttft_ms < other.later_ttft_ms * (1 - NOISE)
        return is_sooner or self.goodput > other.goodput * (1 + NOISE)


class MemoryAdvice(msgspec.Struct, frozen=True):
    """``tried``: the first one has none. ``best``: of these. ``verdict``: sentences."""

    tried: tuple[TriedMemory, ...]
    best: TriedMemory
    verdict: str


def advise_memory(runs: Runner, setting: Setting, candidate: Candidate, without: Outcome) -> MemoryAdvice | None:
    """For this cluster on the whole load, which is answered as ``without`` tells if there are no tiers. None: no prompt
    repeats another."""
    num_tokens = num_repeated_tokens(setting.arrivals)
    if not num_tokens:
        return None
    costs, size = setting.costs[candidate.tp], EngineConfig().block_size
    pool_bytes = costs.num_blocks(size, setting.num_blocks) * size * costs.token_bytes
    needed_bytes = num_tokens * costs.token_bytes / (candidate.decode or candidate.both)
    tried = [_tried(NO_MEMORY, without)]
    if needed_bytes <= pool_bytes:
        reason = f"what prompts repeat is {_shown(needed_bytes)} for each worker, and its pool has {_shown(pool_bytes)}"
        return MemoryAdvice(tuple(tried), tried[0], f"Host memory for KV is not worth it: {reason}.")

    def attempt(memory: Memory) -> TriedMemory:
        runs.submit(Trial(candidate, len(setting.arrivals), memory=memory))
        ((_, outcome),) = runs.results()
        tried.append(_tried(memory, outcome))
        return tried[-1]

    best = tried[0]
    for host_bytes in _sizes(pool_bytes, needed_bytes * ENOUGH):
        found = attempt(Memory(host_bytes))
        if found.gains_on(best):
            best = found
        elif best is not tried[0]:
            break
    disk = None
    if best.memory.host_bytes < needed_bytes:
        disk = attempt(Memory(best.memory.host_bytes, math.ceil(needed_bytes * ENOUGH)))
    return MemoryAdvice(
        tuple(tried), disk if disk is not None and disk.gains_on(best) else best, _said(tried, best, disk)
    )


def num_repeated_tokens(arrivals: Sequence[Arrival]) -> int:
    """Tokens of blocks that more than one prompt has, each block once."""
    seen: set[int] = set()
    again: dict[int, int] = {}
    for one in arrivals:
        ids = one.hash_ids or ()
        again.update((block, one.hash_tokens) for block in ids if block in seen)
        seen.update(ids)
    return sum(again.values())


def _sizes(pool_bytes: int, needed_bytes: float) -> Iterator[int]:
    """Each twice the one before; the last one is enough, or is the last that is tried."""
    for number in range(MAX_SIZES):
        yield (size := pool_bytes << number)
        if size >= needed_bytes:
            return


def _tried(memory: Memory, outcome: Outcome) -> TriedMemory:
    return TriedMemory(memory, outcome.computed, outcome.later_ttft_ms, outcome.goodput)


def _said(tried: Sequence[TriedMemory], best: TriedMemory, disk: TriedMemory | None) -> str:
    without, last = tried[0], [one for one in tried if not one.memory.disk_bytes][-1]
    if best is without:
        size = _shown(last.memory.host_bytes)
        said = [f"Host memory for KV is not worth it: {size} for each worker {_change(last, without)}."]
    else:
        size = _shown(best.memory.host_bytes)
        said = [f"Host memory of {size} for each worker is worth it: it {_change(best, without)}."]
        if last is not best:
            said.append(f"{_shown(last.memory.host_bytes)} gain little more.")
    if disk is not None:
        is_worth = "is worth it" if disk.gains_on(best) else "is not worth it"
        said.append(f"A disk of {_shown(disk.memory.disk_bytes)} for each worker {is_worth}: it {_change(disk, best)}.")
    return " ".join(said)


def _change(one: TriedMemory, other: TriedMemory) -> str:
    return (
        f"changes the prompt tokens computed from {other.computed:.0%} to {one.computed:.0%}, the mean first token of "
        f"later turns from {other.later_ttft_ms:.0f} to {one.later_ttft_ms:.0f} ms, and goodput from "
        f"{other.goodput:.1%} to {one.goodput:.1%}"
    )


def _shown(num_bytes: float) -> str:
    return shown_bytes(round(num_bytes))
