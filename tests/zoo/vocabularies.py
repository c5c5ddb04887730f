"""Tokenizers of the kinds that published models have, small, with whole phrases as tokens.

A phrase that a case wants to see written is one token, whatever it contains. Texts of prompts are cut into bytes or
characters. Added tokens are those that models write around calls and reasoning; each kind has them special or plain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPACE = "\u2581"
"""How SentencePiece writes a space."""
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


class Kind(Enum):
    """What a model's vocabulary looks like. The value is the name in test ids."""

    BYTE_LEVEL = "byte-level"
    """GPT-2, Llama 3, SmolLM2: end and begin are added tokens, there are no markers."""
    QWEN = "qwen"
    """Markers of calls and reasoning are added tokens, but not special: Qwen2.5, Qwen3."""
    QWEN_SPECIAL = "qwen-special"
    """The same, special: Hermes, and fine-tunes that register their markers so."""
    LLAMA2 = "llama2"
    """SentencePiece with byte fallback; the decoder strips the first space: Llama 2, TinyLlama."""
    MISTRAL = "mistral"
    """The same with Metaspace, and special ``[TOOL_CALLS]``, ``[ARGS]``, ``[CALL_ID]``: Mistral v0.3."""
    TEKKEN = "tekken"
    """Byte-level with Mistral's special markers: Mistral Nemo and later."""
    LLAMA3 = "llama3"
    """Byte-level with special ``<|python_tag|>``, ``<|eom_id|>``: Llama 3.1."""
    GEMMA = "gemma"
    """SentencePiece whose decoder strips nothing."""


MARKERS: dict[Kind, tuple[str, ...]] = {
    Kind.QWEN: ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    Kind.QWEN_SPECIAL: ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    Kind.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    Kind.TEKKEN: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    Kind.LLAMA3: ("<|python_tag|>", "<|eom_id|>"),
}
SENTENCEPIECE = frozenset({Kind.LLAMA2, Kind.MISTRAL, Kind.GEMMA})
BEGIN, END, OTHER = "<s>", "</s>", "<|other|>"
"""``OTHER`` is a special token that means nothing to any parser."""


def tokenizer_of(kind: Kind, phrases: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of this kind in which each of ``phrases`` is one token."""
    tokenizer = _sentencepiece(kind, phrases) if kind in SENTENCEPIECE else _byte_level(kind, phrases)
    special = kind is not Kind.QWEN
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=special) for marker in MARKERS.get(kind, ())])
    tokenizer.add_special_tokens([AddedToken(OTHER, normalized=False, special=True)])
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def _byte_level(kind: Kind, phrases: Sequence[str]) -> Tokenizer:
    vocab = {char: number for number, char in enumerate(ALPHABET)}
    for phrase in phrases:
        vocab.setdefault(byte_level_spelling(phrase), len(vocab))
    # As in Llama 3: a word that is in the vocabulary is that token, whatever the merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (BEGIN, END)])
    return tokenizer


def _sentencepiece(kind: Kind, phrases: Sequence[str]) -> Tokenizer:
    vocab = {"<unk>": 0, BEGIN: 1, END: 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in (SPACE, *map(chr, range(ord("!"), ord("~") + 1))):
        vocab[char] = len(vocab)
    for phrase in phrases:
        vocab.setdefault(phrase.replace(" ", SPACE), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind is Kind.MISTRAL:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    elif kind is Kind.LLAMA2:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    strips = [] if kind is Kind.GEMMA else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([*replace, *strips])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", BEGIN, END)])
    return tokenizer


def byte_level_spelling(text: str) -> str:
    """How a byte-level vocabulary spells a text."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in spelled)


def bytes_of(kind: Kind, text: str) -> tuple[str, ...]:
    """A text as tokens of a byte each."""
    if kind in SENTENCEPIECE:
        return tuple(f"<0x{byte:02X}>" for byte in text.encode())
    return tuple(byte_level_spelling(text))


def token_of(tokenizer: Tokenizer, kind: Kind, piece: str) -> int:
    """The token that is this phrase, marker, or spelling (``<0xE2>``). Raises KeyError."""
    for spelling in (piece, piece.replace(" ", SPACE) if kind in SENTENCEPIECE else byte_level_spelling(piece)):
        found: int | None = tokenizer.token_to_id(spelling)
        if found is not None:
            return found
    raise KeyError(piece)


def write_tokenizer(tokenizer: Tokenizer, directory: Path, template: str, end: str = END) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
