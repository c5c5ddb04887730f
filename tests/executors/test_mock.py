from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np
import pytest

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.core.checksums import block_checksum
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.errors import ConfigError
from kvrelay.executors.mock import MockExecutor, mock_generate

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)
PROMPT = list(range(100, 130))


def run(engine: EngineCore, *requests: Request) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step().outputs:
            answers[output.request_id] += output.token_ids
    return answers


def test_the_answer_is_the_reference_and_depends_on_every_token(make_engine: MakeEngine) -> None:
    answers = run(make_engine(), Request("a", PROMPT, SamplingParams(max_tokens=20)))
    expected = mock_generate(PROMPT, 20, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    assert answers["a"] == expected
    assert 2 not in expected
    for position in (0, 15, 29):
        other = [*PROMPT]
        other[position] += 1
        assert mock_generate(other, 20, vocab_size=VOCAB_SIZE, eos_token_ids=EOS) != expected


@pytest.mark.parametrize("length", [1, 1020, 1024, 2100])
def test_hashes_of_a_prompt_at_once_are_those_one_by_one(length: int) -> None:
    """The answer goes on one by one, with Python's integers."""
    prompt = [7 * at % 500 for at in range(length)]
    answer = mock_generate(prompt, 8, vocab_size=VOCAB_SIZE)
    assert mock_generate([*prompt, *answer[:7]], 1, vocab_size=VOCAB_SIZE) == answer[7:]


def test_end_of_sequence_tokens_never_occur() -> None:
    for first in range(20):
        answer = mock_generate([first], 200, vocab_size=5, eos_token_ids=(3, 0))
        assert set(answer) == {1, 2, 4}


@pytest.mark.parametrize(("kind", "position"), [(0, 0), (1, 3), (1, 2), (0, 1)])
def test_one_damaged_value_in_a_cached_block_gives_a_wrong_answer(
    make_engine: MakeEngine, kind: int, position: int
) -> None:
    engine = make_engine()
    good = run(engine, Request("a", PROMPT, SamplingParams(max_tokens=5)))["a"]
    assert isinstance(engine.executor, MockExecutor)
    engine.executor.pool[3, kind, position] ^= np.uint32(1)
    assert engine.num_cached_tokens(Request("?", PROMPT, SamplingParams())) == 28
    assert run(engine, Request("b", PROMPT, SamplingParams(max_tokens=5)))["b"] != good


def test_damage_while_decoding_is_noticed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer: list[int] = []
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=40)))
    assert isinstance(engine.executor, MockExecutor)
    while engine.has_work():
        for output in engine.step().outputs:
            answer += output.token_ids
            if len(answer) == 10:
                engine.executor.pool[2, 1, 0] += np.uint32(5)
    expected = mock_generate(PROMPT, 40, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    assert answer[:10] == expected[:10]
    assert answer != expected


def test_the_region_is_the_pool(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run(engine, Request("a", PROMPT, SamplingParams(max_tokens=1)))
    executor = engine.executor
    region, layout = executor.kv_region, executor.kv_layout
    assert region.address % mmap.PAGESIZE == 0
    assert region.num_bytes == executor.num_blocks * layout.block_bytes
    raw = ctypes.string_at(region.address + 2 * layout.block_bytes, layout.block_bytes)
    assert np.frombuffer(raw, dtype=np.uint32)[:4].tolist() == PROMPT[8:12]


def test_time_passes_as_configured() -> None:
    slept: list[float] = []
    config = EngineConfig(num_blocks=64, block_size=4, max_num_batched_tokens=64, max_num_seqs=4)
    times = MockConfig(prefill_base_s=1.0, prefill_token_s=0.5, decode_base_s=10.0, decode_seq_s=2.0, speedup_ratio=2.0)
    executor = MockExecutor(config, times, vocab_size=VOCAB_SIZE, max_model_len=256, sleep=slept.append)

    class Clock:
        def now(self) -> float:
            return sum(slept)

    engine = EngineCore(executor, config, Clock(), worker_id="w")
    request = Request("a", PROMPT, SamplingParams(max_tokens=3))
    run(engine, request)
    assert slept == [(1.0 + 30 * 0.5) / 2, 6.0, 6.0]
    assert [time_s for _, time_s in request.times] == [0.0, 0.0, 20.0]


def test_checksums_cover_a_block_and_nothing_else(make_engine: MakeEngine) -> None:
    executor = make_engine(num_blocks=4).executor
    assert isinstance(executor, MockExecutor)
    executor.pool[...] = np.arange(executor.pool.size).reshape(executor.pool.shape)
    before = executor.checksum_blocks([2, 0, 3])
    expected = [block_checksum(executor.pool[block_id].reshape(-1).view(np.uint8)) for block_id in (2, 0, 3)]
    assert before == tuple(expected)
    executor.pool[1] = 0
    assert executor.checksum_blocks([2, 0, 3]) == before
    for kind, position in ((0, 0), (1, -1)):
        executor.pool[2, kind, position] ^= np.uint32(1 << 31)
        after = executor.checksum_blocks([2, 0, 3])
        assert after[0] != before[0]
        assert after[1:] == before[1:]
        executor.pool[2, kind, position] ^= np.uint32(1 << 31)


def test_logprobs_where_they_were_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    sampling = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=0)
    engine.add_request(Request("a", PROMPT, sampling))
    engine.add_request(Request("b", PROMPT, SamplingParams(max_tokens=2)))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    first, second = [output for output in outputs if output.request_id == "a"]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry.chosen.token_id for entry in first.prompt_logprobs if entry is not None] == PROMPT[1:]
    for output in (first, second):
        assert output.logprobs is not None
        assert output.logprobs[0].chosen.token_id == output.token_ids[0]
        assert len(output.logprobs[0].top) == 2
    assert all(output.logprobs is None for output in outputs if output.request_id == "b")


def test_a_vocabulary_of_nothing_but_ends_is_refused() -> None:
    with pytest.raises(ConfigError):
        MockExecutor(EngineConfig(), MockConfig(), vocab_size=1, eos_token_ids=(0,))


@pytest.mark.parametrize("num_blocks", [2**36, 2**62, 10**30])
def test_a_pool_beyond_the_memory_of_the_host_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks: a KV pool of .*TiB was asked for, and the host has .* left"):
        MockExecutor(EngineConfig(num_blocks=num_blocks), MockConfig(), vocab_size=100)
