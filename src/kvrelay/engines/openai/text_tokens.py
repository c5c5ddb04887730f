"""Token ids for text, for a server that returns only text.

They are ids that decode to the same text, not necessarily those that the server sampled: counts may differ slightly,
and a logprob has no token to belong to. That is why token ids are preferred.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from kvrelay.errors import CheckpointError

CONTEXT_TOKENS = 16
"""Preceding tokens that may affect the decoding of a piece."""
MAX_PENDING_CHARS = 256
"""No more text waits to decode to itself: each piece encodes all of it again."""


class TextTokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError."""

    def __init__(self, model_path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        except Exception as exc:  # the library raises nothing narrower
            raise CheckpointError(f"cannot read {model_path / 'tokenizer.json'}: {exc}") from exc

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


class TextTokens:
    """The ids of one answer, whose text comes in pieces."""

    def __init__(self, tokenizer: TextTokenizer, token_ids: list[int]) -> None:
        """``token_ids``: those before the answer."""
        self._tokenizer = tokenizer
        self._context = token_ids[-CONTEXT_TOKENS:]
        self._pending = ""

    def add(self, text: str, *, is_last: bool) -> tuple[int, ...]:
        """Ids for ``text``. Text that does not decode to itself after the preceding tokens, for example because it ends
        inside a character, waits for the next piece, unless it is the last."""
        self._pending += text
        if not self._pending:
            return ()
        found = self._tokenizer.encode(self._pending)
        before = self._tokenizer.decode(self._context)
        decoded = self._tokenizer.decode(self._context + found)
        may_wait = not is_last and len(self._pending) <= MAX_PENDING_CHARS
        if may_wait and decoded != before + self._pending:
            return ()
        self._pending = ""
        self._context = (self._context + found)[-CONTEXT_TOKENS:]
        return tuple(found)
