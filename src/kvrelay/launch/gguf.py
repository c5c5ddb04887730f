"""A GGUF file as a model argument: converted to a checkpoint directory once, then taken from the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import xxhash

from kvrelay.config.loading import cache_directory
from kvrelay.errors import CheckpointError

MAGIC = b"GGUF"
PIECE_BYTES = 1 << 24
CONVERTER = "kvrelay.executors.torch.checkpoints.gguf"
VERSION = 2
"""Of what the converter writes; raised with each change, so that no older conversion is used."""


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file with the magic bytes of GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def checkpoint_of(file: Path) -> Path:
    """The checkpoint directory of ``file``, converted now if the cache lacks it. Raises CheckpointError.

    The cache is keyed by content and by the converter's version, so a replaced file is converted again.
    """
    directory = cache_directory() / "gguf" / f"{_digest(file)}-v{VERSION}" / file.stem
    if os.path.isdir(directory):  # false also where we may not look
        return directory
    print(
        f"converting {file.name} to a checkpoint in {directory}, once; requests that set no temperature get that of "
        "its generation_config.json (0.3 unless the file names one)",
        file=sys.stderr,
    )
    done = subprocess.run(
        [sys.executable, "-m", CONVERTER, str(file.resolve()), str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    # Another process may have converted the same file meanwhile: then its directory is as good.
    if not os.path.isdir(directory):
        lines = done.stderr.strip().splitlines() or [f"the converter ended with exit code {done.returncode}"]
        raise CheckpointError(f"cannot convert {file}: {lines[-1]}", param="model")
    return directory


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_64()
    try:
        with file.open("rb") as source:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
    except OSError as exc:
        raise CheckpointError(f"cannot read {file}: {exc}", param="model") from exc
    return digest.hexdigest()
