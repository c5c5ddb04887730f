"""Hundreds of random requests through one small engine: answers are those of ``mock_generate``, nothing leaks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest
from tests.draws import seeds

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.errors import OverloadedError
from kvrelay.executors.mock import mock_generate

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)


def random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    stem = rng.choice(stems)
    return (stem[: rng.randrange(len(stem))] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, longest))])[
        :longest
    ]


class Crowd:
    """Random requests that come and go, and what was answered to each."""

    def __init__(self, engine: EngineCore, rng: random.Random, num_requests: int) -> None:
        self.engine = engine
        self.rng = rng
        self.num_requests = num_requests
        self.stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
        self.prompts: dict[str, list[int]] = {}
        self.wanted: dict[str, int] = {}
        self.answers: defaultdict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()

    def arrive(self) -> None:
        name, count = f"r{len(self.prompts)}", self.rng.randrange(0, 30)
        prompt = random_prompt(self.rng, self.stems, 60)
        request = Request(name, prompt, SamplingParams(max_tokens=count), priority=self.rng.randrange(3))
        try:
            self.engine.add_request(request)
        except OverloadedError:
            return
        self.prompts[name], self.wanted[name] = prompt, count

    def abort_one(self) -> None:
        name = self.rng.choice(list(self.prompts))
        if name not in self.reasons:
            self.engine.abort(name)
            self.aborted.add(name)

    def step(self) -> None:
        for output in self.engine.step().outputs:
            assert output.request_id not in self.aborted
            assert output.request_id not in self.reasons
            self.answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def tick(self) -> None:
        if len(self.prompts) < self.num_requests and self.rng.random() < 0.5:
            self.arrive()
        if self.prompts and self.rng.random() < 0.03:
            self.abort_one()
        if self.rng.random() < 0.01:
            self.engine.clear_cache()
        self.step()

    def check_answers(self) -> None:
        assert set(self.reasons) | self.aborted == set(self.prompts)
        for name, reason in self.reasons.items():
            assert reason is FinishReason.LENGTH
            prompt = self.prompts[name]
            count = min(self.wanted[name], self.engine.max_model_len - len(prompt))
            assert self.answers[name] == mock_generate(prompt, count, vocab_size=VOCAB_SIZE, eos_token_ids=EOS), name


@pytest.mark.parametrize("seed", seeds(3, 6))
@pytest.mark.parametrize("caching", [True, False])
def test_random_requests_give_the_reference_answers(make_engine: MakeEngine, seed: int, caching: bool) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=rng.randrange(24, 48),
        max_num_seqs=rng.randrange(2, 10),
        max_num_batched_tokens=rng.choice([16, 23, 64]),
        max_num_waiting=20,
        kv_watermark=rng.choice([0, 0.5, 2]),
        enable_prefix_caching=caching,
    )
    crowd = Crowd(engine, rng, 200)
    while len(crowd.prompts) < 200 or engine.has_work():
        crowd.tick()
        if rng.random() < 0.02:
            engine.check_integrity()
    crowd.check_answers()
    engine.check_integrity()
    assert not engine.has_unfinished()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert caching or engine.pool.num_cached == 0


def test_small_pools_do_preempt(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12, max_num_seqs=4)
    prompts = {f"r{i}": list(range(10 * i + 10, 10 * i + 18)) for i in range(4)}
    for name, prompt in prompts.items():
        engine.add_request(Request(name, prompt, SamplingParams(max_tokens=24)))
    answers: defaultdict[str, list[int]] = defaultdict(list)
    while engine.has_work():
        for output in engine.step().outputs:
            answers[output.request_id] += output.token_ids
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert answers[name] == mock_generate(prompt, 24, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    engine.check_integrity()
