"""Token ids for text, for a server that returns only text.

They are ids that decode to the same text, not necessarily those that the server sampled: counts may differ slightly,
and a logprob has no token to belong to. That is why token ids are preferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from kvrelay.errors import CheckpointError

CONTEXT_TOKENS = 16
"""Preceding tokens that may affect the decoding of a piece."""
ANCHORS = ("\n", "a")
"""Few tokens span a line's end; and vocabularies without that have letters."""
MAX_PENDING_CHARS = 256
"""No more text waits to decode to itself: each piece encodes all of it again."""


class TextTokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError."""

    def __init__(self, model_path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        except Exception as exc:  # the library raises nothing narrower
            raise CheckpointError(f"cannot read {model_path / 'tokenizer.json'}: {exc}") from exc
        self._added = frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def continuations(self, text: str) -> Iterator[list[int]]:
        """Ways to write a text that follows another one. A tokenizer may put a space before a beginning, so the text is
        also encoded after an anchor; and after an added token, so what follows one is encoded by itself."""
        yield self.encode(text)
        yield from self._after_anchors(text)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        found: list[int] = []
        at = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets):
            if token in self._added:
                found += [*next(self._after_anchors(text[at:start]), ()), token]
                at = end
        yield [*found, *next(self._after_anchors(text[at:]), ())]

    def _after_anchors(self, text: str) -> Iterator[list[int]]:
        for anchor in ANCHORS:
            before, whole = self.encode(anchor), self.encode(anchor + text)
            if whole[: len(before)] == before:
                yield whole[len(before) :]

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


class TextTokens:
    """The ids of one answer, whose text comes in pieces."""

    def __init__(self, tokenizer: TextTokenizer, token_ids: list[int]) -> None:
        """``token_ids``: those before the answer."""
        self._tokenizer = tokenizer
        self._context = self._last(token_ids)
        self._pending = ""

    def add(self, text: str, *, is_last: bool) -> tuple[int, ...]:
        """Ids for ``text``. Text that does not decode to itself after the preceding tokens, for example because it ends
        inside a character, waits for the next piece, unless it is the last."""
        self._pending += text
        if not self._pending:
            return ()
        wanted = self._tokenizer.decode(self._context) + self._pending
        ways: list[list[int]] = []
        for found in self._tokenizer.continuations(self._pending):
            ways.append(found)
            if self._tokenizer.decode(self._context + found) == wanted:
                break
        else:
            if not is_last and len(self._pending) <= MAX_PENDING_CHARS:
                return ()
            found = ways[min(1, len(ways) - 1)]  # after an anchor: no space is put before it
        self._pending = ""
        self._context = self._last(self._context + found)
        return tuple(found)

    def _last(self, token_ids: list[int]) -> list[int]:
        """The last tokens, from the beginning of a character: the rest of one would spoil all bytes that follow."""
        if len(token_ids) <= CONTEXT_TOKENS:
            return token_ids
        ways = [token_ids[first - CONTEXT_TOKENS :] for first in range(4)]
        return min(ways, key=lambda ids: self._tokenizer.decode(ids).count("\ufffd"))
