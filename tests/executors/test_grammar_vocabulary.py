"""Markers of a vocabulary are no text for grammars, and a Lark grammar names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tests.zoo.vocabularies import END, MARKERS, SPACE, Kind, tokenizer_of
from tokenizers import AddedToken, decoders

from kvrelay.executors.grammar_vocabulary import grammar_vocabulary, with_marker_ids
from kvrelay.frontend.tokens.tokenizer import load_tokenizer

MARKED = {"<t>": 7, "<|eot|>": 9}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("start: <t> x <|eot|>", "start: <[7]> x <[9]>"),
        ('start: "<t>" <t>', 'start: "<t>" <[7]>'),
        (r'start: "\"<t>" <t>', r'start: "\"<t>" <[7]>'),
        (r"start: /<t>\/<t>/ <t>", r"start: /<t>\/<t>/ <[7]>"),
        ("// <t>\nstart: <t>", "// <t>\nstart: <[7]>"),
        ('start: %json {"enum": ["<t>"]} <t>', 'start: %json {"enum": ["<t>"]} <[7]>'),
        ("start: <unknown> <[3]>", "start: <unknown> <[3]>"),
        ('start: "<t> <t>', 'start: "<t> <t>'),
    ],
)
def test_markers_are_named_by_their_ids(source: str, expected: str) -> None:
    assert with_marker_ids(source, MARKED) == expected


@pytest.mark.parametrize("piece", ["\\/", '\\"', '"\\', "/\\", "<a", "</", '"/'])
def test_long_sources_are_read_once(piece: str) -> None:
    source = "/" + piece * 2**15
    assert with_marker_ids(source, MARKED) == source  # a minute if each character began anew


def tokens_of(tokenizer_json: str, size: int, text: str) -> list[int]:
    return LLTokenizer(tokenizer_json, n_vocab=size, eos_token=[0]).tokenize_str(text)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_the_library_finds_no_marker_in_text(kind: Kind, cut: int, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind, [" there"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size() - cut
    vocabulary = grammar_vocabulary(tmp_path / "tokenizer.json", size)
    markers = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    assert vocabulary.markers == {text: number for text, number in markers.items() if number < size}
    for text in (*MARKERS.get(kind, ()), END):
        found = tokens_of(vocabulary.tokenizer, size, f"a{text}b")
        assert not set(markers.values()).intersection(found)
        assert tokenizer.decode(found) == f"a{text}b"


def test_added_words_and_spaces_stay_text(tmp_path: Path) -> None:
    """GPT-NeoX and StarCoder have runs of spaces as added tokens, which models write in code."""
    tokenizer = tokenizer_of(Kind.BYTE_LEVEL)
    tokenizer.add_tokens(["    ", "covid-19"])
    tokenizer.add_special_tokens(["<|after|>"])  # as in OLMo
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    vocabulary = grammar_vocabulary(tmp_path / "tokenizer.json", size)
    found = tokens_of(vocabulary.tokenizer, size, "a    covid-19")
    assert found == tokenizer.encode("a    covid-19", add_special_tokens=False).ids
    assert tokenizer.token_to_id("    ") in found


def test_added_words_are_spelled_as_the_normalizer_writes_them(tmp_path: Path) -> None:
    """``add_tokens`` of transformers normalizes words: after Llama 2's a word's token has the space before it."""
    tokenizer = tokenizer_of(Kind.LLAMA2)
    tokenizer.add_tokens(["covid-19"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    word, size = tokenizer.token_to_id("covid-19"), tokenizer.get_vocab_size()
    vocabulary = grammar_vocabulary(tmp_path / "tokenizer.json", size)
    library = LLTokenizer(vocabulary.tokenizer, n_vocab=size, eos_token=[0])
    assert library.decode_bytes([word]) == tokenizer.decode([*tokenizer.encode("a").ids, word]).encode()[1:]
    assert library.decode_str(library.tokenize_str("a covid-19")) == "a covid-19"
    shown = load_tokenizer(tmp_path)
    assert shown.token_bytes(word) == library.decode_bytes([word])


@pytest.mark.parametrize("word", ["naïve", "日本", "straße "])
def test_added_words_beyond_ascii_are_text_in_a_byte_level_vocabulary(word: str, tmp_path: Path) -> None:
    """The library would take ``ï`` for the byte that this character spells there."""
    tokenizer = tokenizer_of(Kind.BYTE_LEVEL)
    tokenizer.add_tokens([AddedToken(word, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    library = LLTokenizer(grammar_vocabulary(tmp_path / "tokenizer.json", size).tokenizer, n_vocab=size, eos_token=[0])
    assert library.decode_bytes([tokenizer.token_to_id(word)]) == word.encode()
    assert library.decode_bytes(library.tokenize_str(f"a{word}b")) == f"a{word}b".encode()


@pytest.mark.parametrize("in_sequence", [False, True])
def test_a_decoder_that_is_metaspace(in_sequence: bool, tmp_path: Path) -> None:
    """XGLM and converted SentencePiece models: the decoder says only which character is a space."""
    tokenizer = tokenizer_of(Kind.MISTRAL, [" there"])
    space = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), space]) if in_sequence else space
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    library = LLTokenizer(grammar_vocabulary(tmp_path / "tokenizer.json", size).tokenizer, n_vocab=size, eos_token=[2])
    pieces = (f"{SPACE}there", SPACE, "a", *(["<0x41>"] if in_sequence else []))
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    assert [library.decode_bytes([token]) for token in ids] == [b" there", b" ", b"a", b"A"][: len(ids)]


def test_ids_with_holes(tmp_path: Path) -> None:
    document = json.loads(tokenizer_of(Kind.BYTE_LEVEL).to_str())
    document["model"]["vocab"]["zz"] = 400
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    vocabulary = grammar_vocabulary(tmp_path / "tokenizer.json", 410)
    assert LLTokenizer(vocabulary.tokenizer, n_vocab=410, eos_token=[0]).decode_str([400]) == "zz"
