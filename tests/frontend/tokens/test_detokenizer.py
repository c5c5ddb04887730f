"""Pieces of text, concatenated, are the text of all tokens; no piece holds half a character."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frontend.doubles import TEXTS, byte_level_tokenizer
from tests.zoo.vocabularies import OTHER, SPACE, Kind, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvrelay.frontend.tokens.detokenizer import Detokenizer, WindowDetokenizer
from kvrelay.frontend.tokens.tokenizer import Tokenizer as FrontendTokenizer

BYTE_LEVEL = byte_level_tokenizer()
WRAPPED = FrontendTokenizer(BYTE_LEVEL)


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama-2's kind: metaspace, byte fallback, the first space stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator([TEXTS[0]], trainer)
    tokenizer = Tokenizer.from_str(with_tokens(tokenizer, bytes_))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def with_tokens(tokenizer: Tokenizer, pieces: list[str]) -> str:
    """The tokenizer's JSON with more tokens to the vocabulary."""
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for piece in pieces:
        vocab[piece] = len(vocab)
    return json.dumps(state)


FALLBACK = byte_fallback_tokenizer()
FALLBACK_WRAPPED = FrontendTokenizer(FALLBACK)


def pieces_of(detokenizer: Detokenizer, token_ids: list[int], cut: int) -> list[str]:
    groups = [token_ids[at : at + cut] for at in range(0, len(token_ids), cut)]
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.integers(1, 4))
def test_byte_level_text_survives(text: str, cut: int) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    pieces = pieces_of(WRAPPED.detokenizer(), ids, cut)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), st.booleans())
def test_any_byte_level_tokens_decode_like_all_at_once(ids: list[int], skip: bool) -> None:
    pieces = pieces_of(WRAPPED.detokenizer(skip), ids, 1)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("abc xyzThe quickбü你🙂"), max_size=40), st.integers(1, 3))
def test_byte_fallback_text_survives(text: str, cut: int) -> None:
    ids = FALLBACK.encode(text).ids
    pieces = pieces_of(FALLBACK_WRAPPED.detokenizer(), ids, cut)
    assert "".join(pieces) == FALLBACK.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("abc xyzThe quickбü你🙂"), min_size=1, max_size=40), st.integers(0, 60), st.integers(1, 3)
)
@pytest.mark.parametrize("wrapped", [WRAPPED, FALLBACK_WRAPPED])
def test_an_answer_goes_on_where_its_prompt_ends(wrapped: FrontendTokenizer, text: str, at: int, cut: int) -> None:
    ids = wrapped.encode(text)
    prompt, answer = ids[:at], ids[at:]
    pieces = pieces_of(wrapped.detokenizer(True, prompt), answer, cut)
    # A character that the prompt has begun belongs to the answer, those before it to the prompt.
    while wrapped is FALLBACK_WRAPPED and wrapped.decode(prompt, True).endswith("\ufffd"):
        prompt = prompt[:-1]  # else all bytes before it are shown as no characters
    assert wrapped.decode(prompt, True).rstrip("\ufffd") + "".join(pieces) == wrapped.decode(ids, True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_the_prompt_has_begun_and_the_answer_leaves_are_the_prompts() -> None:
    for wrapped in (WRAPPED, FALLBACK_WRAPPED):
        begun = wrapped.encode("😀")[-4:][:2]
        detokenizer = wrapped.detokenizer(True, begun)
        assert detokenizer.push(wrapped.encode("a")[-1:]) + detokenizer.flush() == "a"


@pytest.mark.parametrize("wrapped", [WRAPPED, FALLBACK_WRAPPED])
def test_each_token_has_its_bytes(wrapped: FrontendTokenizer) -> None:
    text = "The quick é🙂你 fox"
    ids = wrapped.rust.encode(text, add_special_tokens=False).ids
    assert b"".join(map(wrapped.token_bytes, ids)).decode().lstrip() == text


def test_the_right_detokenizer_is_taken() -> None:
    assert not isinstance(WRAPPED.detokenizer(), WindowDetokenizer)
    assert isinstance(FALLBACK_WRAPPED.detokenizer(), WindowDetokenizer)


def test_a_character_is_held_back_until_it_is_whole() -> None:
    ids = [token for token in BYTE_LEVEL.encode("😀").ids]
    assert len(ids) > 1
    detokenizer = WRAPPED.detokenizer()
    assert [detokenizer.push([token]) for token in ids] == [*[""] * (len(ids) - 1), "😀"]


def test_an_unfinished_character_shows_at_the_end() -> None:
    detokenizer = WRAPPED.detokenizer()
    assert detokenizer.push(BYTE_LEVEL.encode("😀").ids[:1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [0, *BYTE_LEVEL.encode("fox").ids]
    assert WRAPPED.detokenizer(True).push(ids) == "fox"
    assert WRAPPED.detokenizer(False).push(ids) == "<|end|>fox"


@pytest.mark.parametrize("wrapped", [WRAPPED, FALLBACK_WRAPPED])
def test_endless_broken_bytes_are_not_held_for_ever(wrapped: FrontendTokenizer) -> None:
    broken = next(token for token in range(wrapped.vocab_size) if wrapped.decode([token]) == "\ufffd" and token > 2)
    detokenizer = wrapped.detokenizer()
    text = "".join(detokenizer.push([broken]) for _ in range(64))
    assert len(text) >= 32


@pytest.mark.parametrize("wrapped", [WRAPPED, FALLBACK_WRAPPED])
def test_tokens_beyond_the_vocabulary_have_no_text(wrapped: FrontendTokenizer) -> None:
    ids = wrapped.encode("fox")
    detokenizer = wrapped.detokenizer()
    assert detokenizer.push([*ids, 100_000]) + detokenizer.flush() == "fox"
    assert wrapped.token_text(100_000) == ""


def test_tokens_without_text_cost_no_more_the_more_there_are() -> None:
    """A model may write special tokens, or rows that are no token, without end."""
    tokenizer = tokenizer_of(Kind.LLAMA2, [" cat"])
    special, row, space = tokenizer.token_to_id(OTHER), tokenizer.get_vocab_size() + 5, tokenizer.token_to_id(SPACE)
    cat = tokenizer.token_to_id(f"{SPACE}cat")
    for prompt, expected in (([], " cat"), (tokenizer.encode("q").ids, "  cat")):
        sizes: list[int] = []

        def decode(token_ids: Sequence[int], sizes: list[int] = sizes) -> str:
            sizes.append(len(token_ids))
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

        detokenizer = WindowDetokenizer(decode, prompt)
        pieces = [detokenizer.push([token]) for token in (space, *[special, row] * 200, cat)]
        assert "".join(pieces) + detokenizer.flush() == expected
        assert max(sizes) < 64


@pytest.mark.parametrize("char", ["é", "က", "🙂"])
@pytest.mark.parametrize("num_chars", [1, 2, 3, 12, 40])
def test_a_prompt_of_many_bytes_is_cut_between_characters(char: str, num_chars: int) -> None:
    """Llama 2 writes Burmese, for example, in bytes, three to a character and without spaces."""
    tokenizer = tokenizer_of(Kind.LLAMA2, [" cat"])
    wrapped = FrontendTokenizer(tokenizer)
    letter = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
    for num_open in range(len(letter)):
        prompt = [tokenizer.token_to_id("q"), *letter * num_chars, *letter[:num_open]]
        detokenizer = wrapped.detokenizer(True, prompt)
        answer = [*letter[num_open:], *letter, tokenizer.token_to_id(f"{SPACE}cat")]
        assert "".join(detokenizer.push([token]) for token in answer) + detokenizer.flush() == f"{char}{char} cat"
