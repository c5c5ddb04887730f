"""A step's description through shared memory, micro-batches, and who hangs."""

from __future__ import annotations

import os
import socket
from random import Random

import numpy as np
import pytest

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import ModelOutput, NewSequence, SchedulerOutput
from kvrelay.executors.torch.parallel.channel import FIRST_CAPACITY, StepMemory
from kvrelay.executors.torch.parallel.messages import Answer, RankFailed, StepDone, decode_step, drawn, encode_step
from kvrelay.executors.torch.parallel.micro_batches import merge, split
from kvrelay.executors.torch.parallel.rank_progress import RankHangDetector, RankProgress
from kvrelay.transfer.ranks.channel import Channel, ChannelClosedError

NO_INTS = np.zeros(0, dtype=np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def work_of(num_tokens: list[int], samples: list[bool], **changes: object) -> SchedulerOutput:
    fields = {
        "step": 3,
        "new_seqs": (),
        "released_slots": (),
        "slots": np.arange(len(num_tokens), dtype=np.int32),
        "num_tokens": ints(*num_tokens),
        "samples": np.array(samples, dtype=np.bool_),
        "block_slots": NO_INTS,
        "block_indices": NO_INTS,
        "block_ids": NO_INTS,
    }
    return SchedulerOutput(**(fields | changes))  # type: ignore[arg-type]


def test_a_step_arrives_as_it_was_with_the_ranks_own_blocks() -> None:
    sampling = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(7, 8))
    bound = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"))
    sequences = (
        NewSequence(4, "r", range(5, 25), 18, 16, (9, 2), sampling, 2**64 - 1),
        NewSequence(5, "s", [1, 2], 2, 0, [6], bound, 0),
    )
    work = work_of(
        [1, 20],
        [True, False],
        new_seqs=sequences,
        released_slots=(1, 6),
        block_slots=ints(0),
        block_indices=ints(3),
        block_ids=ints(11),
    )
    found, message = decode_step(encode_step(work, ints(0, 2), [77, 88]), 4, 3)
    assert [array.tolist() for array in drawn(message)] == [[0, 2], [77, 88]]
    assert found.step == 3
    assert found.released_slots == (1, 6)
    for name in ("slots", "num_tokens", "samples", "block_slots", "block_indices"):
        assert getattr(found, name).tolist() == getattr(work, name).tolist()
        assert getattr(found, name).flags.writeable, "compiled kernels take no others"
    assert found.block_ids.tolist() == [11 * 4 + 3]
    entered, constrained = found.new_seqs
    assert list(entered.token_ids) == list(range(5, 25))
    assert list(entered.block_ids) == [9 * 4 + 3, 2 * 4 + 3]
    assert (entered.slot, entered.num_prompt_tokens, entered.num_computed_tokens) == (4, 18, 16)
    assert (entered.sampling, entered.seed) == (sampling, 2**64 - 1)
    assert constrained.sampling.grammar == bound.grammar
    assert all(type(token) is int for token in constrained.token_ids)


def test_the_step_memory_grows_on_both_sides() -> None:
    ours = StepMemory.create(2)
    theirs = StepMemory(os.dup(ours.fd), 2)
    frames = [b"small", b"x" * (FIRST_CAPACITY + 1), b"y" * (3 * FIRST_CAPACITY), b"small again"]
    for frame in frames:
        assert theirs.read(ours.write(frame)) == frame
    RankProgress(theirs.progress[1]).move()
    assert ours.progress.tolist() == [[0, 0], [1, 0]]
    theirs.close()
    ours.close()


def test_answers_of_any_size_arrive_and_an_end_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    driver: Channel[Answer] = Channel(ours, Answer)
    rank: Channel[Answer] = Channel(theirs, Answer)
    entry = PositionLogprobs(TokenLogprob(5, -0.25, 1), (TokenLogprob(6, -1.5, 2),))
    done = StepDone([5, 6], {0: entry}, {1: [entry] * 100}, {1: "why"})
    rank.send(done)
    rank.send(RankFailed("ConfigError", "wrong"))
    assert driver.receive() == done
    assert driver.receive() == RankFailed("ConfigError", "wrong")
    rank.close()
    with pytest.raises(ChannelClosedError):
        driver.receive()
    with pytest.raises(ChannelClosedError):
        driver.send(done)
    driver.close()


def test_micro_batches_cover_every_token_once_and_in_order() -> None:
    rng = Random(5)
    for _ in range(200):
        decodes = [1] * rng.randrange(6)
        chunks = [rng.randrange(2, 300) for _ in range(rng.randrange(5))]
        counts = decodes + chunks
        if not counts:
            continue
        samples = [rng.random() < 0.7 for _ in counts]
        whole = work_of(counts, samples, released_slots=(9,), block_ids=ints(4), block_slots=ints(0))
        parts = split(whole, rng.choice([1, 2, 4]), min_tokens=8)
        tokens = [(int(row), int(n)) for part in parts for row, n in zip(part.rows, part.work.num_tokens)]
        assert [row for row, _ in tokens] == sorted(row for row, _ in tokens)
        summed = [sum(n for row, n in tokens if row == wanted) for wanted in range(len(counts))]
        assert summed == counts
        assert all(n > 0 for _, n in tokens)
        drawing = [int(part.rows[i]) for part in parts for i in np.flatnonzero(part.work.samples)]
        assert drawing == [row for row, sampled in enumerate(samples) if sampled]
        # A row that draws does so with its last token.
        for row in drawing:
            last = max(i for i, part in enumerate(parts) if row in part.rows)
            assert parts[last].work.samples[parts[last].rows.tolist().index(row)]
        assert [part.work.released_slots for part in parts] == [(9,)] + [()] * (len(parts) - 1)
        assert sum(len(part.work.block_ids) for part in parts) == 1


def test_a_step_without_rows_stays_whole() -> None:
    (part,) = split(work_of([], [], released_slots=(1,)), 4)
    assert part.work.released_slots == (1,)


def test_outputs_are_put_together_by_row() -> None:
    parts = split(work_of([1, 30, 33], [True, False, True]), 2, min_tokens=8)
    assert [part.rows.tolist() for part in parts] == [[0, 1, 2], [2]]
    entry = [PositionLogprobs(TokenLogprob(i, -1.0, 1)) for i in range(3)]
    outputs = [
        ModelOutput([10], {0: entry[0]}, {1: [entry[1]], 2: [entry[1]]}),
        ModelOutput([12], {0: entry[2]}, {0: [entry[2]]}, {0: "why"}),
    ]
    merged = merge(parts, outputs)
    assert merged.token_ids == [10, 12]
    assert merged.logprobs == {0: entry[0], 2: entry[2]}
    assert merged.prompt_logprobs == {1: [entry[1]], 2: [entry[1], entry[2]]}
    assert merged.failures == {2: "why"}


def test_a_hang_is_told_from_a_long_step_and_named() -> None:
    table = np.zeros((3, 2), dtype=np.int64)
    detector = RankHangDetector(table, 3)
    moving, waiting = RankProgress(table[0]), RankProgress(table[1])
    for _ in range(10):
        moving.move()
        assert not detector.check()
    with waiting.waiting():
        assert [detector.check() for _ in range(4)] == [False, False, False, True]
        assert detector.culprits() == [0, 2], "the others wait for those that do not wait"
    with waiting.waiting(), moving.waiting(), RankProgress(table[2]).waiting():
        assert detector.culprits() == [2], "all wait: whoever is furthest behind"
    detector.begin()
    assert not detector.check()
