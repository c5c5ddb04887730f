"""Ids for text: however the text is cut, they decode to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.zoo.vocabularies import Kind, tokenizer_of

from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines.openai.text_tokens import TextTokenizer, TextTokens
from kvrelay.errors import CheckpointError

TOKENIZER = TextTokenizer(bundled_checkpoint_path())


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12))
def test_pieces_decode_to_the_text(pieces: list[str]) -> None:
    tokens = TextTokens(TOKENIZER, TOKENIZER.encode("The quick brown"))
    found: list[int] = []
    for number, piece in enumerate(pieces):
        found += tokens.add(piece, is_last=number == len(pieces) - 1)
    assert TOKENIZER.decode(found) == "".join(pieces)


@pytest.mark.parametrize("kind", [Kind.LLAMA2, Kind.MISTRAL, Kind.GEMMA, Kind.BYTE_LEVEL])
@pytest.mark.parametrize("prompt", ["q", "ကခဂ" * 8, "é" * 20, "q\ufffd" * 20])
def test_text_in_bytes_does_not_wait(kind: Kind, prompt: str, tmp_path: Path) -> None:
    """Llama 2 writes Burmese, for example, in bytes, three to a character and without spaces."""
    tokenizer_of(kind).save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    tokens = TextTokens(tokenizer, tokenizer.encode(prompt))
    found = [tokens.add(char, is_last=False) for char in "ကခဂဃငစ ဆဇ" * 4]
    assert [len(ids) for ids in found] == [3, 3, 3, 3, 3, 3, 1, 3, 3] * 4


@pytest.mark.parametrize("kind", [Kind.LLAMA2, Kind.MISTRAL, Kind.GEMMA])
def test_text_that_does_not_decode_to_itself_has_no_space_more(kind: Kind, tmp_path: Path) -> None:
    """U+2581 stands for the space in these vocabularies."""
    tokenizer_of(kind).save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    before = tokenizer.encode("q")
    found = TextTokens(tokenizer, before).add("a\u2581b", is_last=True)
    assert tokenizer.decode([*before, *found]) == "qa b"


class Lossy(TextTokenizer):
    """No text decodes to itself."""

    num_encoded_chars = 0

    def encode(self, text: str) -> list[int]:
        self.num_encoded_chars += len(text)
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return ""


def test_text_that_never_decodes_to_itself_costs_no_square() -> None:
    costs = []
    for num_pieces in (2000, 4000):
        tokenizer = Lossy(bundled_checkpoint_path())
        tokens = TextTokens(tokenizer, [])
        found = [token for _ in range(num_pieces) for token in tokens.add("a", is_last=False)]
        assert len(found) > num_pieces / 2, "what waits is bounded"
        costs.append(tokenizer.num_encoded_chars)
    assert costs[1] < 2.5 * costs[0]


def test_a_missing_tokenizer_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)
