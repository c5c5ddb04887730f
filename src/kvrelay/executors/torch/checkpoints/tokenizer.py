"""Tokenizers for checkpoints that kvrelay makes itself: byte-level BPE, chat markers, a chat template.

Owns which special tokens exist and how a tokenizer is trained, filled up to a wanted size, and written to disk. Knows
nothing of weights. Ids 0 to 4 are the special tokens, the next 256 are the bytes, the rest are merges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS, SYSTEM, USER, ASSISTANT = "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT)
BOS_ID, EOS_ID = 0, 1
_SPACE = "\u0120"  # a space in byte-level BPE
_LETTERS = re.compile(f"{_SPACE}?[A-Za-z]+")
SMALLEST_VOCAB = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant; got ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# How Qwen2 cuts a text before BPE, from the tokenizer.json of the published checkpoints: digits stand alone. Must match
# exactly, because transformers rebuilds this for any checkpoint of that family and ignores its tokenizer.json.
_QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Pieces(Enum):
    """How a text is normalized and cut before BPE; the value is the class named in ``tokenizer_config.json``."""

    GPT2 = "PreTrainedTokenizerFast"
    QWEN = "Qwen2Tokenizer"


def train_tokenizer(texts: Iterable[str], vocab_size: int, pieces: Pieces = Pieces.GPT2) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` tokens, which puts ``<s>`` before a text.

    If ``texts`` yield too few merges, the rest are invented from pairs of known tokens, in a fixed order. So every id
    decodes to some text. Raises ValueError below 261 tokens (special tokens and bytes).
    """
    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"a byte-level vocabulary has at least {SMALLEST_VOCAB} tokens, not {vocab_size}")
    trained = Tokenizer(models.BPE())
    _cut(trained, pieces)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges: list[tuple[str, str]] = [(left, right) for left, right in model["merges"]]
    _fill_up(vocab, merges, vocab_size)
    return _assemble(vocab, merges, pieces)


def _cut(tokenizer: Tokenizer, pieces: Pieces) -> None:
    if pieces is Pieces.GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN_PIECES), behavior="isolated", invert=False)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])


def _fill_up(vocab: dict[str, int], merges: list[tuple[str, str]], vocab_size: int) -> None:
    """Add merges of pairs of known tokens, nearest ids first, until the vocabulary has its size.

    Only of English letters, so that a random model writes readable text of whole characters.
    """
    while len(vocab) < vocab_size:
        pieces = [piece for piece in sorted(vocab, key=vocab.__getitem__) if _LETTERS.fullmatch(piece)]
        for diagonal in range(2 * len(pieces)):
            for i in range(max(0, diagonal - len(pieces) + 1), min(diagonal + 1, len(pieces))):
                left, right = pieces[i], pieces[diagonal - i]
                if len(vocab) < vocab_size and right[0] != _SPACE and left + right not in vocab:
                    vocab[left + right] = len(vocab)
                    merges.append((left, right))


def _assemble(vocab: dict[str, int], merges: list[tuple[str, str]], pieces: Pieces) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    _cut(tokenizer, pieces)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int, pieces: Pieces = Pieces.GPT2) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``; ``max_length`` in tokens."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": pieces.value,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
