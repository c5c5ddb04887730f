"""A checkpoint's vocabulary as grammars see it: text, and markers that are no text.

A marker is an added token such as ``<tool_call>``, ``<|im_end|>`` or ``[TOOL_CALLS]``. A model reads and writes it as
one token with a meaning of its own, so text in a grammar must be written with other tokens even if it spells the same
characters. The library's tokenizer would find markers in text: here they have names that no text has. A grammar names a
marker by its id, ``<[ID]>``. A Lark grammar may also use the marker's own name, as llguidance allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

MARK = "\U0010fffe"
"""A noncharacter: no text has it."""
_LARK_PIECE = re.compile(
    r'"(?:\\.|[^"\\])*"?|/(?![/*])(?:\\.|[^/\\\n])+/?|//[^\n]*|(?P<marker><[^<>\s"\']+>?)', re.DOTALL
)
"""A literal, a regular expression, a comment, or a special token. One without an end matches too, so that no character
is read twice."""


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """``tokenizer``: the text of a ``tokenizer.json`` for llguidance. ``markers``: their ids by content."""

    tokenizer: str
    markers: dict[str, int]


def grammar_vocabulary(tokenizer_file: Path, vocab_size: int) -> GrammarVocabulary:
    """The vocabulary of a model with ``vocab_size`` rows; tokens beyond them are left out.

    Raises OSError and ValueError for a file that cannot be read.
    """
    document = msgspec.json.decode(tokenizer_file.read_bytes(), type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(document["model"], type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(document.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    added = [token for token in added if token["id"] < vocab_size]
    markers = {token["content"]: int(token["id"]) for token in added if _is_marker(token)}
    decoder = msgspec.json.decode(document.get("decoder", b"null"), type=dict[str, Any] | None) or {}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder] if decoder else [])}
    words = [token for token in added if token["content"] not in markers]
    spelled = _spelled(words, document.get("normalizer", msgspec.Raw(b"null")), is_byte_level="ByteLevel" in steps)
    names = spelled | {text: f"{MARK}{text}" for text in markers}
    kept = [token for token in added if token["content"] not in spelled]
    parts: dict[str, object] = {
        **document,
        "model": {**model, **_renamed(model, added, names, vocab_size)},
        "added_tokens": [
            token | ({"content": names[token["content"]], "special": True} if token["content"] in names else {})
            for token in kept
        ],
        "post_processor": None,
    }
    if "Metaspace" in steps:
        # The library reads a SentencePiece vocabulary from other steps, which replace the space and join bytes.
        space = {"type": "Replace", "pattern": {"String": steps["Metaspace"]["replacement"]}, "content": " "}
        parts["decoder"] = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return GrammarVocabulary(msgspec.json.encode(parts).decode(), markers)


def _renamed(
    model: Mapping[str, msgspec.Raw], added: Sequence[Mapping[str, Any]], names: Mapping[str, str], vocab_size: int
) -> dict[str, object]:
    """The parts of the tokenizer's model that have tokens by name: complete up to the largest id, since the library
    counts tokens to find it, and the id of an added token that the vocabulary lacks."""
    listed = msgspec.json.decode(model["vocab"], type=dict[str, int] | list[Any])
    whole = listed if isinstance(listed, dict) else {entry[0]: number for number, entry in enumerate(listed)}
    vocab = {names.get(token["content"], token["content"]): int(token["id"]) for token in added}
    vocab |= {names.get(text, text): number for text, number in whole.items() if number < vocab_size}
    ids = set(vocab.values())
    vocab |= {f"{MARK}{number}": number for number in range(max(ids, default=0)) if number not in ids}
    if isinstance(listed, list):
        scores = {names.get(text, text): score for text, score, *_ in listed}
        return {"vocab": [[text, scores.get(text, -100.0)] for text in sorted(vocab, key=vocab.__getitem__)]}
    unknown = msgspec.json.decode(model.get("unk_token", b"null"), type=str | None)
    renamed: dict[str, object] = {"vocab": vocab, "unk_token": names.get(unknown, unknown) if unknown else None}
    if "merges" in model and any(number >= vocab_size for number in whole.values()):
        renamed["merges"] = _known_merges(msgspec.json.decode(model["merges"]), vocab)
    return renamed


def with_marker_ids(source: str, markers: Mapping[str, int]) -> str:
    """A Lark grammar whose markers are named by their ids, outside literals, regular expressions and comments."""

    def by_id(found: re.Match[str]) -> str:
        number = markers.get(found["marker"] or "")
        return found[0] if number is None else f"<[{number}]>"

    return _LARK_PIECE.sub(by_id, source)


def _is_marker(token: Mapping[str, Any]) -> bool:
    """Others are words and runs of spaces, which are text."""
    content = token["content"]
    return token.get("special") or (content[:1], content[-1:]) in (("<", ">"), ("[", "]"))


def _spelled(words: Sequence[Mapping[str, Any]], normalizer: msgspec.Raw, *, is_byte_level: bool) -> dict[str, str]:
    """Added words that the library would read as another text, with their tokens' spelling: those that are normalized,
    with a space before them for example, and in a byte-level vocabulary letters that stand for bytes there."""
    texts = {word["content"]: word["content"] for word in words}
    changed = [word["content"] for word in words if word.get("normalized")]
    if changed and bytes(normalizer) != b"null":
        parts = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [], "normalizer": normalizer}
        normalize = Tokenizer.from_str(msgspec.json.encode(parts).decode()).normalizer.normalize_str
        texts |= {word: normalize(word) for word in changed}
    if is_byte_level:
        spell = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        texts |= {
            word: "".join(piece for piece, _ in spell(text)) for word, text in texts.items() if not text.isascii()
        }
    return {word: text for word, text in texts.items() if text != word}


def _known_merges(merges: list[Any], vocab: Mapping[str, int]) -> list[Any]:
    """Those that make a token of ``vocab`` out of others of it."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
    return [[left, right] for left, right in pairs if left in vocab and right in vocab and f"{left}{right}" in vocab]
