"""Tokens to text, piece by piece, never half a character.

The concatenated pieces equal the decoding of all tokens at once. There are two ways:

- Byte-level vocabularies: a token is a string of bytes, so text is an incremental UTF-8 decoding. Nearly all tokens are
  whole characters by themselves and take one look-up in a list.
- Any other decoder (byte fallback, metaspace, WordPiece): decode a short window twice, with and without the new
  tokens; the difference is the new text, unless it ends in an incomplete character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_PENDING = 16
"""No character has this many tokens. Bounds the work for a model whose bytes never form a character."""


class Detokenizer(Protocol):
    """The text of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def flush(self) -> str:
        """The rest after the last token: an incomplete character becomes U+FFFD."""


class NoText:
    """The detokenizer of a caller that needs only token ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TokenBytes:
    """The bytes of every token of a byte-level vocabulary, and the text of those that are whole characters.

    ``texts[id]`` is None for a token that must be decoded with its neighbours. Special tokens have no text if they are
    to be skipped.
    """

    def __init__(self, pieces: Sequence[bytes], skipped: frozenset[int]) -> None:
        self.pieces = tuple(b"" if token in skipped else piece for token, piece in enumerate(pieces))
        self.texts = tuple(map(_whole_text, self.pieces))


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


class ByteLevelDetokenizer:
    """Incremental UTF-8 over token bytes."""

    __slots__ = ("_decoder", "_is_clean", "_pieces", "_size", "_texts")

    def __init__(self, tokens: TokenBytes) -> None:
        self._texts = tokens.texts
        self._pieces = tokens.pieces
        self._size = len(tokens.pieces)
        self._decoder: codecs.IncrementalDecoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_clean = True

    def push(self, token_ids: Sequence[int]) -> str:
        if self._is_clean and len(token_ids) == 1:
            # Nearly every output of a running answer.
            (token,) = token_ids
            if token < self._size and (only := self._texts[token]) is not None:
                return only
        text = ""
        for token in token_ids:
            if token >= self._size:
                # Models pad their vocabulary; the padding has no text.
                continue
            whole = self._texts[token] if self._is_clean else None
            if whole is not None:
                text += whole
            else:
                text += self._decoder.decode(self._pieces[token])
                self._is_clean = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._is_clean = True
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any tokenizer: the difference between two decodings of the last few tokens."""

    __slots__ = ("_decode", "_pending", "_prefix")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._prefix: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            self._pending.append(token)
            text += self._advance()
        return text

    def flush(self) -> str:
        text = self._difference()
        self._prefix, self._pending = [], []
        return text

    def _advance(self) -> str:
        text = self._difference()
        if not text or (text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING):
            return ""
        self._prefix, self._pending = self._pending, []
        return text

    def _difference(self) -> str:
        before = self._decode(self._prefix) if self._prefix else ""
        return self._decode(self._prefix + self._pending)[len(before) :]
