"""Whether blocks hold what was sent."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.checksums import block_checksum, find_damage, unit_checksums, unit_tokens
from kvrelay.core.layout import KVLayout


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
    layout = KVLayout(4, 2 * copies, size, 3, "int32", tp, pp, copies)
    part = layout.of_rank
    block = np.empty((pp, tp, *part.block_shape), dtype=np.int32)
    tokens = DENSE[first_token : first_token + size]
    for stage in range(pp):
        for rank in range(tp):
            heads = [rank // copies] if copies > 1 else range(rank * part.num_kv_heads, (rank + 1) * part.num_kv_heads)
            layers = slice(stage * part.num_layers, (stage + 1) * part.num_layers)
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
