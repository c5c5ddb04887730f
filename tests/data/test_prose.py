"""Prose: the same seed tells the same story, in sentences that keep the plain rules of English."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import pytest

from kvrelay.data.prose import HE_NAMES, NAMES, SHE_NAMES, person, sentence, story


def test_same_seed_same_story() -> None:
    assert story(Random(7)) == story(Random(7))
    assert story(Random(7)) != story(Random(8))


def test_names_are_of_one_kind_each() -> None:
    assert len(set(NAMES)) == len(NAMES) == len(SHE_NAMES) + len(HE_NAMES)
    assert person("Ruth").he == "she"
    assert person("Omar").his == "his"


@pytest.mark.parametrize("tell", [sentence, story])
def test_sentences_keep_the_rules(tell: Callable[[Random], str]) -> None:
    for seed in range(300):
        text = tell(Random(seed))
        assert not re.search(r"\b[Aa] [aeiou]", text), text
        assert "  " not in text
        assert text.endswith((".", '."'))
        assert all(part.strip(' "')[:1].isupper() for part in text.split(".") if part.strip(' "'))


def test_the_hero_is_who_was_asked_for() -> None:
    for seed in range(50):
        told = story(Random(seed), "Nora")
        assert told.split()[0] == "Nora" or "named Nora." in told.split(". ")[0] + "."
