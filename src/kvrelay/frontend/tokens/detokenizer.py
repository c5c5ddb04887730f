"""Tokens to text, piece by piece, never half a character.

The concatenated pieces equal the decoding of prompt and answer at once, without the prompt's text: what follows a
prompt is no beginning, so the space before its first word is text. There are two ways:

- Byte-level vocabularies: a token is a string of bytes, so text is an incremental UTF-8 decoding. Nearly all tokens are
  whole characters by themselves and take one look-up in a list.
- Any other decoder (byte fallback, metaspace, WordPiece): decode a short window twice, with and without the new
  tokens; the difference is the new text, unless it ends in an incomplete character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_PENDING = 16
"""No character has this many tokens. Bounds the work for a model whose bytes never form a character."""
MIN_CONTEXT, MAX_CONTEXT = 4, 32
"""Last tokens of a prompt that may affect the decoding of what follows."""
NO_BYTES: Mapping[int, int] = {}


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


_utf8 = codecs.getincrementaldecoder("utf-8")


def _num_open(text: bytes) -> int:
    """The number of bytes at the end that begin a character."""
    for size in range(1, min(len(text), 3) + 1):
        if text[-size] >= 0xC0:
            decoder = _utf8("replace")
            decoder.decode(text[-size:])
            return size if decoder.getstate()[0] else 0
    return 0


class ByteLevelDetokenizer:
    """Incremental UTF-8 over token bytes."""

    __slots__ = ("_begun", "_decoder", "_is_clean", "_pieces", "_size", "_texts")

    def __init__(self, tokens: TokenBytes, prompt_token_ids: Sequence[int] = ()) -> None:
        self._texts = tokens.texts
        self._pieces = tokens.pieces
        self._size = len(tokens.pieces)
        self._decoder: codecs.IncrementalDecoder = _utf8("replace")
        self._begun = self._open_character(prompt_token_ids)
        """Bytes of a character that the prompt has begun. The answer may complete it."""
        self._is_clean = not self._begun

    def _open_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        last = prompt_token_ids[-1] if prompt_token_ids else self._size
        if last >= self._size or self._texts[last] is not None:
            return b""
        end = b"".join([self._pieces[token] for token in prompt_token_ids[-MIN_CONTEXT:] if token < self._size])
        return end[len(end) - _num_open(end) :]

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
                piece = self._pieces[token]
                if self._begun and piece:
                    is_continued = 0x80 <= piece[0] < 0xC0
                    piece, self._begun = self._begun * is_continued + piece, b""
                text += self._decoder.decode(piece)
                self._is_clean = not (self._begun or self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_clean = True
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any tokenizer: the difference between two decodings of the last few tokens. ``byte_of``: tokens that are one
    byte, with that byte."""

    __slots__ = ("_begun", "_byte_of", "_decode", "_pending", "_prefix")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int] = (),
        byte_of: Mapping[int, int] = NO_BYTES,
    ) -> None:
        self._decode = decode
        self._byte_of = byte_of
        end = bytes([byte_of.get(token, 0) for token in prompt_token_ids[-3:]])
        size = len(prompt_token_ids) - _num_open(end)
        self._begun = list(prompt_token_ids[size:])
        """Bytes of a character that the prompt has begun. The answer may complete it."""
        self._prefix = self._context(prompt_token_ids[:size] if self._begun else prompt_token_ids)
        self._pending: list[int] = []

    def _context(self, token_ids: Sequence[int]) -> list[int]:
        """The end of the prompt: with text, so that what follows is no beginning, and with whole characters."""
        size = MIN_CONTEXT
        while True:
            context = list(token_ids[-size:])
            while size < len(token_ids) and context and self._continues(context[0]):
                del context[0]
            text = self._decode(context) if context else ""
            if size >= min(len(token_ids), MAX_CONTEXT) or (text and not text.endswith(REPLACEMENT)):
                return context
            size *= 2

    def _continues(self, token: int) -> bool:
        """Whether the token is a byte inside a character."""
        return 0x80 <= self._byte_of.get(token, 0) < 0xC0

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            if self._begun:
                self._pending = self._begun * self._continues(token)
                self._begun = []
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
            if not text and len(self._pending) >= MAX_PENDING:
                # A first space may be no text alone, but two are.
                self._pending = [token for token in self._pending if self._decode([token, token])]
            return ""
        self._prefix, self._pending = self._pending, []
        return text

    def _difference(self) -> str:
        before = self._decode(self._prefix) if self._prefix else ""
        return self._decode(self._prefix + self._pending)[len(before) :]
