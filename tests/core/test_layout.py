"""KV layouts: sizes by the published formula, what no pool can have, and differences by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvrelay.core.layout import Compatibility, KVLayout, KVRegion, RegionCut, paged_kv

LAYOUT = paged_kv(num_layers=4, num_kv_heads=4, block_size=16, head_dim=32, dtype="bfloat16")
LATENT = KVRegion("latent", 4, 1, 576, "bfloat16", num_vectors=1)
STATE = KVRegion("state", 2, 4, 100, "float32", num_vectors=1, entry_tokens=0)


def test_block_bytes() -> None:
    assert LAYOUT.block_bytes == 4 * 2 * 4 * 16 * 32 * 2
    assert LAYOUT.bytes_per_token * 16 == LAYOUT.block_bytes


def test_each_of_two_ranks_holds_half_of_the_kv_heads() -> None:
    # 8 KV heads, 40 query heads, hidden 5120: 1024 values for K, 512 on each of two ranks.
    cut = paged_kv(1, 8, 1, 5120 // 40, "bfloat16", tp_size=2)
    assert cut.bytes_per_token == 2 * 1024 * 2
    assert [part.num_bytes for part in cut.parts(0)] == [2 * 512 * 2] * 2


def test_each_of_two_stages_holds_half_of_the_layers() -> None:
    cut = paged_kv(64, 8, 1, 128, "bfloat16", pp_size=2)
    assert [part.layers for part in cut.parts(0)] == [slice(0, 32), slice(32, 64)]
    assert cut.num_ranks == 2


def test_heads_that_several_ranks_hold_count_once_for_the_model() -> None:
    # 2 KV heads on 8 ranks: four copies of each.
    layout = paged_kv(1, 8, 1, 4, "bfloat16", tp_size=8, head_replicas=4)
    assert layout.flaw is None
    assert layout.model[0].num_heads == 2
    assert [part.shape[2] for part in layout.parts(0)] == [1] * 8


def test_a_block_is_the_regions_of_each_rank_side_by_side() -> None:
    # A latent that both ranks of a stage hold, states cut by heads on the last stage only.
    layout = KVLayout(16, (RegionCut(LATENT, (3, 1), 2), RegionCut(STATE, (0, 2))), tp_size=2)
    assert layout.flaw is None
    latent, state = 16 * 576 * 2, 100 * 4
    assert layout.rank_offsets == (0, 3 * latent, 6 * latent, 6 * latent + latent + 4 * state)
    assert [part.offset for part in layout.parts(1)] == [3 * latent, 6 * latent, 7 * latent, 8 * latent + 4 * state]
    assert layout.block_bytes == 8 * latent + 8 * state
    block = np.arange(layout.block_bytes, dtype=np.uint64).astype(np.uint8)
    assert layout.cells(block, 0).shape == (4, 1, 2, latent)
    assert layout.cells(block, 1).shape == (2, 1, 4, state)
    assert layout.entry_tokens == 1


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (KVLayout(16, (RegionCut(LATENT, (4,)), RegionCut(LATENT, (4,)))), "same name"),
        (KVLayout(16, (RegionCut(LATENT, (3,)),)), "are not 4"),
        (KVLayout(16, (RegionCut(LATENT, (2, 2)), RegionCut(STATE, (2,)))), "on 2 stages"),
        (KVLayout(16, (RegionCut(LATENT, (4,)),), tp_size=2), "tp 2 does not divide 1"),
        (paged_kv(4, 4, 16, 32, "text"), "unknown"),
        (paged_kv(4, 4, 16, 32, "int32", tp_size=2, head_replicas=2), "2 times each"),
        (KVLayout(16, (RegionCut(KVRegion("a", 1, 1, 8, "int32", entry_tokens=32), (1,)),)), "do not divide blocks"),
    ],
)
def test_what_no_pool_can_have(layout: KVLayout, reason: str) -> None:
    assert reason in str(layout.flaw)


BASE = Compatibility("m", "f", (*LAYOUT.model, STATE), 1337, 1)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "n"}, "model is 'n' there, 'm' here"),
        ({"weights_fingerprint": "g"}, "weights_fingerprint"),
        ({"hash_seed": 1}, "hash_seed is 1 there"),
        ({"protocol": 2}, "protocol is 2 there, 1 here"),
        ({"adapter": "sql"}, "adapter is 'sql' there, '' here"),
        (
            {"regions": (*LAYOUT.model, msgspec.structs.replace(STATE, tail_tokens=1))},
            "tail_tokens of region state is 1 there, 0 here",
        ),
        ({"regions": LAYOUT.model}, "regions are kv there, kv, state here"),
        (
            {"regions": (*LAYOUT.model, msgspec.structs.replace(STATE, dtype="int32"))},
            "dtype of region state is int32 there, float32 here",
        ),
    ],
)
def test_any_difference_changes_the_digest_and_has_a_name(changed: dict[str, Any], named: str) -> None:
    other = msgspec.structs.replace(BASE, **changed)
    assert other.digest() != BASE.digest()
    assert named in str(BASE.difference(other))


def test_equal_terms_have_equal_digests() -> None:
    same = msgspec.json.decode(msgspec.json.encode(BASE), type=Compatibility)
    assert same.digest() == BASE.digest()
    assert BASE.difference(same) is None
