"""Models of the zoo: a vocabulary of a kind, and a script that a real engine computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.zoo.scripted_model import chain, write_model
from tests.zoo.vocabularies import END, Kind, token_of, tokenizer_of, write_tokenizer
from tokenizers import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""The prompt's last token, on which the answer depends, is that of the last message."""


@dataclass
class ZooModel:
    """``ids`` maps phrases, markers and spellings to tokens."""

    kind: Kind
    directory: Path
    tokenizer: Tokenizer

    def id(self, piece: str) -> int:
        return token_of(self.tokenizer, self.kind, piece)

    def decoded(self, *pieces: str, after: str = "") -> str:
        """The text of an answer after a prompt, without special tokens, as transformers decodes both."""
        prompt = self.transformers(after).input_ids if after else []
        return self.text_after(prompt, [self.id(piece) for piece in pieces])

    def text_after(self, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
        before, whole = (
            self.transformers.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (prompt, [*prompt, *token_ids])
        )
        assert whole.startswith(before)
        return str(whole[len(before) :])

    @cached_property
    def transformers(self) -> Any:
        """The tokenizer as transformers loads it."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(self.directory / "tokenizer.json"))


def zoo_model(
    directory: Path,
    kind: Kind,
    *scripts: Sequence[str],
    template: str = TEMPLATE,
    padding: int = 0,
    eos: int | list[int] | None = None,
    generation_ends: Sequence[str] = (),
    **config: object,
) -> ZooModel:
    """A model that writes each script: its first piece is the prompt's end, the others follow it one by one.

    ``padding``: rows of the model that are no tokens; negative: tokens that have no row.
    """
    pieces = [piece for script in scripts for piece in script]
    tokenizer = tokenizer_of(kind, [piece for piece in pieces if not _is_spelling(kind, piece)])
    model = ZooModel(kind, directory, tokenizer)
    followers: dict[int, dict[int, float]] = {}
    for script in scripts:
        for token, following in chain(*map(model.id, script)).items():
            if followers.setdefault(token, following) != following:
                raise ValueError(f"two scripts go on differently after token {token}")
    write_tokenizer(tokenizer, directory, template)
    vocab_size = tokenizer.get_vocab_size() + padding
    generation = {"eos_token_id": [model.id(end) for end in generation_ends]} if generation_ends else None
    write_model(directory, followers, vocab_size, model.id(END) if eos is None else eos, generation, **config)
    return model


def _is_spelling(kind: Kind, piece: str) -> bool:
    """Whether every vocabulary of the kind has the piece already."""
    try:
        token_of(tokenizer_of(kind), kind, piece)
    except KeyError:
        return False
    return True
