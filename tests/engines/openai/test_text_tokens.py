"""Ids for text: however the text is cut, they decode to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_missing_tokenizer_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)
