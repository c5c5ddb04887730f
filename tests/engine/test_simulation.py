"""Hundreds of random requests through one small engine: answers are those of ``mock_generate``, nothing leaks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.core import EngineCore
from kvrelay.engine.mock import mock_generate
from kvrelay.engine.request import Request
from kvrelay.errors import OverloadedError

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)


def random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    stem = rng.choice(stems)
    return (stem[: rng.randrange(len(stem))] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, longest))])[
        :longest
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("caching", [True, False])
def test_random_requests_give_the_reference_answers(make_engine: MakeEngine, seed: int, caching: bool) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=rng.randrange(24, 48),
        max_num_seqs=rng.randrange(2, 10),
        max_num_batched_tokens=rng.choice([16, 23, 64]),
        max_num_waiting=20,
        enable_prefix_caching=caching,
    )
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    prompts: dict[str, list[int]] = {}
    wanted: dict[str, int] = {}
    answers: defaultdict[str, list[int]] = defaultdict(list)
    reasons: dict[str, FinishReason] = {}
    aborted: set[str] = set()
    for step in range(4000):
        if len(prompts) < 200 and rng.random() < 0.5:
            name, prompt, count = f"r{len(prompts)}", random_prompt(rng, stems, 60), rng.randrange(0, 30)
            try:
                sampling = SamplingParams(max_tokens=count)
                engine.add_request(Request(name, prompt, sampling, priority=rng.randrange(3)))
            except OverloadedError:
                pass
            else:
                prompts[name], wanted[name] = prompt, count
        if prompts and rng.random() < 0.03:
            name = rng.choice(list(prompts))
            if name not in reasons:
                engine.abort(name)
                aborted.add(name)
        if rng.random() < 0.01:
            engine.clear_cache()
        for output in engine.step().outputs:
            assert output.request_id not in aborted
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
        if step % 50 == 0:
            engine.check_integrity()
        if len(prompts) == 200 and not engine.has_unfinished():
            break
    assert not engine.has_work()
    assert set(reasons) | aborted == set(prompts)
    for name, reason in reasons.items():
        assert reason is FinishReason.LENGTH
        count = min(wanted[name], engine.max_model_len - len(prompts[name]))
        assert answers[name] == mock_generate(prompts[name], count, vocab_size=VOCAB_SIZE, eos_token_ids=EOS), name
    engine.check_integrity()
    assert engine.pool.num_in_use == 0
    assert engine.pool.num_free == engine.pool.num_blocks
    if not caching:
        assert engine.pool.num_cached == 0


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
