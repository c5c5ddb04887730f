"""What every Executor does, whatever computes. Add a builder to EXECUTORS to hold another one to it."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
from tests.executors.constrained import be_late
from tests.executors.harness import Harness, random_prompts

from kvrelay.config import EngineConfig, MockConfig, RunnerConfig, WorkerConfig
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.step import Executor, SchedulerOutput
from kvrelay.engines.registry import build_executor
from kvrelay.errors import InvalidInputError
from kvrelay.executors.grammars import Walk
from kvrelay.frontend.tokens.tokenizer import load_tokenizer

ENGINE = EngineConfig(num_blocks=96, max_model_len=256, max_num_seqs=8, block_size=16)
LENGTHS = (1, 15, 16, 17, 40, 64)


def _builder(name: str, tp: int = 1, pp: int = 1) -> Callable[[], Executor]:
    runner = RunnerConfig(dtype="float32", device="cpu", num_threads=1, tp=tp, pp=pp, rank_timeout_s=60.0)
    return lambda: build_executor(
        name,
        WorkerConfig(
            model_path=bundled_checkpoint_path(), engine=ENGINE, runner=runner, mock=MockConfig(speedup_ratio=0.0)
        ),
    )


EXECUTORS = {"mock": _builder("mock"), "torch": _builder("torch"), "torch-tp2": _builder("torch", tp=2)}


@pytest.fixture(scope="module", params=EXECUTORS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Executor, Executor]]:
    """Two executors of one model in one process, as a prefill and a decode worker of one machine would have them."""
    made = (EXECUTORS[request.param](), EXECUTORS[request.param]())
    for executor in made:
        executor.warm_up()
    yield made
    for executor in made:
        executor.shutdown()
        executor.shutdown()


@pytest.fixture
def executor(pair: tuple[Executor, Executor]) -> Executor:
    return pair[0]


def prompts(executor: Executor) -> list[list[int]]:
    return random_prompts(LENGTHS, executor.vocab_size - 8, 3)


def answers(executor: Executor, seed: int, chunk: int) -> list[list[int]]:
    harness = Harness(executor, seed)
    return harness.run_to_end([harness.add(slot, prompt) for slot, prompt in enumerate(prompts(executor))], 6, chunk)


def memory(executor: Executor) -> np.ndarray:
    """The bytes of pool and holding area, [block, block_bytes], as a transport sees them."""
    region = executor.kv_region
    raw = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
    return np.frombuffer(raw, dtype=np.uint8).reshape(executor.num_blocks + executor.num_holding_blocks, -1)


def test_the_pool_is_what_the_layout_says(executor: Executor) -> None:
    layout = executor.kv_layout
    assert (executor.num_blocks, layout.block_size) == (96, 16)
    assert executor.kv_region.num_bytes >= 96 * layout.block_bytes
    assert executor.kv_region.address
    assert executor.max_model_len == 256
    assert all(0 <= token < executor.vocab_size for token in executor.eos_token_ids)
    assert executor.weights_fingerprint


def test_equal_checkpoints_have_equal_fingerprints(pair: tuple[Executor, Executor]) -> None:
    assert pair[0].weights_fingerprint == pair[1].weights_fingerprint
    assert pair[0].kv_layout == pair[1].kv_layout


def test_answers_depend_on_neither_blocks_nor_chunks_nor_company(executor: Executor) -> None:
    whole = answers(executor, seed=1, chunk=10_000)
    assert all(0 <= token < executor.vocab_size for tokens in whole for token in tokens)
    assert answers(executor, seed=2, chunk=7) == whole
    alone = Harness(executor, 3)
    assert [alone.run_to_end([alone.add(5, prompt)], 6)[0] for prompt in prompts(executor)] == whole


def test_a_reused_slot_remembers_nothing(executor: Executor) -> None:
    first, second = random_prompts((33, 20), executor.vocab_size - 8, 9)
    fresh = Harness(executor, 1)
    expected = fresh.run_to_end([fresh.add(7, second)], 5)
    harness = Harness(executor, 2)
    harness.run_to_end([harness.add(0, first)], 5)
    assert harness.run_to_end([harness.add(0, second)], 5) == expected


def test_a_step_without_rows_releases_and_computes_nothing(executor: Executor) -> None:
    empty = np.empty(0, dtype=np.int32)
    work = SchedulerOutput(1, (), (0, 1), empty, empty, np.empty(0, dtype=np.bool_), empty, empty, empty)
    assert executor.execute(work).token_ids == []


@pytest.mark.parametrize("length", [16, 40, 63])
def test_kv_that_was_copied_block_by_block_goes_on_elsewhere(pair: tuple[Executor, Executor], length: int) -> None:
    """The hand-off in the small: prefill here, copy the blocks, decode there."""
    prefill, decode = pair
    (prompt,) = random_prompts((length,), prefill.vocab_size - 8, length)
    here, there = Harness(prefill, 4), Harness(decode, 5)
    first = here.add(0, prompt)
    expected = here.run_to_end([first], 6)[0]
    num_blocks = -(-length // 16)
    blocks = list(range(40, 40 + num_blocks))
    memory(decode)[blocks] = memory(prefill)[first.blocks[:num_blocks]]
    assert decode.checksum_blocks(blocks[: length // 16]) == prefill.checksum_blocks(first.blocks[: length // 16])
    second = there.add(0, [*prompt, expected[0]], computed=length, blocks=blocks, num_prompt=length)
    assert there.run_to_end([second], 5)[0] == expected[1:]


@pytest.mark.parametrize("length", [16, 40])
def test_kv_that_was_in_the_holding_area_goes_on(executor: Executor, length: int) -> None:
    (prompt,) = random_prompts((length,), executor.vocab_size - 8, length)
    harness = Harness(executor, 6)
    first = harness.add(0, prompt)
    expected = harness.run_to_end([first], 6)[0]
    num_blocks = -(-length // 16)
    held, blocks = [96 + number for number in range(num_blocks)], list(range(50, 50 + num_blocks))
    executor.copy_blocks(first.blocks[:num_blocks], held)
    assert executor.checksum_blocks(held) == executor.checksum_blocks(first.blocks[:num_blocks])
    memory(executor)[:96] = 0
    executor.copy_blocks(held, blocks)
    second = harness.add(0, [*prompt, expected[0]], computed=length, blocks=blocks, num_prompt=length)
    assert harness.run_to_end([second], 5)[0] == expected[1:]


def test_a_checksum_sees_every_byte_of_its_block(executor: Executor) -> None:
    bytes_of = memory(executor)
    before = executor.checksum_blocks([3, 4])
    kept = bytes_of[3, -1].copy()
    bytes_of[3, -1] ^= 1
    changed = executor.checksum_blocks([3, 4])
    bytes_of[3, -1] = kept
    assert changed[0] != before[0]
    assert changed[1] == before[1]
    assert executor.checksum_blocks([4, 3]) == before[::-1]


def test_logprobs_come_for_those_who_asked(executor: Executor) -> None:
    one, other = random_prompts((20, 20), executor.vocab_size - 8, 6)
    harness = Harness(executor, 6)
    asking = harness.add(0, one, sampling=SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0))
    silent = harness.add(1, other)
    harness.run_to_end([asking, silent], 3, 8)
    assert [entry.chosen.token_id for entry in asking.logprobs] == asking.outputs
    assert all(len(entry.top) == 2 for entry in asking.logprobs)
    assert [entry.chosen.token_id for entry in asking.prompt_logprobs] == one[1:]
    assert silent.logprobs == silent.prompt_logprobs == []


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
CONSTRAINED = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA))
TOKENIZER = load_tokenizer(bundled_checkpoint_path())


def constrained_answer(executor: Executor, sampling: SamplingParams, prefix: Sequence[int] = ()) -> list[int]:
    """Token by token until the end of sequence; ``prefix`` was generated elsewhere."""
    (prompt,) = random_prompts((20,), executor.vocab_size - 8, 11)
    harness = Harness(executor, 7)
    free = harness.add(1, prompt)
    sequence = harness.add(0, [*prompt, *prefix], sampling=sampling, num_prompt=len(prompt))
    free_tokens: list[int] = []
    while len(sequence.outputs) < 60 and not set(sequence.outputs) & set(executor.eos_token_ids):
        decodes = [(each, 1) for each in (free, sequence) if len(each.tokens) - each.computed == 1]
        chunks = [(each, len(each.tokens) - each.computed) for each in (free, sequence) if (each, 1) not in decodes]
        assert harness.step(*decodes, *chunks).failures == {}
        free_tokens = free.outputs
    harness.release(sequence)
    harness.release(free)
    alone = Harness(executor, 8)
    assert alone.run_to_end([alone.add(2, prompt)], len(free_tokens))[0] == free_tokens, "its neighbour is not bound"
    return [*prefix, *sequence.outputs]


def test_an_answer_obeys_its_grammar_and_ends(executor: Executor) -> None:
    executor.prepare(CONSTRAINED)
    tokens = constrained_answer(executor, CONSTRAINED)
    assert tokens[-1] in executor.eos_token_ids
    answer = json.loads(TOKENIZER.decode(tokens[:-1]))
    assert set(answer) == {"name", "age"}
    assert isinstance(answer["age"], int)


def test_a_constrained_answer_goes_on_elsewhere_with_its_tokens_alone(pair: tuple[Executor, Executor]) -> None:
    tokens = constrained_answer(pair[0], CONSTRAINED)
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        assert constrained_answer(pair[1], CONSTRAINED, tokens[:cut])[: len(tokens)] == tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_a_row_whose_mask_is_late_gets_the_same_tokens_later(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """(The masks of ranks are computed in other processes, and not late here.)"""
    sampling = msgspec.structs.replace(CONSTRAINED, logprobs=2, prompt_logprobs=1, temperature=0.7)
    expected = constrained_answer(executor, sampling)
    be_late(monkeypatch, seed)
    assert constrained_answer(executor, sampling) == expected
    cut = len(expected) // 2
    assert constrained_answer(executor, sampling, expected[:cut])[: len(expected)] == expected


@pytest.mark.parametrize("pattern", ["(.|\\n){40}", "[a-e ]{40}"])
def test_a_greedy_answer_is_the_same_without_guesses(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    sampling = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.REGEX, pattern), logprobs=1)
    guessed = constrained_answer(executor, sampling)
    monkeypatch.setattr(Walk, "may_guess", False)
    assert constrained_answer(executor, sampling) == guessed


def test_min_tokens_cannot_keep_a_finished_grammar_open(executor: Executor) -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=15, grammar=Grammar(GrammarKind.REGEX, "yes|no"))
    tokens = constrained_answer(executor, sampling)
    assert TOKENIZER.decode([token for token in tokens if token not in executor.eos_token_ids]) in ("yes", "no")


def test_random_draws_obey_too(executor: Executor) -> None:
    sampling = SamplingParams(temperature=1.5, top_k=5, grammar=Grammar(GrammarKind.REGEX, "[0-9]{3}-[a-f]{2}"))
    text = TOKENIZER.decode(constrained_answer(executor, sampling)[:-1])
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', "Invalid type"),
        (GrammarKind.JSON_SCHEMA, "not json", "json_schema cannot be used"),
        (GrammarKind.REGEX, "a(b", "unclosed group"),
        (GrammarKind.LARK, "start: nowhere", "lark cannot be used"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_and_fails_its_sequence_alone(
    executor: Executor, kind: GrammarKind, source: str, message: str
) -> None:
    sampling = SamplingParams(temperature=0.0, grammar=Grammar(kind, source))
    with pytest.raises(InvalidInputError, match=message):
        executor.prepare(sampling)
    harness = Harness(executor, 9)
    good, bad = harness.add(0, [5, 6, 7]), harness.add(1, [5, 6, 7], sampling=sampling)
    result = harness.step((good, 3), (bad, 3))
    harness.release(good)
    harness.release(bad)
    assert list(result.failures) == [1]


def test_a_grammar_that_explodes_on_its_way_fails_its_sequence_alone(executor: Executor) -> None:
    sampling = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "a{150000}"))  # compiled in 0.3 s
    executor.prepare(sampling)
    harness = Harness(executor, 10)
    good, bad = harness.add(0, [5, 6, 7]), harness.add(1, [5, 6, 7], sampling=sampling)
    result = harness.step((good, 3), (bad, 3))
    failures = result.failures
    while not failures and len(bad.outputs) < 5:
        # Beside another row it may sit out; alone it is waited for.
        failures = harness.step((bad, 1)).failures
    (failure,) = failures.values()
    assert "the grammar failed" in failure
    assert good.outputs
    harness.release(good)
    harness.release(bad)
