"""Which tokens end an answer: one rule for all engines, and a warning or a refusal for ids that make no sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.lazily import transformers

from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import CheckpointError
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.executors.torch.config import load_model_config

CONFIG = json.loads((bundled_checkpoint_path() / "config.json").read_text())
TOKENIZER = json.loads((bundled_checkpoint_path() / "tokenizer.json").read_text())
HE = TOKENIZER["model"]["vocab"]["he"]
"""A plain entry of the vocabulary, no added token."""


def write(
    directory: Path,
    config: Any = None,
    generation: Any = None,
    tokenizer: dict[str, Any] | None = None,
    special: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint without weights whose end tokens are ``config`` and ``generation``, and the tokenizer's."""
    (directory / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": config}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    shutil.copy(bundled_checkpoint_path() / "tokenizer.json", directory)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind | (tokenizer or {})))
    if special is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(special))
    return directory


def ends_of(directory: Path) -> tuple[int, ...]:
    """As every engine sees them."""
    ends = checkpoint_facts(directory).eos_token_ids
    assert load_model_config(directory).eos_token_ids == ends
    return ends


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": 7}, (7,)),
        ({"config": [7, 8, 7]}, (7, 8)),
        ({"generation": [9, 10]}, (9, 10)),
        ({"tokenizer": {"eos_token": "</s>"}}, (1,)),
        ({"config": 7, "generation": [9, 7, 0], "tokenizer": {"eos_token": "</s>"}}, (9, 7, 0, 1)),
        ({}, ()),
    ],
)
def test_all_sources_count(tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert ends_of(write(tmp_path, **files)) == ends


DECODER = {"0": {"content": "<s>", "special": True}, "1": {"content": "</s>", "special": True}}


@pytest.mark.parametrize(
    ("tokenizer", "special"),
    [
        ({"eos_token": "</s>"}, None),
        ({"eos_token": {"__type": "AddedToken", "content": "</s>"}}, None),
        ({"eos_token": "he"}, None),
        ({}, {"eos_token": {"content": "<s>"}}),
        ({"eos_token": "</s>"}, {"eos_token": "<s>"}),
        ({"eos_token": "</s>", "added_tokens_decoder": DECODER}, {"eos_token": "<s>"}),
        ({"eos_token": None}, None),
    ],
)
def test_the_tokenizers_end_is_that_of_transformers(
    tmp_path: Path, tokenizer: dict[str, Any], special: dict[str, Any] | None
) -> None:
    write(tmp_path, tokenizer=tokenizer, special=special)
    end = transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert ends_of(tmp_path) == (() if end is None else (end,))


def test_the_id_is_found_wherever_the_token_is_listed(tmp_path: Path) -> None:
    write(tmp_path, tokenizer={"eos_token": "he"})
    assert ends_of(tmp_path) == (HE,)
    pieces = [[text, -1.0] for text in sorted(TOKENIZER["model"]["vocab"], key=TOKENIZER["model"]["vocab"].get)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": pieces}}))
    assert ends_of(tmp_path) == (HE,)
    (tmp_path / "tokenizer.json").unlink()
    assert ends_of(tmp_path) == ()
    write(tmp_path, tokenizer={"eos_token": "</s>", "added_tokens_decoder": DECODER})
    (tmp_path / "tokenizer.json").unlink()
    assert ends_of(tmp_path) == (1,)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_without_a_readable_tokenizer_the_others_count(tmp_path: Path, name: str) -> None:
    write(tmp_path, 7, [9], {"eos_token": "he", "added_tokens_decoder": {"x": 1}})
    for content in (b"{", b"[]", b"\xff", b'{"added_tokens": 3}', b'{"eos_token": 3, "model": {"vocab": 3}}'):
        (tmp_path / name).write_bytes(content)
        assert set(ends_of(tmp_path)) >= {7, 9}


def test_ids_that_the_model_does_not_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [1023, 1024, -1], 2**40, {"eos_token": "</s>"})
    assert checkpoint_facts(tmp_path).eos_token_ids == (1023, 1)
    assert len(caplog.messages) == 1
    for part in ("0 to 1023", "1024 (config.json)", "-1 (config.json)", f"{2**40} (generation_config.json)"):
        assert part in caplog.messages[0]
    caplog.clear()
    assert load_model_config(tmp_path, warns=False).eos_token_ids == (1023, 1)
    assert not caplog.messages


@pytest.mark.parametrize("value", ["2", 2.0, True, [1, True], [[1, 2]], [1, None], {"id": 1}, ["2"]])
@pytest.mark.parametrize("file", ["config", "generation"])
def test_what_is_no_id_is_refused(tmp_path: Path, file: str, value: object) -> None:
    write(tmp_path, **{file: value})
    for load in (checkpoint_facts, load_model_config):
        with pytest.raises(CheckpointError, match=rf"{file}\S*\.json: eos_token_id must be a token id or a list"):
            load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 0},
        {"vocab_size": "1024"},
        {"vocab_size": True},
        {"vocab_size": None},
        {"vocab_size": 2**40},
        {"max_position_embeddings": -1},
        {"max_position_embeddings": [8]},
    ],
)
def test_sizes_that_are_none_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{next(iter(change))}"):
        checkpoint_facts(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": None}))
    assert checkpoint_facts(tmp_path).max_model_len == 8192


@pytest.mark.parametrize("make", [Path.mkdir, lambda file: file.symlink_to("gone"), lambda file: file.symlink_to(file)])
def test_ends_that_cannot_be_read_are_no_missing_ends(tmp_path: Path, make: Any) -> None:
    write(tmp_path)
    file = tmp_path / "generation_config.json"
    file.unlink()
    make(file)
    with pytest.raises(CheckpointError, match=f"{file} is no file, or a link to one that is gone"):
        checkpoint_facts(tmp_path)
