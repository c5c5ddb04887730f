"""Facts of a checkpoint for an engine that does not load its weights."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvrelay.errors import CheckpointError

DEFAULT_MAX_MODEL_LEN = 8192


class CheckpointFacts(msgspec.Struct, frozen=True):
    """From ``config.json``. ``max_model_len`` in tokens."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def checkpoint_facts(model_path: Path) -> CheckpointFacts:
    """Raises CheckpointError."""
    file = model_path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        eos = config.get("eos_token_id")
        return CheckpointFacts(
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(config.get("max_position_embeddings", DEFAULT_MAX_MODEL_LEN)),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc
