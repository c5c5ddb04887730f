"""Which part each rank holds: together they hold everything, once."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.errors import ConfigError
from kvrelay.executors.torch.config import ModelConfig, MoeConfig, RopeConfig
from kvrelay.executors.torch.parallel.rank import ParallelRank, check_sizes

CONFIG = ModelConfig(
    family="llama",
    vocab_size=1001,
    hidden=256,
    intermediate=688,
    num_layers=12,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    norm_eps=1e-5,
    max_position=512,
    rope=RopeConfig(),
    dtype="float32",
    eos_token_ids=(1,),
    windows=(0,) * 12,
    sparse=(False,) * 12,
)


def ranks(tp: int, pp: int = 1) -> list[ParallelRank]:
    return [ParallelRank.numbered(i, tp, pp) for i in range(tp * pp)]


def covered(parts: list[slice]) -> list[int]:
    return [index for part in parts for index in range(part.start, part.stop)]


def test_one_rank_holds_everything() -> None:
    only = ParallelRank()
    assert (only.layers(12), only.share(8), only.vocabulary(1001)) == (range(12), slice(0, 8), slice(0, 1001))
    assert only.samples
    assert only.is_first_stage


@pytest.mark.parametrize("tp", [1, 2, 4, 7])
def test_the_vocabulary_is_covered_once(tp: int) -> None:
    assert covered([rank.vocabulary(1001) for rank in ranks(tp)]) == list(range(1001))
    assert covered([rank.vocabulary(5) for rank in ranks(tp)]) == list(range(5))


def test_stages_and_shares_cover_everything_once() -> None:
    grid = ranks(2, 3)
    assert [rank.index for rank in grid] == list(range(6))
    assert [list(rank.layers(12)) for rank in grid if rank.tp_rank == 0] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert covered([rank.share(688) for rank in grid if rank.pp_rank == 0]) == list(range(688))
    assert [rank.index for rank in grid if rank.samples] == [4]


@pytest.mark.parametrize(("tp", "heads"), [(2, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3])])
def test_kv_heads_are_shared_out_or_repeated_beside_their_queries(tp: int, heads: list[int]) -> None:
    assert covered([rank.kv_heads(4) for rank in ranks(tp)]) == heads
    for rank in ranks(tp):
        queries, keys = rank.share(8), rank.kv_heads(4)
        assert {query * 4 // 8 for query in range(queries.start, queries.stop)} == set(range(keys.start, keys.stop))


@pytest.mark.parametrize(
    ("changes", "tp", "pp", "message"),
    [
        ({}, 3, 1, "tp 3 does not divide num_attention_heads 8"),
        ({"intermediate": 690}, 4, 1, "tp 4 does not divide intermediate_size 690"),
        ({"num_heads": 12, "num_kv_heads": 3}, 4, 1, "tp 4 and num_key_value_heads 3"),
        ({}, 1, 5, "pp 5 does not divide num_hidden_layers 12"),
        ({"moe": MoeConfig(4, 2, 6, True), "sparse": (True,) * 12}, 4, 1, "the experts' intermediate size 6"),
    ],
)
def test_sizes_that_do_not_divide_are_named(changes: dict[str, object], tp: int, pp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sizes(msgspec.structs.replace(CONFIG, **changes), tp, pp)


def test_sizes_that_divide_pass() -> None:
    check_sizes(CONFIG, 8, 4)
    # No layer is dense, so nobody asks for the dense size.
    check_sizes(
        msgspec.structs.replace(CONFIG, intermediate=3, moe=MoeConfig(4, 2, 64, True), sparse=(True,) * 12), 2, 1
    )
