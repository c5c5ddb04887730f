"""The pool's address and size, and amounts of memory."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import psutil
import pytest
import torch

from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.core.checksums import block_checksum
from kvrelay.core.layout import paged_kv
from kvrelay.errors import ConfigError
from kvrelay.executors.torch.kv_pool import KvPool, auto_pool_bytes, decide_num_blocks

LAYOUT = paged_kv(num_layers=2, num_kv_heads=4, block_size=16, head_dim=32, dtype="bfloat16")


def test_region_is_the_tensor() -> None:
    pool = KvPool(LAYOUT, 10, torch.device("cpu"), torch.bfloat16)
    assert pool.tensor.shape == (10, 2, 2, 4, 16, 32)
    assert pool.tensor.is_contiguous()
    assert pool.region.address == pool.tensor.data_ptr()
    assert pool.region.address % mmap.PAGESIZE == 0
    assert pool.region.num_bytes == 10 * LAYOUT.block_bytes
    assert pool.tensor[3].data_ptr() == pool.region.address + 3 * LAYOUT.block_bytes


def test_an_unused_pool_costs_no_resident_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pool = KvPool(LAYOUT, (256 * 2**20) // LAYOUT.block_bytes, torch.device("cpu"), torch.bfloat16)
    assert process.memory_info().rss - before < 32 * 2**20
    assert float(pool.tensor[5].sum()) == 0.0


def test_blocks_are_copied_within_the_region_and_to_what_is_not_registered() -> None:
    """As on a GPU, whose spilled blocks lie in host memory."""
    pool = KvPool(LAYOUT, 4, torch.device("cpu"), torch.bfloat16, num_holding_blocks=3, num_spill_blocks=2)
    assert pool.region.num_bytes == 7 * LAYOUT.block_bytes
    assert len(pool.tensor) == 7
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    first, second = pool.tensor[1].clone(), pool.tensor[3].clone()
    pool.copy([1, 3], [6, 4])
    pool.copy([6, 4], [8, 7])
    pool.tensor.zero_()
    pool.copy([8, 7], [0, 2])
    assert torch.equal(pool.tensor[0], first)
    assert torch.equal(pool.tensor[2], second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_checksums_cover_all_layers_of_a_block(dtype: torch.dtype) -> None:
    layout = paged_kv(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=str(dtype).removeprefix("torch."))
    pool = KvPool(layout, 5, torch.device("cpu"), dtype)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    memory = (ctypes.c_ubyte * pool.region.num_bytes).from_address(pool.region.address)
    blocks = np.frombuffer(memory, dtype=np.uint8).reshape(5, layout.block_bytes)
    assert pool.checksums((4, 0, 2)) == tuple(block_checksum(blocks[block_id]) for block_id in (4, 0, 2))
    for layer in range(3):
        before = pool.checksums(range(5))
        pool.tensor[2, layer, 1, 1, 3, 7] += 1
        assert [old == new for old, new in zip(before, pool.checksums(range(5)), strict=True)] == [
            block_id != 2 for block_id in range(5)
        ]


def test_number_of_blocks() -> None:
    assert decide_num_blocks(LAYOUT, 7, "1GiB", lambda: 0) == 7
    assert decide_num_blocks(LAYOUT, 0, "1MiB", lambda: 0) == 2**20 // LAYOUT.block_bytes
    assert decide_num_blocks(LAYOUT, 0, "auto", lambda: 3 * LAYOUT.block_bytes + 1) == 3
    assert 0 < auto_pool_bytes(torch.device("cpu")) <= 2**30
    with pytest.raises(ConfigError, match="one block"):
        decide_num_blocks(LAYOUT, 0, "1KiB", lambda: 0)


@pytest.mark.parametrize("num_blocks", [2**40, 2**60])
def test_a_pool_that_the_host_cannot_map_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"cannot map .*TiB for the KV pool and its holding area"):
        KvPool(LAYOUT, 1, torch.device("cpu"), torch.bfloat16, num_holding_blocks=num_blocks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 2**29), ("4 GiB", 2**32), ("1.5GB", 1_500_000_000), ("1024", 1024), ("8kib", 8192)],
)
def test_amounts_of_memory_are_parsed_in_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "4 G B", "1e9"])
def test_malformed_amounts_of_memory_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host_kv_cache is not an amount of memory"):
        parse_bytes(text, "host_kv_cache")


def test_an_amount_beyond_all_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory: no machine has so much memory"):
        parse_bytes("9" * 400 + "TiB")
