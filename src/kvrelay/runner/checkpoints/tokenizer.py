"""Tokenizers for checkpoints that kvrelay makes itself: byte-level BPE, chat markers, a chat template.

Owns which special tokens exist and how a tokenizer is trained, filled up to a wanted size, and written to disk. Knows
nothing of weights. Ids 0 to 4 are the special tokens, the next 256 are the bytes, the rest are merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, SYSTEM, USER, ASSISTANT = "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT)
BOS_ID, EOS_ID = 0, 1
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


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` tokens, which puts ``<s>`` before a text.

    Merges that ``texts`` do not yield are made up from pairs of known tokens, in a fixed order; so every id decodes to
    something. Raises ValueError below 261 tokens (special tokens and bytes).
    """
    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"a byte-level vocabulary has at least {SMALLEST_VOCAB} tokens, not {vocab_size}")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
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
    return _assemble(vocab, merges)


def _fill_up(vocab: dict[str, int], merges: list[tuple[str, str]], vocab_size: int) -> None:
    """Add merges of pairs of tokens, nearest ids first, until the vocabulary has its size."""
    pieces = sorted(vocab, key=vocab.__getitem__)[len(SPECIAL_TOKENS) :]
    for diagonal in range(2 * len(pieces)):
        for i in range(max(0, diagonal - len(pieces) + 1), min(diagonal + 1, len(pieces))):
            if len(vocab) >= vocab_size:
                return
            left, right = pieces[i], pieces[diagonal - i]
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))


def _assemble(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``; ``max_length`` in tokens."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
