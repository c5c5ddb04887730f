"""What the sampler draws: distributions, filters, penalties, and independence of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import NewSequence, SchedulerOutput
from kvrelay.executors.grammars import StepMasks
from kvrelay.executors.torch.sampling.logprobs import logprobs_of
from kvrelay.executors.torch.sampling.sampler import Sampler
from kvrelay.executors.torch.sampling.uniform import uniform
from kvrelay.executors.torch.slots import SlotStates

EOS = 1


def make_states(
    params: Sequence[SamplingParams], seeds: Sequence[int], tokens: Sequence[int] = (5,), num_prompt: int = 1
) -> SlotStates:
    """A slot per entry of ``params``, all with the same tokens."""
    states = SlotStates(len(params), 64, 16)
    nothing, no_flags = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
    sequences = tuple(
        NewSequence(slot, "r", list(tokens), num_prompt, 0, [0], sampling, seed)
        for slot, (sampling, seed) in enumerate(zip(params, seeds))
    )
    states.apply(SchedulerOutput(0, sequences, (), nothing, nothing, no_flags, nothing, nothing, nothing))
    return states


def draw(logits: torch.Tensor, states: SlotStates) -> list[int]:
    slots = np.arange(len(logits), dtype=np.int32)
    return [int(token) for token in Sampler((EOS,)).sample(logits, slots, states)]


def shares(sampling: SamplingParams, logits: torch.Tensor, count: int = 20_000) -> np.ndarray:
    """How often each token is drawn, over as many seeds."""
    states = make_states([sampling] * count, range(count))
    return np.bincount(draw(logits.expand(count, -1), states), minlength=len(logits)) / count


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -4.0])


def expected(logits: torch.Tensor, keep: Sequence[int]) -> np.ndarray:
    masked = torch.full_like(logits, float("-inf"))
    masked[list(keep)] = logits[list(keep)]
    return torch.softmax(masked, dim=-1).numpy()


@pytest.mark.parametrize(
    ("sampling", "keep"),
    [
        (SamplingParams(), range(6)),
        (SamplingParams(top_k=2), (0, 1)),
        (SamplingParams(top_k=-1, top_p=0.5), (0,)),
        # 0.55 0.20 0.12 0.075 ...: the third token crosses 0.8.
        (SamplingParams(top_p=0.8), (0, 1, 2)),
        (SamplingParams(min_p=0.2), (0, 1, 2)),
        (SamplingParams(top_k=3, min_p=0.3), (0, 1)),
        (SamplingParams(top_k=1000), range(6)),
    ],
    ids=lambda value: repr(value) if isinstance(value, SamplingParams) else None,
)
def test_distribution(sampling: SamplingParams, keep: Sequence[int]) -> None:
    assert shares(sampling, LOGITS) == pytest.approx(expected(LOGITS, list(keep)), abs=0.012)


def test_temperature() -> None:
    cold = shares(SamplingParams(temperature=0.5), LOGITS)
    assert cold == pytest.approx(expected(LOGITS / 0.5, range(6)), abs=0.012)


def test_filters_follow_the_order_of_tokens_whatever_it_is() -> None:
    permutation = torch.tensor([3, 0, 5, 1, 4, 2])
    got = shares(SamplingParams(top_p=0.8), LOGITS[permutation])
    assert got == pytest.approx(expected(LOGITS, (0, 1, 2))[permutation.numpy()], abs=0.012)


def test_a_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=100, min_p=0.01),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, logit_bias={7: 4.0}),
    ]
    params = kinds * 6
    logits, seeds = torch.randn(len(params), 300), list(range(100, 100 + len(params)))
    together = draw(logits, make_states(params, seeds))
    alone = [draw(logits[i : i + 1], make_states([params[i]], [seeds[i]]))[0] for i in range(len(params))]
    assert together == alone


def test_greedy_is_the_argmax_and_leaves_logits_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    before = logits.clone()
    params = [SamplingParams(temperature=0.0, repetition_penalty=2.0)] + [SamplingParams(temperature=0.0)] * 3
    tokens = draw(logits, make_states(params, [0] * 4))
    assert tokens[1:] == logits.argmax(dim=-1).tolist()[1:]
    assert torch.equal(logits, before)


def test_penalties() -> None:
    greedy = {"temperature": 0.0}
    tokens, logits = (2, 3, 3, 4), torch.tensor([[0.0, 0.0, 5.0, 4.9, 4.8, 4.0, -1.0]])

    def choose(**settings: float) -> int:
        return draw(logits, make_states([SamplingParams(**greedy, **settings)], [0], tokens, num_prompt=1))[0]

    assert choose() == 2
    # The prompt's token counts for repetition only: 5 / 2 falls below 4.
    assert choose(repetition_penalty=2.0) == 5
    assert choose(presence_penalty=2.0) == 2
    assert choose(presence_penalty=-0.2) == 3
    # Token 3 came out twice, 4 once.
    assert choose(frequency_penalty=-0.3) == 3
    assert choose(frequency_penalty=-0.05, presence_penalty=-0.2) == 3


def test_repetition_penalty_of_a_negative_logit_lowers_it() -> None:
    logits = torch.tensor([[-1.0, -9.0, -1.5]])
    params = [SamplingParams(temperature=0.0, repetition_penalty=2.0)]
    assert draw(logits, make_states(params, [0], tokens=(0,))) == [2]


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]])

    def choose(tokens: tuple[int, ...], **settings: object) -> int:
        sampling = SamplingParams(temperature=0.0, max_tokens=9, **settings)  # type: ignore[arg-type]
        return draw(logits, make_states([sampling], [0], tokens, num_prompt=1))[0]

    assert choose((9,)) == EOS
    assert choose((9,), logit_bias={3: 2.5}) == 3
    assert choose((9,), min_tokens=2) == 2
    assert choose((9, 9), min_tokens=2, stop_token_ids=(2,)) == 3
    assert choose((9, 9, 9), min_tokens=2) == EOS
    assert choose((9,), min_tokens=2, ignore_eos=True) == EOS


def test_numbers_depend_on_seed_and_index_alone() -> None:
    seeds, indices = np.array([0, 0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 1, 0, 0], dtype=np.int64)
    numbers = uniform(seeds, indices)
    assert len(set(numbers.tolist())) == 4
    assert uniform(seeds[2:3], indices[2:3])[0] == numbers[2]
    many = uniform(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.int64))
    assert 0.0 <= many.min() < many.max() < 1.0
    assert np.histogram(many, bins=10, range=(0, 1))[0] / 100_000 == pytest.approx(np.full(10, 0.1), abs=0.005)
    along = uniform(np.full(100_000, 7, dtype=np.uint64), np.arange(100_000))
    assert abs(float(np.corrcoef(along[:-1], along[1:])[0, 1])) < 0.01


def test_broken_logits_still_give_a_token() -> None:
    logits = torch.stack((torch.full((8,), float("nan")), torch.full((8,), float("-inf")), torch.zeros(8)))
    logits[2, 3] = float("inf")
    for sampling in (
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
    ):
        tokens = draw(logits, make_states([sampling] * 3, [1, 2, 3]))
        assert all(0 <= token < 8 for token in tokens)


def test_logprobs() -> None:
    logits = LOGITS[None]
    (entry,) = logprobs_of(logits, torch.tensor([2]), 2)
    wanted = torch.log_softmax(LOGITS, dim=-1)
    assert (entry.chosen.token_id, entry.chosen.rank) == (2, 3)
    assert entry.chosen.logprob == pytest.approx(float(wanted[2]))
    assert [(item.token_id, item.rank) for item in entry.top] == [(0, 1), (1, 2)]
    assert logprobs_of(logits, torch.tensor([0]), 0)[0].top == ()


KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5),
    SamplingParams(frequency_penalty=0.5, min_p=0.01),
]


@pytest.mark.parametrize("which", ["all", "some", "greedy", "none"])
def test_masks_forbid_tokens_to_their_rows_and_change_no_other_row(which: str) -> None:
    """Each row as if a logit bias of -inf had been in its place, alone. None: all masks are late."""
    vocab_size, rng = 70, np.random.default_rng(3)
    params = KINDS[:1] * 8 if which == "greedy" else KINDS * 8
    logits = torch.from_numpy(rng.normal(size=(len(params), vocab_size)).astype(np.float32))
    rows = [row for row in range(len(params)) if which != "none" and (which != "some" or row % 3 == 0)]
    allowed = rng.random((len(rows), 96)) < 0.1
    allowed[:, 7] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    states = make_states(params, range(len(params)), tokens=(5, 6, 7, 7), num_prompt=1)
    before, slots = logits.clone(), np.arange(len(params), dtype=np.int32)
    chosen = Sampler((EOS,)).sample(logits, slots, states, StepMasks(rows, words, vocab_size, {}, []))
    assert torch.equal(logits, before)
    reference = logits.clone()
    for number, row in enumerate(rows):
        reference[row, torch.from_numpy(~allowed[number, :vocab_size])] = float("-inf")
        assert allowed[number, chosen[row]]
    alone = [Sampler((EOS,)).sample(reference[row : row + 1], slots[row : row + 1], states)[0] for row in slots]
    assert chosen.tolist() == alone


def test_a_grammar_that_demands_the_end_wins_over_min_tokens() -> None:
    states = make_states([SamplingParams(temperature=0.0, min_tokens=9), SamplingParams(min_tokens=9)], [1, 2])
    words = np.full((2, 1), 1 << EOS, dtype=np.int32)
    masks = StepMasks([0, 1], words, len(LOGITS), {}, [])
    tokens = Sampler((EOS,)).sample(LOGITS.expand(2, -1), np.arange(2, dtype=np.int32), states, masks)
    assert tokens.tolist() == [EOS, EOS]
