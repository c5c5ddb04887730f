"""A GGUF file as a model argument: converted to a checkpoint directory once, then taken from the cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import xxhash

from kvrelay.config.loading import cache_directory
from kvrelay.errors import CheckpointError

MAGIC = b"GGUF"
PIECE_BYTES = 1 << 24
CONVERTER = "kvrelay.executors.torch.checkpoints.gguf"


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file with the magic bytes of GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def checkpoint_of(file: Path) -> Path:
    """The checkpoint directory of ``file``, converted now if the cache lacks it. Raises CheckpointError.

    The cache is keyed by content, so a replaced file is converted again.
    """
    directory = cache_directory() / "gguf" / _digest(file) / file.stem
    if directory.is_dir():
        return directory
    print(f"converting {file.name} to a checkpoint in {directory}, once", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", CONVERTER, str(file.resolve()), str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    # Another process may have converted the same file meanwhile: then its directory is as good.
    if not directory.is_dir():
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
