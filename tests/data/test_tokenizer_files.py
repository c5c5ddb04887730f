"""The fingerprint of what decides how text becomes tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.data.tokenizer_files import TOKENIZER_FILES, tokenizer_fingerprint


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_every_file_counts_and_nothing_else(tmp_path: Path, name: str) -> None:
    empty = tokenizer_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_fingerprint(tmp_path) == empty
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    there = tokenizer_fingerprint(tmp_path)
    (tmp_path / name).write_bytes(b"{}")
    assert len({empty, there, tokenizer_fingerprint(tmp_path)}) == 3
