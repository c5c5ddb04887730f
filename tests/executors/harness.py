"""A small scheduler that drives one executor. Each step's batch is given by the test, or by ``run_to_end``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import NO_TOKEN, Executor, ModelOutput, NewSequence, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Running:
    slot: int
    tokens: list[int]
    num_prompt: int
    computed: int
    blocks: list[int]
    sampling: SamplingParams
    seed: int
    outputs: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    entered: bool = False


class Harness:
    """Drives one executor. Blocks are handed out in random order and never freed."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.block_size = executor.kv_layout.block_size
        self._free = list(range(executor.num_blocks))
        Random(seed).shuffle(self._free)
        self._released: list[int] = []
        self._step = 0

    def add(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        computed: int = 0,
        blocks: Sequence[int] = (),
        num_prompt: int | None = None,
    ) -> Running:
        return Running(
            slot,
            list(prompt),
            len(prompt) if num_prompt is None else num_prompt,
            computed,
            list(blocks),
            sampling,
            seed,
        )

    def release(self, sequence: Running) -> None:
        self._released.append(sequence.slot)

    def step(self, *work: tuple[Running, int]) -> ModelOutput:
        """Compute so many tokens of each sequence: decodes must come before chunks, as the contract says."""
        new, slots, counts, samples = [], [], [], []
        appended: list[tuple[int, int, int]] = []
        for sequence, count in work:
            before = len(sequence.blocks)
            while len(sequence.blocks) * self.block_size < sequence.computed + count:
                sequence.blocks.append(self._free.pop())
            if sequence.entered:
                appended += [(sequence.slot, i, sequence.blocks[i]) for i in range(before, len(sequence.blocks))]
            else:
                new.append(_enter(sequence))
            slots.append(sequence.slot)
            counts.append(count)
            samples.append(sequence.computed + count == len(sequence.tokens))
        columns = np.array(appended, dtype=np.int32).reshape(-1, 3)
        self._step += 1
        output = self.executor.execute(
            SchedulerOutput(
                step=self._step,
                new_seqs=tuple(new),
                released_slots=tuple(self._released),
                slots=np.array(slots, dtype=np.int32),
                num_tokens=np.array(counts, dtype=np.int32),
                samples=np.array(samples, dtype=np.bool_),
                block_slots=columns[:, 0].copy(),
                block_indices=columns[:, 1].copy(),
                block_ids=columns[:, 2].copy(),
            )
        )
        self._released = []
        self._update(work, samples, output)
        return output

    def _update(self, work: Sequence[tuple[Running, int]], samples: list[bool], output: ModelOutput) -> None:
        token_ids = iter(output.token_ids)
        for row, ((sequence, count), sampled) in enumerate(zip(work, samples)):
            sequence.computed += count
            if sampled:
                token = next(token_ids)
                if token == NO_TOKEN:
                    sequence.computed -= 1
                    continue
                sequence.tokens.append(token)
                sequence.outputs.append(token)
            if row in output.logprobs:
                sequence.logprobs.append(output.logprobs[row])
            sequence.prompt_logprobs += output.prompt_logprobs.get(row, [])
        assert next(token_ids, None) is None

    def run_to_end(self, sequences: Sequence[Running], num_outputs: int, chunk: int = 10_000) -> list[list[int]]:
        """All sequences together, prefills in chunks of ``chunk``, until each has ``num_outputs`` tokens."""
        while active := [s for s in sequences if len(s.outputs) < num_outputs]:
            decodes = [(s, 1) for s in active if len(s.tokens) - s.computed == 1]
            chunks = [(s, min(chunk, len(s.tokens) - s.computed)) for s in active if len(s.tokens) - s.computed > 1]
            self.step(*decodes, *chunks)
        for sequence in sequences:
            self.release(sequence)
        return [sequence.outputs for sequence in sequences]


def _enter(sequence: Running) -> NewSequence:
    sequence.entered = True
    return NewSequence(
        slot=sequence.slot,
        request_id=f"r{sequence.slot}",
        token_ids=list(sequence.tokens),
        num_prompt_tokens=sequence.num_prompt,
        num_computed_tokens=sequence.computed,
        block_ids=list(sequence.blocks),
        sampling=sequence.sampling,
        seed=sequence.seed,
    )


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 1) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
