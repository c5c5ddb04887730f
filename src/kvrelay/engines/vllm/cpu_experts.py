"""Code that runs in vLLM's processes on a CPU whose experts lie in several ranks: what vLLM's CPU build lacks for them.

vLLM 0.32 gathers the tokens of all ranks before the experts, and adds up each rank's part behind them. For CPUs it
names these two collectives but does not have them, and its kernel takes an expert's number in the model for its number
in the rank (vLLM's issue 57837). They are added here to vLLM's classes, and no file of vLLM's is changed. A vLLM that
has the collectives keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gathered(own: torch.Tensor, sizes: list[int], group: Any) -> torch.Tensor:
    """[sum(sizes), ...], the rows of all ranks in their order. ``own``: [sizes[rank], ...] of this one.

    gloo gathers equal sizes, so shorter parts are padded."""
    padded = own.new_zeros((max(sizes), *own.shape[1:]))
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def scattered_sum(rows: torch.Tensor, sizes: list[int], rank: int, group: Any) -> torch.Tensor:
    """[sizes[rank], ...], this rank's rows of the sum over all ranks' ``rows``: [sum(sizes), ...].

    Added up in the order of the ranks, so a token's sum does not depend on where its row lies in the batch."""
    parts = rows.new_empty((len(sizes) * sizes[rank], *rows.shape[1:]))
    dist.all_to_all_single(parts, rows.contiguous(), [sizes[rank]] * len(sizes), sizes, group=group)
    return parts.view(len(sizes), sizes[rank], *rows.shape[1:]).sum(0)


def of_this_rank(
    expert_map: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in this rank, and weights, of the experts ``ids``: those of other ranks count nothing. ``expert_map``:
    [num_experts], an expert's number in this rank, -1 if it is in another."""
    local = expert_map[ids.long()]
    return local.clamp(min=0).to(ids.dtype), weights * (local >= 0)


def add_collectives(communicator: Any, base: Any) -> None:
    """Give ``communicator``, a class of vLLM's, those of its ``base``'s methods that it has not."""

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        assert dim == 0, "vLLM gathers tokens"
        return gathered(input_, sizes or [len(input_)] * self.world_size, self.device_group)

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        assert dim == 0, "vLLM scatters tokens"
        equal = [len(input_) // self.world_size] * self.world_size
        return scattered_sum(input_, sizes or equal, self.rank_in_group, self.device_group)

    for method in (all_gatherv, reduce_scatterv):
        if getattr(communicator, method.__name__) is getattr(base, method.__name__):
            setattr(communicator, method.__name__, method)


def use_expert_map(experts: Any) -> None:
    """Let ``experts``, a class of vLLM's, compute the experts of its rank only."""
    original = experts.apply

    def apply(
        self: Any, *args: Any, topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: Any, **others: Any
    ) -> Any:
        if expert_map is not None:
            if others["apply_router_weight_on_input"]:
                raise NotImplementedError("experts that weigh their input are not spread over ranks on a CPU")
            topk_ids, topk_weights = of_this_rank(expert_map, topk_ids, topk_weights)
        return original(self, *args, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=None, **others)

    experts.apply = apply


def prepare() -> None:
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    add_collectives(CpuCommunicator, DeviceCommunicatorBase)
    use_expert_map(CPUUnquantizedExperts)
