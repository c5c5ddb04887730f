"""Where a long text may be cut so that its pieces have the same tokens as the whole. Pure.

Byte-level BPE tokenizes each word by itself, and a regular expression defines a word. With the known expressions, no
word contains

    a letter | a space before a letter          "over| the"
    a character and a line end | a letter       "end.\\n|Then"

across the bar, whatever text is further away. Letters here are ASCII or Han, which NFC leaves alone. Other tokenizers
(SentencePiece's) look at whole texts; texts for these are not cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=[!-~\u4e00-\u9fff]\n)(?=[A-Za-z\u4e00-\u9fff])")
_CUT_INSIDE = re.compile(r"[A-Za-z] |\n[A-Za-z\u4e00-\u9fff]")
_NUM_DIGITS = re.compile(r"\\p\{N\}\{1,3\}")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's words; those of Llama 3 and cl100k hold up to three digits. GPT-2's are built into ``ByteLevel``."""
_SEARCH_CHARS = 2**16
NFC_SHRINKAGE = 4
"""Composition merges at most this many characters into one."""


def cut_text(text: str, num_chars: int) -> Iterator[str]:
    """Pieces of ``num_chars`` or slightly more; much more if the text has no boundary."""
    start, search = 0, num_chars
    while search < len(text):
        # Not the whole text at once: a search holds the interpreter's lock.
        found = _CUT.search(text, search, search + _SEARCH_CHARS)
        if found is None:
            search += _SEARCH_CHARS - 2
            continue
        yield text[start : found.start()]
        start = found.start()
        search = start + num_chars
    yield text[start:]


def may_be_cut(rust: RustTokenizer) -> bool:
    """Whether the tokens of ``cut_text``'s pieces are those of the text, special tokens around it aside.

    If so, every character of a text is in one of its tokens (or, normalized, ``NFC_SHRINKAGE`` of them are).
    """
    model = rust.model
    return (
        type(model).__name__ == "BPE"
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and _state(rust.normalizer) in (None, {"type": "NFC"})
        and _has_known_words(_state(rust.pre_tokenizer))
        and all(_is_plain(token) for token in rust.get_added_tokens_decoder().values())
    )


def _state(part: Any) -> Any:
    """A part of a tokenizer as in ``tokenizer.json``."""
    return None if part is None else json.loads(part.__getstate__())


def _has_known_words(state: Any) -> bool:
    match state:
        case {"type": "Sequence", "pretokenizers": [only]}:
            return _has_known_words(only)
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str() as words}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return _NUM_DIGITS.sub(r"\\p{N}", words) == _WORDS
    return False


def _is_plain(token: Any) -> bool:
    """Whether an added token takes no adjacent spaces, does not depend on them, and contains no boundary."""
    depends = token.lstrip or token.rstrip or token.single_word
    return not depends and _CUT_INSIDE.search(token.content) is None
