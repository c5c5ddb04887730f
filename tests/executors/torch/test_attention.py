"""The Numba kernels against torch's attention: decode, prefill and both, windows, norms, both types, odd sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvrelay.errors import ConfigError
from kvrelay.executors.torch.attention.base import AttentionSpec
from kvrelay.executors.torch.attention.cpu import CpuAttention, kernel_cache
from kvrelay.executors.torch.attention.torch_ref import TorchAttention
from kvrelay.executors.torch.build import choose_backend
from kvrelay.executors.torch.config import RopeConfig
from kvrelay.executors.torch.kernels.compile_once import compile_once
from kvrelay.executors.torch.kernels.numba_threads import usable_threads
from kvrelay.executors.torch.rope import rope_table
from kvrelay.executors.torch.slots import StepBatch

NUM_LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """The bundled checkpoint's group and head, whose kernels other tests need, too: compiling them takes 12 s."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16


def make_batch(num_tokens: list[int], starts: list[int], block_size: int, seed: int = 0) -> StepBatch:
    counts, first = np.array(num_tokens, dtype=np.int32), np.array(starts, dtype=np.int32)
    width = -(-int((first + counts).max()) // block_size)
    blocks = np.random.default_rng(seed).permutation(len(counts) * width).astype(np.int32)
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, num_tokens)]).astype(np.int64)
    return StepBatch(
        slots=np.arange(len(counts), dtype=np.int32),
        starts=first,
        num_tokens=counts,
        row_offsets=offsets,
        token_ids=positions,
        positions=positions,
        samples=np.ones(len(counts), dtype=np.bool_),
        num_decodes=next((i for i, n in enumerate(num_tokens) if n != 1), len(counts)),
        block_table=blocks.reshape(len(counts), width),
    )


def make_spec(shape: Shape, window: int, norm: bool) -> AttentionSpec:
    def norms() -> tuple[torch.Tensor | None, ...]:
        return tuple(torch.rand(shape.head_dim) + 0.5 if norm else None for _ in range(NUM_LAYERS))

    return AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        windows=(window,) * NUM_LAYERS,
        rope=torch.from_numpy(rope_table(RopeConfig(), shape.head_dim, 1024)),
        norm_eps=1e-6,
        q_norms=norms(),
        k_norms=norms(),
    )


