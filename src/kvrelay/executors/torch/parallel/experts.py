"""Expert parallelism: each rank of a group holds some experts, and tokens travel to them and back.

    rank 0: tokens a b c ──counts, rows by owner──> all-to-all ──> experts 0 1 ──> all-to-all ──> sums of a b c
    rank 1: no tokens    ──0────────────────────>  all-to-all ──> experts 2 3 ──> all-to-all ──> nothing

The group is all data-parallel and tensor-parallel ranks of a pipeline stage; its rank ``dp_rank * tp_size + tp_rank``
holds the experts from ``rank * num_experts / size`` on, of the stage's layers. Every rank takes part in every layer's
exchange, also with no tokens at all. Counts differ from rank to rank and from step to step. Data are moved, not summed,
so a token's result is, bit for bit, that of one process with all experts.

With tensor parallelism all ranks of an engine have the same tokens: each sends its part of them, and the results are
combined by a sum with zeros.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import torch

from kvrelay.config.settings import GroupConfig
from kvrelay.executors.torch.kernels.base import Kernels
from kvrelay.executors.torch.models.decoder import SparseFeedForward
from kvrelay.executors.torch.parallel.collectives import Groups, process_group
from kvrelay.executors.torch.parallel.rank import ParallelRank


class ExpertSeat(msgspec.Struct, frozen=True):
    """Which experts a rank holds: seat ``index`` of ``size``."""

    index: int
    size: int

    @classmethod
    def of(cls, rank: ParallelRank, group: GroupConfig) -> ExpertSeat:
        return cls(max(group.dp_rank, 0) * rank.tp_size + rank.tp_rank, group.dp * rank.tp_size)

    def experts(self, num_experts: int) -> range:
        count = num_experts // self.size
        return range(self.index * count, (self.index + 1) * count)


class ExpertGroup:
    """The collectives of one seat. ``groups`` are those of the rank's own engine."""

    def __init__(self, seat: ExpertSeat, groups: Groups, store: Any, timeout_s: float, host: str) -> None:
        self.seat = seat
        self._groups = groups
        self._group = process_group(
            f"experts{groups.rank.pp_rank}", store, seat.index, seat.size, groups.device, timeout_s, host
        )

    def connect(self) -> None:
        """Wait until all seats are taken. Raises PeerLostError."""
        self._groups.wait(self._group.barrier)

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """[size, n] int64: row i goes to seat i. Returns [size, n]: row i has come from seat i."""
        if self._groups.is_muted:
            return counts
        received = torch.empty_like(counts)
        self._groups.wait(lambda: self._group.alltoall_base(received, counts, [], []))
        return received

    def exchange_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """[sum(sent), width], in the order of the seats that they go to. Returns [sum(received), width] likewise."""
        if self._groups.is_muted:
            return rows
        result = torch.empty(sum(received), rows.shape[1], dtype=rows.dtype, device=rows.device)
        self._groups.wait(lambda: self._group.alltoall_base(result, rows.contiguous(), received, sent))
        return result


class SpreadFeedForward(SparseFeedForward, frozen=True):
    """Like ``SparseFeedForward``, with other experts on other ranks. ``experts`` are this rank's."""

    is_collective: ClassVar = True
    groups: Groups
    exchange: ExpertGroup

    def forward(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        rank = self.groups.rank
        if rank.tp_size == 1 or not len(x):
            return self._own(x, kernels)
        first, last = (len(x) * number // rank.tp_size for number in (rank.tp_rank, rank.tp_rank + 1))
        result = torch.zeros_like(x)
        result[first:last] = self._own(x[first:last], kernels)
        return self.groups.all_reduce(result)

    def _own(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """The result for ``x``, whose experts may be on any rank. All seats call it, possibly with no rows."""
        num_experts = len(self.experts) * self.exchange.seat.size
        if len(x):
            weights, chosen = self.route(x)
        else:
            weights = x.new_zeros((0, self.top_k), dtype=torch.float32)
            chosen = x.new_zeros((0, self.top_k), dtype=torch.int64)
        # Rows sorted by expert, and so by the seat that holds it.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=num_experts).view(self.exchange.seat.size, -1)
        results = self._at_owners(x[order // self.top_k], counts, kernels)
        parts = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
        parts[order] = results.float() * weights.flatten()[order, None]
        return parts.view(len(x), self.top_k, x.shape[1]).sum(dim=1).to(x.dtype)

    def _at_owners(self, rows: torch.Tensor, counts: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Each row through its expert. ``counts`` [size, experts per seat] say how many rows go to which."""
        incoming = self.exchange.exchange_counts(counts)
        # One copy to the host for both.
        sent, received = torch.stack((counts.sum(dim=1), incoming.sum(dim=1))).tolist()
        there = self.exchange.exchange_rows(rows, sent, received)
        # Received rows are sorted by seat, then by expert.
        experts = torch.arange(len(self.experts), device=rows.device).repeat(self.exchange.seat.size)
        by_expert = torch.repeat_interleave(experts, incoming.flatten()).argsort(stable=True)
        results = torch.empty_like(there)
        start = 0
        for expert, count in zip(self.experts, incoming.sum(dim=0).tolist(), strict=True):
            if count:
                chosen = by_expert[start : start + count]
                results[chosen] = expert.forward(there[chosen], kernels)
                start += count
        return self.exchange.exchange_rows(results, received, sent)
