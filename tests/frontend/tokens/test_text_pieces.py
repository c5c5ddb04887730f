"""A text that is tokenized in pieces has the tokens of the whole, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from kvrelay.data import bundled_checkpoint_path
from kvrelay.frontend.side_threads import complete
from kvrelay.frontend.tokens import tokenizer as module
from kvrelay.frontend.tokens.text_pieces import cut_text, may_be_cut
from kvrelay.frontend.tokens.tokenizer import Tokenizer, load_tokenizer

LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA_3_WORDS.replace("{1,3}", "")
PARTS = (
    *("the", "The", "quick", "fox", "don't", "we'll", "I'M", "x", "Z", "over the lazy dog", "a b", "don't stop"),
    *(" ", "  ", "\n", "\n\n", "\r\n", " \n", "\n ", "\t", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c"),
    *(".", ", ", "!\n", "...", "'", "'s", "(", "-", "_", "<", "\\n", "\n'"),
    *("7", "42", "1234567", "3.14"),
    *("你好", "。\n", "这", "世界。\n这", "こ", "ん", "é", "e\u0301", "\u0301", "ᾂ", "α\u0313\u0300\u0345", "ß", "한"),
    *("\u1112\u1161\u11ab", "🙂", "\ufe0f", "\u200d", "مرحبا", "\0", "\ufffd"),
    *("<|end|>", "<|begin|>", "<mask>", "mask", "end", "<s>", "</s>", "▁", "##"),
)
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=40).map("".join)
CORPUS = [" ".join(PARTS), "over the lazy dog don't stop the quick fox. The end.\nThen 123 4567", "世界。\n这 你好"] * 3
SPECIAL = ["<|end|>", "<|begin|>"]


def trained(pre_tokenizer: object, *, normalizer: object = None, model: object = None, **bpe: object) -> RustTokenizer:
    tokenizer = RustTokenizer(model or models.BPE(**bpe))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer_of = trainers.WordPieceTrainer if model is not None else trainers.BpeTrainer
    suffix = {key: value for key, value in bpe.items() if key == "end_of_word_suffix"}
    trainer = trainer_of(
        vocab_size=700,
        special_tokens=[*SPECIAL, *(["[UNK]"] if model is not None else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **suffix,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(**options: bool) -> RustTokenizer:
    tokenizer = trained(pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options}))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def split(words: str, normalizer: object = None) -> RustTokenizer:
    pieces = pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = trained(pre_tokenizers.Sequence([pieces, bytes_of]), normalizer=normalizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def framed() -> RustTokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.RobertaProcessing(("<|end|>", 0), ("<|begin|>", 1))
    return tokenizer


def twice() -> RustTokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|> $A", special_tokens=[("<|begin|>", 1), ("<|end|>", 0)]
    )
    return tokenizer


def with_token(content: str, **options: bool) -> RustTokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(content, **options)])
    return tokenizer


def sentence_piece() -> RustTokenizer:
    tokenizer = trained(
        None, normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    return tokenizer


CUT: dict[str, Callable[[], RustTokenizer]] = {
    "gpt-2": byte_level,
    "llama-3": lambda: split(LLAMA_3_WORDS),
    "qwen": lambda: split(QWEN_WORDS, normalizers.NFC()),
    "bos and eos": framed,
    "added token": lambda: with_token("<mask>"),
    "added word": lambda: with_token("fox", normalized=False),
    "bundled": lambda: load_tokenizer(bundled_checkpoint_path()).rust,
}
WHOLE: dict[str, Callable[[], RustTokenizer]] = {
    "sentencepiece": sentence_piece,
    "metaspace": lambda: trained(pre_tokenizers.Metaspace()),
    "wordpiece": lambda: trained(
        pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(),
        model=models.WordPiece(unk_token="[UNK]"),
    ),
    "prefix space": lambda: byte_level(add_prefix_space=True),
    "no words": lambda: byte_level(use_regex=False),
    "lower case": lambda: split(QWEN_WORDS, normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    "other words": lambda: split(r"\s+\p{L}+ \p{L}+|\s+|\S+"),
    "text twice": twice,
    "end of word": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), end_of_word_suffix="</w>"),
    "token eats space before": lambda: with_token("mask", lstrip=True),
    "token eats space behind": lambda: with_token("mask", rstrip=True),
    "token is a word of its own": lambda: with_token("end", single_word=True),
    "token with a boundary": lambda: with_token("a b"),
    "token with a line": lambda: with_token("!\nthe"),
    "token that ends in a space": lambda: with_token("the "),
}


@cache
def rust_of(name: str) -> RustTokenizer:
    return {**CUT, **WHOLE}[name]()


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(rust_of(name))


@pytest.mark.parametrize("name", CUT)
def test_texts_for_byte_level_tokenizers_are_cut(name: str) -> None:
    assert may_be_cut(rust_of(name))
    assert tokenizer_of(name).frame is not None


@pytest.mark.parametrize("name", WHOLE)
def test_texts_for_other_tokenizers_are_not_cut(name: str) -> None:
    assert tokenizer_of(name).frame is None


@pytest.mark.parametrize(("name", "num_chars"), [*product(CUT, (1, 7)), *product(WHOLE, (1,))])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(texts=st.lists(TEXTS, max_size=4), add_special_tokens=st.booleans())
@example(texts=["the quick fox\nthe end. a b\n你好。\n这"], add_special_tokens=True)
@example(texts=["", "the", ""], add_special_tokens=True)
def test_pieces_have_the_tokens_of_the_whole(
    name: str, num_chars: int, texts: list[str], add_special_tokens: bool
) -> None:
    rust, tokenizer = rust_of(name), tokenizer_of(name)
    expected = [rust.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARS", num_chars)
        assert complete(tokenizer.encode_texts(texts, add_special_tokens)) == expected
        assert [tokenizer.encode(text, add_special_tokens) for text in texts] == expected


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(text=TEXTS)
@example(text="α\u0313\u0300\u0345" * 50)
@example(text="over the lazy dog" * 50)
def test_no_text_has_more_characters_than_its_tokens_can_cover(name: str, text: str) -> None:
    num_tokens = len(rust_of(name).encode(text, add_special_tokens=False).ids)
    assert name in WHOLE or len(text) <= tokenizer_of(name).max_chars_per_token * num_tokens


@pytest.mark.parametrize("num_chars", [1, 10, 100])
def test_pieces_are_no_longer_than_they_must_be(num_chars: int) -> None:
    text = "The quick brown fox\n" * 5000
    pieces = list(cut_text(text, num_chars))
    assert "".join(pieces) == text
    assert all(num_chars <= len(piece) < num_chars + 12 for piece in pieces[:-1])


def test_what_has_no_boundary_is_one_piece() -> None:
    text = "x" * 300_000
    assert list(cut_text(text, 100)) == [text]
    assert list(cut_text(text + " y", 100)) == [text, " y"]


def test_a_long_text_is_tokenized_in_bounded_pieces() -> None:
    """One piece after the other, so that others have their turn; and no further than it matters."""
    tokenizer = tokenizer_of("gpt-2")
    text = "The quick brown fox\n" * 20_000
    calls: list[int] = []
    encode = tokenizer.encode_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tokenizer,
            "encode_batch",
            lambda batch, special: (calls.append(sum(map(len, batch))), encode(batch, special))[1],
        )
        steps = sum(1 for _ in tokenizer.encode_texts([text] + ["short"] * 1000, False))
        assert steps == len(calls) == len(text) // module.PIECE_CHARS + 1 + 1000 // module.MAX_BATCH
        assert max(calls) < module.PIECE_CHARS + 100
        calls.clear()
        (ids,) = complete(tokenizer.encode_texts([text], False, enough=1000))
        assert len(ids) > 1000
        assert len(calls) == 1
