"""The files of a checkpoint, and a fingerprint of what is in them. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from kvrelay.errors import CheckpointError

_FINGERPRINT_PIECES, _PIECE_BYTES = 64, 4096


def weights_fingerprint(model_dir: Path) -> str:
    """16 hex digits that identify a checkpoint: a digest of its config, and of each file's size, header and sampled
    pieces.

    The files are sampled, so that a start does not read a large checkpoint twice. Raises CheckpointError.
    """
    digest = xxhash.xxh3_64()
    try:
        digest.update((model_dir / "config.json").read_bytes())
        for file in shard_files(model_dir):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(min(size, 1 << 20)))
                for piece in range(_FINGERPRINT_PIECES):
                    stream.seek(size * piece // _FINGERPRINT_PIECES)
                    digest.update(stream.read(_PIECE_BYTES))
    except OSError as exc:
        raise CheckpointError(f"cannot read {exc.filename}: {exc.strerror}") from exc
    return str(digest.hexdigest())


def shard_files(model_dir: Path) -> list[Path]:
    """The shards that the index names, else the only file. Raises CheckpointError if one is missing."""
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        single = model_dir / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{model_dir} has no model.safetensors")
        return [single]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as exc:
        raise CheckpointError(f"{index} is damaged") from exc
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names a file outside the checkpoint: {name!r}")
        if not (model_dir / name).is_file():
            raise CheckpointError(f"{model_dir} has no shard {name}")
    return [model_dir / name for name in names]
