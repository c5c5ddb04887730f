"""What vLLM's CPU build lacks for experts in several ranks: collectives of unequal parts, and experts of one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE_S

from kvrelay.engines.vllm.cpu_experts import add_collectives, use_expert_map

SIZES = [2, 0, 3]
RANK = """
import os, sys
import torch, torch.distributed as dist
from kvrelay.engines.vllm.cpu_experts import add_collectives

rank, sizes = int(sys.argv[1]), [2, 0, 3]
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)

class Base:
    all_gatherv = reduce_scatterv = None

class Communicator(Base):
    world_size, rank_in_group, device_group = 3, rank, dist.group.WORLD

add_collectives(Communicator, Base)
own = torch.arange(2.0 * sizes[rank]).view(-1, 2) + 100 * rank
several = Communicator().all_gatherv([own, own[:, :1].long()], 0, sizes)
equal = Communicator().all_gatherv(torch.full((1, 1), float(rank)))
# Row i of rank r is [i + 100 r], so row i of the sum is [3 i + 300].
rows = (torch.arange(5.0) + 100 * rank).view(-1, 1)
part = Communicator().reduce_scatterv(rows, 0, sizes)
print([each.tolist() for each in several], equal.tolist(), part.tolist(), flush=True)
# As our ranks and vLLM's workers end: a thread of gloo that lets go of a tensor while the interpreter ends, aborts.
os._exit(0)
"""


@pytest.mark.matrix  # three processes that import torch
def test_rows_of_all_ranks_are_gathered_and_added_up(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(len(SIZES))
    ]
    printed = [rank.communicate(timeout=2 * PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    rows = [[0.0, 1.0], [2.0, 3.0], [200.0, 201.0], [202.0, 203.0], [204.0, 205.0]]
    numbers = [[int(row[0])] for row in rows]
    sums = [[300.0], [303.0]], [], [[306.0], [309.0], [312.0]]
    assert printed == [f"{[rows, numbers]} {[[0.0], [1.0], [2.0]]} {part}\n" for part in sums]


def test_collectives_that_vllm_has_stay() -> None:
    class Base:
        def all_gatherv(self) -> str:
            raise NotImplementedError

        reduce_scatterv = all_gatherv

    class Communicator(Base):
        def all_gatherv(self) -> str:
            return "its own"

    add_collectives(Communicator, Base)
    assert Communicator().all_gatherv() == "its own"
    assert Communicator.reduce_scatterv is not Base.reduce_scatterv


class Experts:
    """Its experts multiply by their number in the rank plus one."""

    def apply(self, *, output: Any, topk_ids: Any, topk_weights: Any, expert_map: Any, **others: Any) -> None:
        assert expert_map is None
        output[:] = ((topk_ids + 1) * topk_weights).sum(1)


use_expert_map(Experts)


@pytest.mark.parametrize(
    ("expert_map", "expected"),
    [
        # Expert 0 and 1 of the model are those of this rank, 2 and 3 of another; and the reverse.
        ([0, 1, -1, -1], [0.5 * 1 + 0.25 * 2, 0.5 * 2, 0.0]),
        ([-1, -1, 0, 1], [0.0, 0.25 * 1, 0.5 * 2 + 0.25 * 1]),
        (None, [0.5 * 1 + 0.25 * 2, 0.5 * 2 + 0.25 * 3, 0.5 * 4 + 0.25 * 3]),
    ],
)
def test_experts_of_other_ranks_count_nothing(expert_map: list[int] | None, expected: list[float]) -> None:
    output = torch.empty(3)
    Experts().apply(
        output=output,
        topk_ids=torch.tensor([[0, 1], [1, 2], [3, 2]], dtype=torch.int32),
        topk_weights=torch.tensor([[0.5, 0.25]] * 3),
        expert_map=None if expert_map is None else torch.tensor(expert_map),
        apply_router_weight_on_input=False,
    )
    assert output.tolist() == expected


def test_experts_that_weigh_their_input_are_refused() -> None:
    given = SimpleNamespace(ids=torch.zeros(1, 1, dtype=torch.int32), weights=torch.ones(1, 1))
    with pytest.raises(NotImplementedError, match="weigh their input"):
        Experts().apply(
            output=torch.empty(1),
            topk_ids=given.ids,
            topk_weights=given.weights,
            expert_map=torch.tensor([0]),
            apply_router_weight_on_input=True,
        )
