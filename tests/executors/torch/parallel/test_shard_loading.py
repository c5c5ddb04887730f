"""A rank reads its own share of the checkpoint, and all ranks together read everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.errors import CheckpointError
from kvrelay.executors.torch.checkpoints import make_model
from kvrelay.executors.torch.config import load_model_config
from kvrelay.executors.torch.kernels.torch_kernels import TorchKernels
from kvrelay.executors.torch.models.loading import load_model
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.executors.torch.weights import Checkpoint, Cut

CPU = torch.device("cpu")


def alone(rank: ParallelRank) -> Any:
    """Groups of a rank that has no others."""
    return SimpleNamespace(rank=rank, experts=None, all_reduce=lambda x: x, moving=lambda call: call)


def read_by(model: Path, rank: ParallelRank, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Elements that loading as ``rank`` reads, by tensor."""
    read: dict[str, int] = {}
    tensor = Checkpoint.tensor

    def counted(self: Checkpoint, name: str, shape: tuple[int, ...], cut: Cut) -> torch.Tensor:
        found = tensor(self, name, shape, cut)
        read[name] = read.get(name, 0) + found.numel()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "tensor", counted)
        with Checkpoint(model, torch.float32) as checkpoint:
            load_model(load_model_config(model), checkpoint, TorchKernels(torch.float32), CPU, rank, alone(rank))
    return read


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_each_rank_reads_its_share(
    arch: str, tp: int, pp: int, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint_of(arch)
    whole = read_by(model, ParallelRank(), monkeypatch)
    shares = [read_by(model, ParallelRank.numbered(i, tp, pp), monkeypatch) for i in range(tp * pp)]
    for name, count in whole.items():
        is_repeated = "norm" in name or name.endswith("gate.weight")
        holders = [share[name] for share in shares if name in share]
        if not is_repeated:
            assert sum(holders) == count * (pp if name == "model.embed_tokens.weight" and arch == "qwen2" else 1), name
            assert max(holders) == count // tp, name
    # No rank reads much more than an equal part: what is repeated, and the vocabulary at both ends of the pipeline.
    vocabulary = sum(count for name, count in whole.items() if "embed_tokens" in name or "lm_head" in name)
    small = sum(count for name, count in whole.items() if "norm" in name or name.endswith("gate.weight"))
    for share in shares:
        assert sum(share.values()) <= sum(whole.values()) / (tp * pp) + vocabulary / tp + small


def test_scores_of_two_ranks_are_not_rounded(tmp_path: Path) -> None:
    """In bfloat16 each rank's columns are the sums in float32, and so is what the first rank gathers."""
    model, parts = tmp_path / "model", list[torch.Tensor]()
    make_model(model, "llama", "tiny", dtype="bfloat16")
    torch.manual_seed(0)
    hidden = torch.randn(3, 256).bfloat16()
    for index in range(2):
        rank, kernels = ParallelRank.numbered(index, 2, 1), TorchKernels(torch.bfloat16)
        groups = alone(rank)
        groups.gather_columns = lambda x, num_columns: parts.append(x) or torch.cat(parts, dim=1)
        with Checkpoint(model, torch.bfloat16) as checkpoint:
            weight = checkpoint.read("lm_head.weight", (1024, 256)).double()
            loaded = load_model(load_model_config(model), checkpoint, kernels, CPU, rank, groups)
        scores = loaded.decoder.logits(hidden)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), hidden.double() @ weight.T, rtol=1e-5, atol=1e-5)


def test_a_cut_is_that_part_of_the_tensor(checkpoint_of: Callable[[str], Path]) -> None:
    name, shape = "model.layers.0.self_attn.o_proj.weight", (256, 256)
    with Checkpoint(checkpoint_of("llama"), torch.float32) as checkpoint:
        whole = checkpoint.read(name, shape)
        assert torch.equal(checkpoint.read(name, shape, Cut(1, slice(64, 128))), whole[:, 64:128])
        stacked = checkpoint.stack([name, name], [shape, shape], [Cut(0, slice(0, 8)), Cut(0, slice(100, 103))])
        assert torch.equal(stacked, torch.cat((whole[:8], whole[100:103])))
        with pytest.raises(CheckpointError, match=r"has shape \(256, 256\), expected \(128, 256\)"):
            checkpoint.read(name, (128, 256), Cut(0, slice(0, 64)))
