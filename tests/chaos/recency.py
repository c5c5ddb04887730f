"""What returning turns would find by recency in any case: arithmetic over the requests of a run, no model of a worker.

A pool of n blocks that evicts the least recently used still has what a request left if all that its worker has served
since takes no more than the others of the n. So a turn that comes back to its worker before that, and while nothing is
disturbed, finds all that it repeats. A key that keeps its word must find it by value too, whatever other keys say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.chaos.report import AskedPrompt, FaultRecord

from kvrelay.core.hashing import compute_sequence_hashes

BLOCK_SIZE = 16
MARGIN_BLOCKS = 64
"""A client sees the end of an answer a little later than its worker."""
CALM_S = 1.0
"""So long after it has healed a fault may still be felt."""
HARMLESS = (
    "kill_",
    "freeze_nats",
    "burst",
    *(f"{kind} prefill" for kind in ("kill", "terminate", "drain", "revoke", "freeze")),
)
"""How faults are named that take no block from a decode worker, and bring it none but of requests of the run."""
MIN_KEPT, MIN_FOUND = 30, 0.85
"""So many returns are evidence. A key's own wrong guesses count, too: 0 to 4 % in runs of a minute."""


class Return(NamedTuple):
    """A turn, the one before it, and the tokens that the session had then."""

    before: AskedPrompt
    turn: AskedPrompt
    num_repeated: int

    @property
    def num_kept(self) -> int:
        """Those in full blocks: the last token of an answer has no KV."""
        return (self.num_repeated - 1) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def num_found(self) -> int:
        return min(self.turn.num_cached, self.num_kept)


def lost_sessions(kept: Sequence[Return]) -> list[str]:
    """A line if less was found of what recency keeps; none if that is too little to tell."""
    num_found, num_kept = sum(each.num_found for each in kept), sum(each.num_kept for each in kept)
    if len(kept) < MIN_KEPT or num_found >= MIN_FOUND * num_kept:
        return []
    return [f"by recency {len(kept)} turns would have found {num_kept} tokens in any case, and found {num_found}"]


def found_of(returns: Sequence[Return], kept: Sequence[Return]) -> dict[str, int]:
    """For a report. ``kept``: those that recency would serve in any case."""
    return {
        "returns": len(returns),
        "repeated_tokens": sum(each.num_repeated for each in returns),
        "cached": sum(min(each.turn.num_cached, each.num_repeated) for each in returns),
        "kept_returns": len(kept),
        "kept_tokens": sum(each.num_kept for each in kept),
        "kept_found": sum(each.num_found for each in kept),
    }


def surely_kept(
    returns: Iterable[Return], requests: Sequence[AskedPrompt], faults: Sequence[FaultRecord], num_blocks: int
) -> list[Return]:
    """Those that recency in pools of ``num_blocks`` would serve. ``requests``: all that were asked, these included."""
    blocks = {id(request): _blocks_of(request) for request in requests}
    felt = [(fault.at_s, fault.end_s + CALM_S) for fault in faults if not fault.name.startswith(HARMLESS)]

    def is_kept(each: Return) -> bool:
        before, turn = each.before, each.turn
        if not turn.worker or turn.worker != before.worker:
            return False
        begun_s = turn.arrivals_s[0] if turn.arrivals_s else turn.end_s
        if any(from_s < turn.end_s and until_s > before.begin_s for from_s, until_s in felt):
            return False
        since = [
            request
            for request in requests
            if request is not turn and request is not before and request.worker in ("", turn.worker)
            if request.end_s > before.end_s and request.begin_s < begun_s
        ]
        used = blocks[id(before)].union(*[blocks[id(request)] for request in since])
        return len(used) + len(since) + 1 + MARGIN_BLOCKS <= num_blocks  # each has a last block that is not full

    return [each for each in returns if is_kept(each)]


def _blocks_of(request: AskedPrompt) -> frozenset[int]:
    """The hashes of its full blocks; keys share none."""
    tokens = (*request.token_ids, *request.answer)
    return frozenset(compute_sequence_hashes(tokens, BLOCK_SIZE, salt=request.tenant or None))
