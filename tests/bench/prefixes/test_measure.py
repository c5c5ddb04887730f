"""The repetition measure on files with known answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.bench.prefixes.measure import PrefixOptions, Unit, measure_prefixes
from kvrelay.bench.progress import ProgressBar
from kvrelay.errors import InvalidInputError

BAR = ProgressBar(None)


def test_known_repetition(tmp_path: Path) -> None:
    system = "You are a helpful assistant of the harbour office. " * 3
    path = tmp_path / "talk.txt"
    path.write_text("\n".join([f"{system}{letter} question" for letter in "abcdef"] + [f"{n} alone" for n in range(6)]))
    found = measure_prefixes((path,), PrefixOptions(min_count=4, cache_blocks=(1, 100)), BAR).report
    assert (found.conversations, found.shared_prefixes) == (12, 1)
    assert found.repetition == pytest.approx(1 / 12)
    assert found.covered == pytest.approx(6 / 12)
    assert found.lengths is not None
    assert found.lengths.mean == len(system)
    assert found.top[0].count == 6
    assert found.top[0].text == system[:160]
    assert found.num_blocks == 6
    assert [cache.hit_ratio for cache in found.caches] == pytest.approx([5 / 6] * 3)


def test_several_files_are_one_set(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"the same beginning {name}\n")
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    found = measure_prefixes(files, PrefixOptions(min_count=2, min_length=5), BAR).report
    assert [(prefix.text, prefix.count) for prefix in found.top] == [("the same beginning ", 2)]


def test_mooncake_by_hash_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ids = ([0, 1, 2], [0, 1, 3], [0, 1], [7])
    rows = [{"timestamp": 0, "input_length": 512 * len(i), "output_length": 1, "hash_ids": i} for i in ids]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = measure_prefixes((path,), PrefixOptions(min_count=3, cache_blocks=(2,)), BAR).report
    assert found.unit is Unit.BLOCKS
    assert [(prefix.text, prefix.length, prefix.count) for prefix in found.top] == [("0 1", 2, 3)]
    # Two blocks of cache hold the tail of the last request only, never its beginning, but for [0, 1] after itself.
    assert [cache.hit_ratio for cache in found.caches] == pytest.approx([4 / 9, 0])


def test_tokens_need_a_tokenizer_and_blocks_are_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    path.write_text("one two three four\none two three five\n")
    with pytest.raises(InvalidInputError, match="--tokenizer"):
        measure_prefixes((path,), PrefixOptions(unit=Unit.TOKENS), BAR)
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: at for at, word in enumerate(["one", "two", "three", "four", "five", "?"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = PrefixOptions(min_count=2, min_length=2, unit=Unit.TOKENS, tokenizer=tmp_path, block_size=2)
    found = measure_prefixes((path,), options, BAR).report
    assert [(prefix.text, prefix.length) for prefix in found.top] == [("0 1 2", 3)]
    assert (found.num_blocks, found.caches[0].hit_ratio) == (4, 0.25)


def test_mixed_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}')
    with pytest.raises(InvalidInputError, match="one set"):
        measure_prefixes((tmp_path / "a.txt", tmp_path / "b.jsonl"), PrefixOptions(), BAR)