def run_both(
    batch: StepBatch, shape: Shape, dtype: torch.dtype, *, window: int = 0, norm: bool = False, threads: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results and pools of the kernels and of torch."""
    torch.manual_seed(0)
    spec = make_spec(shape, window, norm)
    num_blocks = batch.block_table.size
    pool = torch.randn(num_blocks, NUM_LAYERS, 2, shape.num_kv_heads, shape.block_size, shape.head_dim).to(dtype)
    qkv = torch.randn(len(batch.token_ids), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim).to(dtype)
    pools = pool.clone(), pool.clone()
    results = []
    for attention in (CpuAttention(spec, pools[0], dtype, usable_threads(threads)), TorchAttention(spec, pools[1])):
        attention.begin(batch)
        results.append(attention.forward(1, qkv).float().clone())
    return results[0], results[1], pools[0].float(), pools[1].float()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """By one of the processes that run tests beside each other: workers of the bundled checkpoint need them, too."""
    for dtype in (torch.float32, torch.bfloat16):
        compile_once(lambda dtype=dtype: run_both(make_batch([1], [0], 16), Shape(), dtype), kernel_cache())


# bfloat16 results may differ by one rounding of values around 2, float32 ones by the order of sums.
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("num_tokens", "starts"),
    [([1, 1, 1], [0, 300, 40]), ([70], [0]), ([33, 7], [15, 100]), ([1, 1, 40, 3], [9, 257, 70, 0])],
    ids=["decode", "prefill", "chunks", "mixed"],
)
@pytest.mark.parametrize(("window", "norm"), [(0, False), (24, True)])
def test_equals_torch(
    dtype: torch.dtype, close: float, num_tokens: list[int], starts: list[int], window: int, norm: bool
) -> None:
    batch = make_batch(num_tokens, starts, 16)
    ours, reference, pool, expected_pool = run_both(batch, Shape(), dtype, window=window, norm=norm)
    torch.testing.assert_close(ours, reference, rtol=close, atol=close)
    torch.testing.assert_close(pool, expected_pool, rtol=close, atol=close)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_block_sizes(block_size: int) -> None:
    batch = make_batch([1, 50], [130, 20], block_size)
    ours, reference, pool, expected_pool = run_both(batch, Shape(block_size=block_size), torch.float32)
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool, expected_pool, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(14, 2, 12), id="group-of-7-lanes-of-4", marks=pytest.mark.matrix),
        pytest.param(Shape(14, 2, 64), id="group-of-7", marks=pytest.mark.matrix),
        pytest.param(Shape(3, 3, 12), id="lanes-of-4", marks=pytest.mark.matrix),
    ],
)
def test_other_heads(shape: Shape) -> None:
    """Each shape has kernels of its own, and compiling them takes 12 s. The tiny models' heads of 32 are tested with
    them."""
    batch = make_batch([1, 1, 40], [200, 0, 30], 16)
    ours, reference, _, _ = run_both(batch, shape, torch.bfloat16)
    torch.testing.assert_close(ours, reference, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours_or_threads(dtype: torch.dtype) -> None:
    """Bit for bit: alone and among others, on one thread and on two."""
    batch = make_batch([1, 1, 1, 45], [50, 60, 70, 10], 16)
    together, _, _, _ = run_both(batch, Shape(), dtype, threads=2)
    alone, _, _, _ = run_both(batch, Shape(), dtype, threads=1)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_give_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = Shape()
    spec = make_spec(shape, window=0, norm=False)
    qkv = torch.randn(150, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim).to(dtype)
    pool = torch.zeros(10, NUM_LAYERS, 2, shape.num_kv_heads, 16, shape.head_dim, dtype=dtype)
    attention = CpuAttention(spec, pool, dtype, 1)
    attention.begin(make_batch([150], [0], 16))
    whole = attention.forward(0, qkv).clone()
    pool.zero_()
    parts = []
    for start, count in ((0, 37), (37, 90), (127, 23)):
        batch = make_batch([count], [start], 16)
        table = make_batch([150], [0], 16).block_table
        attention.begin(
            StepBatch(
                **{name: getattr(batch, name) for name in batch.__struct_fields__ if name != "block_table"},
                block_table=table,
            )
        )
        parts.append(attention.forward(0, qkv[start : start + count]).clone())
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "rows", [[0, 1, 141, 181], [181, 0, 150, 20, 21, 149], [1, 0]], ids=["last", "some", "no prefill"]
)
def test_only_the_rows_asked_for(rows: list[int]) -> None:
    """They have the bits that they have among all, and all keys and values are in the pool."""
    torch.manual_seed(0)
    shape, batch = Shape(), make_batch([1, 1, 140, 40], [9, 257, 0, 70], 16)
    qkv = torch.randn(len(batch.token_ids), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    pool = torch.randn(batch.block_table.size, NUM_LAYERS, 2, shape.num_kv_heads, 16, shape.head_dim)
    pools = pool.clone(), pool.clone()
    results = []
    for each, wanted in zip(pools, (None, torch.tensor(rows))):
        attention = CpuAttention(make_spec(shape, 0, norm=False), each, torch.float32, usable_threads(2))
        attention.begin(batch)
        results.append(attention.forward(0, qkv, wanted)[rows].clone())
    assert torch.equal(*results)
    assert torch.equal(*pools)


def test_the_backend_follows_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert (choose_backend("auto", cpu), choose_backend("auto", cuda)) == ("cpu", "torch")
    assert choose_backend("torch", cpu) == "torch"
    with pytest.raises(ConfigError, match="does not run on cuda"):
        choose_backend("cpu", cuda)
