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
    cut = msgspec.structs.replace(whole, tp_size=2)
    assert whole.bytes_per_token == cut.bytes_per_token == 2 * 1024 * 2
    assert cut.of_rank.bytes_per_token == 2 * 512 * 2


def test_each_of_two_stages_holds_half_of_the_layers():
    whole = KVLayout(num_layers=64, num_kv_heads=8, block_size=1, head_dim=128, dtype="bfloat16", pp_size=2)
    assert whole.of_rank.num_layers == 32
    assert whole.num_ranks == 2


def test_heads_that_several_ranks_hold_count_once_for_the_model():
    # 2 KV heads on 8 ranks: four copies of each.
    layout = KVLayout(
        num_layers=1, num_kv_heads=8, block_size=1, head_dim=4, dtype="bfloat16", tp_size=8, head_replicas=4
    )
    assert layout.flaw is None
    assert layout.num_model_heads == 2
    assert layout.of_rank.num_kv_heads == 1


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
