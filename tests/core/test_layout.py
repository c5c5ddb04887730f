"""KV layouts: sizes by the published formula, and digests that tell pools apart."""

import msgspec

from kvrelay.core.layout import Compatibility, KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, block_size=16, head_dim=32, dtype="bfloat16")


def test_block_bytes():
    assert LAYOUT.block_shape == (4, 2, 4, 16, 32)
    assert LAYOUT.block_bytes == 4 * 2 * 4 * 16 * 32 * 2
    assert LAYOUT.bytes_per_token * 16 == LAYOUT.block_bytes


def test_each_of_two_ranks_holds_half_of_the_kv_heads():
    # 8 KV heads, 40 query heads, hidden 5120: 1024 values for K, 512 on each of two ranks.
    whole = KVLayout(num_layers=1, num_kv_heads=8, block_size=1, head_dim=5120 // 40, dtype="bfloat16")
    half = msgspec.structs.replace(whole, num_kv_heads=4, tp_size=2)
    assert whole.bytes_per_token == 2 * 1024 * 2
    assert half.bytes_per_token == 2 * 512 * 2


def test_any_difference_changes_the_digest():
    base = Compatibility("m", "f", LAYOUT, 1337, 1)
    others = [
        Compatibility("n", "f", LAYOUT, 1337, 1),
        Compatibility("m", "g", LAYOUT, 1337, 1),
        Compatibility("m", "f", msgspec.structs.replace(LAYOUT, dtype="float32"), 1337, 1),
        Compatibility("m", "f", LAYOUT, 1, 1),
        Compatibility("m", "f", LAYOUT, 1337, 2),
    ]
    digests = {item.digest() for item in [base, *others]}
    assert len(digests) == 6
    assert base.digest() == Compatibility("m", "f", LAYOUT, 1337, 1).digest()
