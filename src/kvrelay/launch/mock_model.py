"""The mock engine's idea of a checkpoint: vocabulary, end token, context length; no weights."""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.engine.base import Executor
from kvrelay.engine.mock import MockExecutor
from kvrelay.errors import CheckpointError


def build_mock_executor(model_path: Path, engine: EngineConfig, mock: MockConfig) -> Executor:
    """A MockExecutor that stands in for the model in ``model_path``. Raises CheckpointError."""
    file = model_path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        vocab_size = int(config["vocab_size"])
        max_model_len = engine.max_model_len or int(config.get("max_position_embeddings", 8192))
        eos = config.get("eos_token_id")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    return MockExecutor(engine, mock, vocab_size=vocab_size, eos_token_ids=eos_ids, max_model_len=max_model_len)
