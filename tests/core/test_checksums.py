"""Whether blocks hold what was sent."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.core.checksums import block_checksum, find_damage


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
        ((), "0 checksums came for 3 blocks"),
        ((10, 11, 12, 13), "4 checksums came for 3 blocks"),
        ((10, 11, 13), "1 of 3 blocks changed on the way, block 9 first"),
        ((11, 10, 12), "2 of 3 blocks changed on the way, block 7 first"),
    ],
)
def test_damage_is_named(sent: tuple[int, ...] | None, reason: str) -> None:
    damage = find_damage([7, 8, 9], sent, (10, 11, 12))
    assert damage is not None
    assert reason in damage
