"""What a pattern's words say when they are read back; the expected texts are from how the bytes were moved."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.certify.pattern import Cause, Known, Pattern
from kvrelay.core.layout import KVLayout, KVRegion, RegionCut, paged_kv
from kvrelay.errors import InvalidInputError

LAYOUT = paged_kv(num_layers=2, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32")
"""A block: 2 layers, K and V, 2 heads, 4 tokens of 4 words."""


def test_every_word_of_many_blocks_is_different() -> None:
    words = Pattern(LAYOUT).blocks(7, [0, 4, 8]).view(np.uint64)
    assert words.shape == (3, 2 * 2 * 2 * 4 * 4)
    assert len(np.unique(words)) == words.size


def test_the_same_tokens_have_the_same_words_however_they_are_cut() -> None:
    small, large = (Pattern(paged_kv(2, 2, size, 8, "float32", tp_size=tp)) for size, tp in ((4, 1), (8, 2)))
    apart, together = small.blocks(3, [8, 12]), large.blocks(3, [8])
    assert set(apart.view(np.uint64).flat) == set(together.view(np.uint64).flat)
    assert not np.array_equal(apart.reshape(-1), together.reshape(-1))


def test_a_hit_is_placed_by_block_layer_vector_and_head() -> None:
    pattern = Pattern(LAYOUT)
    found = pattern.blocks(1, [0, 4])
    cell = LAYOUT.cells(found[1], 0)[1, 0, 1]
    cell[:] = 0
    damage = pattern.diagnose(found, 1, [0, 4])
    assert damage is not None
    assert damage.cause is Cause.CORRUPT
    assert damage.num_wrong_bytes == cell.size
    assert damage.where == "block 1 of the prompt, layer 1, K, head 1"


def test_ranks_are_named() -> None:
    layout = paged_kv(num_layers=2, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32", tp_size=2)
    pattern = Pattern(layout)
    found = pattern.blocks(1, [0])
    found[0, layout.rank_offsets[1] :] = 0
    damage = pattern.diagnose(found, 1, [0])
    assert damage is not None
    assert damage.where.endswith("head 1, rank 1")


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        (Known(sender_before=9), Cause.SENT_EARLY),
        (Known(receiver_before=9), Cause.NOT_ARRIVED),
        (Known(), Cause.LATE_WRITE),
    ],
    ids=["sender", "receiver", "another hand-off"],
)
def test_another_generation_says_whose_bytes_they_are(known: Known, cause: Cause) -> None:
    pattern = Pattern(LAYOUT)
    damage = pattern.diagnose(pattern.blocks(9, [0, 4]), 1, [0, 4], known)
    assert damage is not None
    assert damage.cause is cause


def test_two_regions_do_not_share_words() -> None:
    cuts = tuple(RegionCut(KVRegion(name, 2, 2, 8, "float32"), (2,)) for name in ("kv", "draft"))
    words = Pattern(KVLayout(4, cuts)).blocks(1, [0]).view(np.uint64)
    assert len(np.unique(words)) == words.size


def test_kv_of_no_whole_words_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no whole words"):
        Pattern(paged_kv(1, 1, 4, 3, "float32"))
