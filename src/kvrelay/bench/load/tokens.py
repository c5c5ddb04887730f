"""Counting tokens of text: by a local tokenizer where one is given, else by an estimate.

Neither transformers nor torch is imported: a ``tokenizer.json`` is all that is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kvrelay.bench.errors import MissingPackageError
from kvrelay.errors import InvalidInputError

CHARS_PER_TOKEN = 4


class TokenCounter(Protocol):
    """Counts the tokens of a text, without special tokens."""

    def count(self, text: str) -> int: ...


class EstimatedTokens:
    """An estimate of four characters per token, at least one for text that is not empty."""

    def count(self, text: str) -> int:
        return -(-len(text) // CHARS_PER_TOKEN)


class LocalTokenizer:
    """A Hugging Face ``tokenizer.json``, given as the file or as the checkpoint's directory."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidInputError(f"no tokenizer at {path}: expected a tokenizer.json or a directory that has one")
        try:
            from tokenizers import Tokenizer
        except ImportError as exc:
            raise MissingPackageError("tokenizers", "counting tokens") from exc
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as exc:  # the Rust side raises nothing narrower
            raise InvalidInputError(f"{file} is not a tokenizer: {exc}") from exc

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
