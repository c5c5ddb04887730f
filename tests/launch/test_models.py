"""What a model argument may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.errors import CheckpointError
from kvrelay.launch.models import resolve_model


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a file.*a checkpoint is a directory"):
        resolve_model(str(path))


@pytest.mark.parametrize("model", ["./none", "/nowhere/none", "some/where/none", "none/", "where/none/"])
def test_a_directory_that_is_not_there(model: str) -> None:
    """A hub is not asked for what can only be a path."""
    with pytest.raises(CheckpointError, match=f"checkpoint directory {model} does not exist"):
        resolve_model(model)
