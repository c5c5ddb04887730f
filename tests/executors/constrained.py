"""Answers of a model that knows nothing but the grammar: random choices among the tokens that the masks allow."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvrelay.core.grammar import Grammar
from kvrelay.core.sampling import SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.grammars import ComputingMasks, GrammarCompiler, GrammarMasks, StepMasks
from kvrelay.frontend.tokens.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(bundled_checkpoint_path())
EOS, VOCAB_SIZE = 1, 1024
COMPILER = GrammarCompiler(bundled_checkpoint_path() / "tokenizer.json", VOCAB_SIZE, [EOS])


def random_answer(grammar: Grammar, rng: Random, max_tokens: int = 2000, end_at: float = 0.9) -> str:
    """One of the allowed tokens at a time, until the end of sequence, which is taken with probability
    ``end_at`` where it is possible."""
    COMPILER.compile(grammar)
    masks = GrammarMasks(COMPILER, VOCAB_SIZE)
    masks.enter(0, SamplingParams(grammar=grammar), [])
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        assert len(tokens) < max_tokens
        computing = masks.begin([0])
        assert computing is not None
        step = computing.result()
        assert step is not None
        assert step.failures == {}
        (forbidden,) = step.forbidden()
        allowed = np.flatnonzero(~forbidden)
        # Small vocabularies spell most strings byte by byte: prefer an end that is possible.
        tokens.append(EOS if not forbidden[EOS] and rng.random() < end_at else int(rng.choice(allowed)))
        masks.advance([0], tokens[-1:])
    masks.close()
    return TOKENIZER.decode(tokens[:-1])


def be_late(monkeypatch: pytest.MonkeyPatch, seed: int, probability: float = 0.5) -> list[int]:
    """From now on each mask in this process is late with this probability. Returns the rows that were, as a list that
    grows."""
    rng, late_rows = Random(seed), list[int]()
    result = ComputingMasks.result

    def late_result(self: ComputingMasks) -> StepMasks | None:
        awaited = [row for row, walk in self.walks.items() if walk.is_awaited]
        masks = result(self)
        if masks is None:
            return None
        late = [row for row in masks.rows if row not in awaited and rng.random() < probability]
        late_rows.extend(late)
        kept = [number for number, row in enumerate(masks.rows) if row not in late]
        rows, failures = [masks.rows[number] for number in kept], dict(masks.failures)
        for row in late:
            failures.pop(row, None)
        return StepMasks(rows, masks.words[kept], masks.vocab_size, failures, [*masks.late, *late])

    monkeypatch.setattr(ComputingMasks, "result", late_result)
    return late_rows
