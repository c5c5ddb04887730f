"""Facts of a checkpoint for every engine: its end tokens; and its sizes, for one that does not load its weights."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import CheckpointError

_log = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 8192

JsonObject = Mapping[str, object]
_Count = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]


class CheckpointFacts(msgspec.Struct, frozen=True):
    """``max_model_len`` in tokens."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class _Sizes(msgspec.Struct):
    vocab_size: _Count
    max_position_embeddings: _Count | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


def checkpoint_facts(model_path: Path) -> CheckpointFacts:
    """Raises CheckpointError."""
    file = model_path / "config.json"
    config = read_json_object(file)
    try:
        sizes = msgspec.convert(config, _Sizes)
    except msgspec.ValidationError as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc
    return CheckpointFacts(
        vocab_size=sizes.vocab_size,
        max_model_len=sizes.max_position_embeddings or DEFAULT_MAX_MODEL_LEN,
        eos_token_ids=end_token_ids(model_path, config, sizes.vocab_size),
    )


def end_token_ids(model_path: Path, config: JsonObject, vocab_size: int, *, warns: bool = True) -> tuple[int, ...]:
    """The tokens that end an answer: those of ``generation_config.json``, of ``config`` and the tokenizer's
    ``eos_token``. Ids that the model does not have are left out, with one warning.

    Raises CheckpointError for an ``eos_token_id`` that is neither an id nor a list of ids.
    """
    generation = model_path / "generation_config.json"
    sources = {
        generation.name: _listed(generation, optional_json_object(generation)),
        "config.json": _listed(model_path / "config.json", config),
        "tokenizer.json": list(_tokenizers_end(model_path)),
    }
    named = [(token, name) for name, tokens in sources.items() for token in tokens]
    left_out = ", ".join(f"{token} ({name})" for token, name in named if not 0 <= token < vocab_size)
    if left_out and warns:
        _log.warning("the model has tokens 0 to %d: leaving out its end tokens %s", vocab_size - 1, left_out[:500])
    return tuple(dict.fromkeys(token for token, _ in named if 0 <= token < vocab_size))


def read_json_object(file: Path) -> JsonObject:
    """Raises CheckpointError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise CheckpointError(f"{file.parent} has no {file.name}") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return content


def optional_json_object(file: Path) -> JsonObject:
    """Empty without such a file. Raises CheckpointError."""
    return read_json_object(file) if is_there(file) else {}


def is_there(file: Path) -> bool:
    """Whether the checkpoint has this file. Raises CheckpointError for what is there and is no file, such as a link to
    a file that is gone: without the file, a model would answer otherwise."""
    if not file.is_file() and os.path.lexists(file):
        raise CheckpointError(f"{file} is no file, or a link to one that is gone: restore it, or remove it")
    return file.is_file()


def _listed(file: Path, raw: JsonObject) -> list[int]:
    value = raw.get("eos_token_id")
    tokens: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in tokens):
        raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them, got {repr(value)[:80]}")
    return tokens


def _tokenizers_end(model_path: Path) -> Iterator[int]:
    """The id of the tokenizer's ``eos_token``. A tokenizer that cannot be read has none here: whoever needs it says so.

    As in transformers, ``special_tokens_map.json`` goes first, unless ``tokenizer_config.json`` lists the added tokens.
    """
    try:
        config, special = (
            optional_json_object(model_path / name) for name in ("tokenizer_config.json", "special_tokens_map.json")
        )
        listed = config.get("added_tokens_decoder")
        first, second = (special, config) if listed is None else (config, special)
        end = first.get("eos_token") or second.get("eos_token")
        text = end.get("content") if isinstance(end, dict) else end
        if not isinstance(text, str):
            return
        file = model_path / "tokenizer.json"
        content = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile) if file.is_file() else _TokenizerFile()
        added = {token.content: token.id for token in content.added_tokens}
        if text in added:
            yield added[text]
            return
        vocab = msgspec.json.decode(content.model, type=_TokenizerModel).vocab
        pieces = vocab if isinstance(vocab, dict) else {piece: token for token, (piece, _) in enumerate(vocab)}
        if text in pieces:
            yield pieces[text]
        elif isinstance(listed, dict):
            yield from (int(token) for token, entry in listed.items() if entry["content"] == text)
    except (CheckpointError, OSError, ValueError, TypeError, KeyError, *UNREADABLE) as exc:
        _log.debug("no end token from the tokenizer of %s: %s", model_path, exc)
