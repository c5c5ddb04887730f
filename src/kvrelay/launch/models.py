"""Finds the checkpoint for a model argument, and the name under which it is served."""

from __future__ import annotations

import os
from pathlib import Path

from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import CheckpointError
from kvrelay.launch.gguf import checkpoint_of, is_gguf

HUB_PREFIX = "models--"
"""``huggingface_hub`` keeps a model in ``models--ORG--NAME/snapshots/REVISION``."""


def resolve_model(model: str | None) -> Path:
    """The directory of a checkpoint: the bundled one, a local directory, a GGUF file (converted once), or a hub id that
    ``huggingface_hub`` fetches.

    Raises CheckpointError if there is none.
    """
    if not model:
        return bundled_checkpoint_path()
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{model} is no checkpoint: it has no config.json", param="model")
        return path.resolve()
    if path.exists():
        if not is_gguf(path):
            raise CheckpointError(
                f"{model} is a file, but no GGUF file: a checkpoint is a directory with config.json and .safetensors "
                "files, or a GGUF file",
                param="model",
            )
        return checkpoint_of(path)
    if model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1:
        raise CheckpointError(f"checkpoint directory {model} does not exist", param="model")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as exc:
        raise CheckpointError(f"{model} is no local directory, and huggingface_hub is not installed") from exc
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
        reason = str(exc).split("\n", maxsplit=1)[0]
        raise CheckpointError(f"{model} is no local directory, and the hub does not give it: {reason}") from exc


def served_name(model: str | None, path: Path, name: str | None = None) -> str:
    """The name that clients use: the given one, a hub model's id, or the name of the directory or link ``model``, which
    is ``path``."""
    if name:
        return name
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(HUB_PREFIX):
        return path.parent.parent.name.removeprefix(HUB_PREFIX).replace("--", "/")
    return Path(os.path.abspath(model)).name if model and os.path.isdir(model) else path.name
