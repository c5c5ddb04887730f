"""Recall prompts: what is asked was stated, once, and the same seed asks the same."""

from __future__ import annotations

from random import Random

import pytest

from kvrelay.data.prose import NAMES
from kvrelay.data.recall import VALUE_NUMBERS, VALUE_WORDS, cue, fact, question, recall_chat, recall_prompt


@pytest.mark.parametrize("seed", range(20))
def test_the_answer_is_stated_once(seed: int) -> None:
    asked = recall_prompt(Random(seed), num_pairs=12, num_fillers=9)
    assert asked.prompt.count(fact(asked.name, asked.answer.strip())) == 1
    assert asked.prompt.count(f"code of {asked.name}") == 3
    assert asked.prompt.endswith(f"{question(asked.name)} {cue(asked.name)}")
    assert asked.prompt.count("code of") == 12 + 2
    assert asked.prompt.count(".") == 12 + 9
    word, number = asked.answer.split()
    assert word in VALUE_WORDS
    assert int(number) in VALUE_NUMBERS


def test_same_seed_same_prompt() -> None:
    assert recall_prompt(Random(3), 5, 5) == recall_prompt(Random(3), 5, 5)
    assert recall_prompt(Random(3), 5, 5) != recall_prompt(Random(4), 5, 5)


@pytest.mark.parametrize("ask", [0, 3, 7])
def test_ask_counts_pairs_in_the_order_of_the_text(ask: int) -> None:
    asked = recall_prompt(Random(1), num_pairs=8, num_fillers=4, ask=ask)
    names = [part.split()[0] for part in asked.prompt.split("The code of ")[1:9]]
    assert len(set(names)) == 8
    assert names[ask] == asked.name


def test_chat_prompt_is_the_completion_prompt_without_the_cue() -> None:
    chat, completion = recall_chat(Random(2), 6, 3), recall_prompt(Random(2), 6, 3)
    assert completion.prompt == f"{chat.prompt} {cue(chat.name)}"
    assert (chat.name, chat.answer) == (completion.name, completion.answer)


def test_no_more_pairs_than_names() -> None:
    assert recall_prompt(Random(0), len(NAMES)).name in NAMES
    with pytest.raises(ValueError, match="larger than population"):
        recall_prompt(Random(0), len(NAMES) + 1)
