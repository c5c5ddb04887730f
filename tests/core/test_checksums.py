"""Whether blocks hold what was sent."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.checksums import block_checksum, find_damage, unit_checksums, unit_tokens
from kvrelay.core.layout import KVLayout, KVRegion, RegionCut, paged_kv


def test_every_bit_of_a_block_counts() -> None:
    block = np.random.default_rng(1).integers(0, 256, 96, dtype=np.uint8)
    before = block_checksum(block)
    assert block_checksum(block.copy()) == before
    for byte in range(len(block)):
        for bit in range(8):
            block[byte] ^= 1 << bit
            assert block_checksum(block) != before
            block[byte] ^= 1 << bit


def test_equal_checksums_are_no_damage() -> None:
    assert find_damage([], (), ()) is None
    assert find_damage([7, 3], (10, 2**64 - 1), (10, 2**64 - 1)) is None


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (None, "no checksums"),
        ((), "0 checksums came for 3 units"),
        ((10, 11, 12, 13), "4 checksums came for 3 units"),
        ((10, 11, 13), "1 of 3 blocks changed on the way, block 9 first"),
        ((11, 10, 12), "2 of 3 blocks changed on the way, block 7 first"),
    ],
)
def test_damage_is_named(sent: tuple[int, ...] | None, reason: str) -> None:
    damage = find_damage([7, 8, 9], sent, (10, 11, 12))
    assert damage is not None
    assert reason in damage


DENSE = np.arange(32 * 4 * 2 * 2 * 3, dtype=np.int32).reshape(32, 4, 2, 2, 3)
"""[token, layer, K or V, head, value]"""


def block_of(tp: int, pp: int, first_token: int, size: int) -> tuple[np.ndarray, KVLayout]:
    """The block that holds these tokens, over all ranks."""
    copies = max(1, tp // 2)
    layout = paged_kv(4, 2 * copies, size, 3, "int32", tp, pp, copies)
    num_layers, _, num_heads, _ = next(layout.parts(0)).shape
    block = np.empty((pp, tp, num_layers, 2, num_heads, size, 3), dtype=np.int32)
    tokens = DENSE[first_token : first_token + size]
    for stage in range(pp):
        for rank in range(tp):
            heads = [rank // copies] if copies > 1 else range(rank * num_heads, (rank + 1) * num_heads)
            layers = slice(stage * num_layers, (stage + 1) * num_layers)
            block[stage, rank] = tokens[:, layers][:, :, :, list(heads)].transpose(1, 2, 3, 0, 4)
    return block.reshape(-1).view(np.uint8), layout


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_units_of_equal_values_have_equal_checksums_however_they_are_cut(tp: int, pp: int, size: int) -> None:
    expected = [checksum for first in (0, 16) for checksum in unit_checksums(*block_of(1, 1, first, 16))]
    found = [checksum for first in range(0, 32, size) for checksum in unit_checksums(*block_of(tp, pp, first, size))]
    assert found == expected
    assert len(set(found)) == 2


@pytest.mark.parametrize("tp", [2, 8])
def test_every_byte_of_every_copy_counts(tp: int) -> None:
    block, layout = block_of(tp, 2, 0, 32)
    sound = unit_checksums(block, layout)
    for byte in range(0, len(block), 41):
        block[byte] ^= 1
        assert unit_checksums(block, layout) != sound
        block[byte] ^= 1


def test_units_divide_the_blocks_of_most_workers() -> None:
    assert [unit_tokens(size) for size in (1, 8, 16, 24, 32, 48, 128)] == [1, 8, 16, 8, 16, 16, 16]
    assert [unit_tokens(size, 128) for size in (128, 256)] == [128, 128]


def test_a_state_counts_in_the_last_unit_and_every_region_counts() -> None:
    latent = KVRegion("latent", 2, 1, 4, "int32", num_vectors=1)
    state = KVRegion("state", 1, 2, 4, "int32", num_vectors=1, entry_tokens=0)
    layout = KVLayout(32, (RegionCut(latent, (2,), 2), RegionCut(state, (1,))), tp_size=2)
    sizes = [part.num_bytes for part in layout.parts(0)]
    block = np.zeros(layout.block_bytes, dtype=np.uint8)
    sound = unit_checksums(block, layout)
    assert len(sound) == 2
    for byte in range(len(block)):
        block[byte] ^= 1
        damaged = [before != after for before, after in zip(sound, unit_checksums(block, layout), strict=True)]
        block[byte] ^= 1
        within = byte % (layout.block_bytes // 2)
        is_state = within >= sizes[0]
        assert damaged == ([False, True] if is_state or within % (32 * 16) >= 16 * 16 else [True, False])
