"""A request's way through the engine, as a worker drives it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.events import AllBlocksCleared, BlockStored
from kvrelay.core.handoff import RemotePrefillRequest
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.histogram import Histogram
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason, RequestStatus
from kvrelay.core.tier_stats import TierCounts, TierStats
from kvrelay.engine.core import EngineCore
from kvrelay.engine.kv_source import Hit, Loaded
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.stats import EngineTimes
from kvrelay.engine.step import KvLoad, SchedulerOutput, StepOutput
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import ConfigError, EngineDeadError, InvalidInputError, OverloadedError, PromptTooLongError
from kvrelay.executors.mock import MockExecutor, mock_generate

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)
PROMPT = list(range(100, 118))


def reference(prompt: list[int], count: int) -> list[int]:
    return mock_generate(prompt, count, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def drain(engine: EngineCore) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while engine.has_work():
        outputs += engine.step().outputs
    engine.check_integrity()
    return outputs


def tokens_of(outputs: list[TokenOutput], name: str = "a") -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


# -- limits and stops -------------------------------------------------------------------------------------------------


def test_a_request_from_arrival_to_end(make_engine: MakeEngine) -> None:
    clock = ManualClock(5.0)
    engine = make_engine(clock=clock)
    request = Request("a", PROMPT, SamplingParams(max_tokens=3))
    engine.add_request(request)
    clock.advance(1.0)
    outputs = drain(engine)
    assert tokens_of(outputs) == reference(PROMPT, 3)
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert [output.num_cached_tokens for output in outputs] == [0, None, None]
    assert request.times == [
        (RequestStatus.WAITING, 5.0),
        (RequestStatus.RUNNING, 6.0),
        (RequestStatus.FINISHED_LENGTH, 6.0),
    ]
    times = engine.stats().times
    assert (times.queue.count, times.queue.total_s) == (1, 1.0)
    assert (times.prefill.count, times.prefill.total_s, times.handoff.count, times.step.count) == (1, 0.0, 0, 3)


def test_a_decode_step_is_one_observation(make_engine: MakeEngine) -> None:
    """Nothing else of the histograms is in the hot loop, however many sequences there are."""
    observed: list[float] = []

    class Counting(Histogram):
        def observe(self, value_s: float) -> None:
            observed.append(value_s)

    engine = make_engine()
    for name in "abc":
        engine.add_request(Request(name, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    engine.step()
    engine.scheduler.times = EngineTimes(*(Counting() for _ in range(4)))
    for _ in range(10):
        assert len(engine.step().outputs) == 3
    assert len(observed) == 10
    drain(engine)
    assert not engine.has_unfinished()


def test_outputs_say_where_their_tokens_stand(make_engine: MakeEngine) -> None:
    """Those of a request that was begun elsewhere go on counting; preemption and stop tokens change nothing."""
    engine = make_engine(num_blocks=13)
    answer = reference(PROMPT, 12)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=12)))
    engine.add_request(Request("b", PROMPT, SamplingParams(max_tokens=12), output_token_ids=answer[:5]))
    engine.add_request(Request("c", PROMPT[::-1], SamplingParams(max_tokens=30)))
    engine.add_request(Request("end", PROMPT, SamplingParams(max_tokens=5), output_token_ids=answer[:5]))
    outputs = drain(engine)
    assert engine.scheduler.num_preemptions > 0
    positions = {name: [out.position for out in outputs if out.request_id == name] for name in ("a", "b", "c", "end")}
    assert positions == {"a": [*range(12)], "b": [*range(5, 12)], "c": [*range(30)], "end": [5]}


def test_stop_tokens_end_the_answer_and_are_named(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = reference(PROMPT, 10)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=10, stop_token_ids=(answer[3],))))
    outputs = drain(engine)
    assert tokens_of(outputs) == answer[:4]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == (FinishReason.STOP, answer[3])


def test_stop_tokens_wait_for_min_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = reference(PROMPT, 10)
    sampling = SamplingParams(max_tokens=10, min_tokens=5, stop_token_ids=(answer[3], answer[6]))
    engine.add_request(Request("a", PROMPT, sampling))
    assert tokens_of(drain(engine)) == answer[:7]


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 3), (True, 10)])
def test_the_models_end_of_sequence(ignore_eos: bool, length: int) -> None:
    answer = reference(PROMPT, 10)

    config = EngineConfig(num_blocks=64, block_size=4)
    executor = MockExecutor(config, MockConfig(speedup_ratio=0), vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    engine = EngineCore(executor, config, ManualClock(), worker_id="w")
    executor.eos_token_ids = (answer[2],)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=10, ignore_eos=ignore_eos)))
    executor.eos_token_ids = EOS  # the mock never samples its own
    outputs = drain(engine)
    assert tokens_of(outputs) == answer[:length]
    assert outputs[-1].finish_reason is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)
    assert outputs[-1].stop_token is None, "the client did not ask for it"


def test_max_tokens_zero_scores_the_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    (output,) = drain(engine)
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_prompt_logprobs_need_every_position(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=1)))
    drain(engine)
    assert engine.num_cached_tokens(Request("?", PROMPT, SamplingParams())) == 16
    engine.add_request(Request("b", PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    (output,) = drain(engine)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_only_equal_cache_salts_share_a_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answers = []
    for number, (salt, hit) in enumerate([("a", 0), ("a", 16), ("b", 0), (None, 0), (None, 16), ("b", 16)]):
        assert engine.num_cached_tokens(Request("?", PROMPT, SamplingParams(cache_salt=salt))) == hit
        engine.add_request(Request(f"r{number}", PROMPT, SamplingParams(max_tokens=3, cache_salt=salt)))
        outputs = drain(engine)
        assert outputs[0].num_cached_tokens == hit
        answers.append(tokens_of(outputs, f"r{number}"))
    assert answers == [reference(PROMPT, 3)] * 6
    engine.check_integrity()


def test_the_context_ends_the_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=24)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=100)))
    outputs = drain(engine)
    assert tokens_of(outputs) == reference(PROMPT, 6)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_the_pool_is_a_limit_as_well(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(num_blocks=6)
    assert (engine.max_model_len, EngineThread(engine).facts.max_model_len) == (24, 24)
    assert "max_model_len is 24 instead of the model's 4096" in caplog.text
    with pytest.raises(ConfigError, match="max_model_len 25 is more than the 24 tokens that the KV pool holds"):
        make_engine(num_blocks=6, max_model_len=25)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=100)))
    assert tokens_of(drain(engine)) == reference(PROMPT, 6)


def test_a_continued_request_counts_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = reference(PROMPT, 8)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=8), output_token_ids=answer[:5]))
    assert tokens_of(drain(engine)) == answer[5:]
    engine.add_request(Request("b", PROMPT, SamplingParams(max_tokens=8), output_token_ids=answer))
    (output,) = drain(engine)
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)


def test_fully_cached_prompts_compute_their_last_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = PROMPT[:16]
    for name, hit in (("a", 0), ("b", 12)):
        engine.add_request(Request(name, prompt, SamplingParams(max_tokens=4)))
        outputs = drain(engine)
        assert outputs[0].num_cached_tokens == hit
        assert tokens_of(outputs, name) == reference(prompt, 4)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request("a", [], SamplingParams()), InvalidInputError),
        (Request("a", [VOCAB_SIZE], SamplingParams()), InvalidInputError),
        (Request("a", [-1], SamplingParams()), InvalidInputError),
        (Request("a", [1], SamplingParams(temperature=-1.0)), InvalidInputError),
        (Request("a", [1] * 256, SamplingParams()), PromptTooLongError),
        (Request("a", PROMPT, SamplingParams(), mode=PrefillMode.HANDOFF, num_load_tokens=5), InvalidInputError),
        (Request("a", PROMPT, SamplingParams(max_tokens=0), mode=PrefillMode.HANDOFF), InvalidInputError),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    make_engine: MakeEngine, request_: Request, error: type[Exception]
) -> None:
    engine = make_engine()
    with pytest.raises(error):
        engine.add_request(request_)
    assert engine.num_requests == 0
    assert not engine.has_work()


def test_the_longest_prompts_that_fit_are_taken(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.add_request(Request("a", [1] * 255, SamplingParams()))
    assert len(tokens_of(drain(engine))) == 1
    engine.add_request(Request("b", [1] * 256, SamplingParams(max_tokens=0)))
    (output,) = drain(engine)
    assert output.finish_reason is FinishReason.LENGTH


def test_ids_are_unique_while_they_run(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=1)))
    with pytest.raises(InvalidInputError, match="running already"):
        engine.add_request(Request("a", PROMPT, SamplingParams()))
    drain(engine)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=1)))


def test_a_full_waiting_line_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_waiting=2, max_num_seqs=3)
    for index in range(5):
        engine.add_request(Request(f"r{index}", PROMPT, SamplingParams(max_tokens=2)))
    with pytest.raises(OverloadedError) as caught:
        engine.add_request(Request("more", PROMPT, SamplingParams()))
    assert caught.value.status == 429
    assert len({output.request_id for output in drain(engine)}) == 5


def test_seeds_are_drawn_at_arrival_and_given_ones_kept(make_engine: MakeEngine) -> None:
    drawn = []
    for _ in range(2):
        engine = make_engine()
        requests = [Request(name, PROMPT, SamplingParams(seed=seed)) for name, seed in (("a", None), ("b", -1))]
        for request in requests:
            engine.add_request(request)
        drawn.append([request.seed for request in requests])
    assert drawn[0] == drawn[1]
    assert drawn[0][1] == 2**64 - 1


# -- abort and failure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_at_any_moment_frees_everything(make_engine: MakeEngine, num_steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    request = Request("a", PROMPT, SamplingParams(max_tokens=10))
    engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert drain(engine) == []
    assert engine.pool.num_in_use == 0
    assert not engine.has_unfinished()


def test_a_failing_executor_fails_every_request_then_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    for index in range(4):
        engine.add_request(Request(f"r{index}", PROMPT, SamplingParams(max_tokens=10)))
    engine.step()

    def execute(work: SchedulerOutput) -> None:
        raise RuntimeError("device lost")

    engine.executor.execute = execute  # type: ignore[assignment, method-assign]
    outputs = engine.step().outputs
    assert {output.request_id for output in outputs} == {"r0", "r1", "r2", "r3"}
    assert all(output.finish_reason is FinishReason.ERROR for output in outputs)
    assert all("device lost" in (output.error or "") for output in outputs)
    assert engine.has_work()
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request(Request("late", PROMPT, SamplingParams()))
    engine.check_integrity()
    assert engine.pool.num_in_use == 0


def test_an_executor_that_ends_while_there_is_nothing_to_do_is_noticed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.step()
    assert not engine.has_work()

    def check() -> None:
        raise EngineDeadError("rank 1 was killed")

    engine.executor.check = check  # type: ignore[method-assign]
    engine.step()
    assert engine.has_work()
    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        engine.step()


# -- what can be seen -------------------------------------------------------------------------------------------------


def test_metrics_before_during_and_after(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    first = engine.metrics()
    assert (first.num_admitted, first.num_slots, first.num_blocks) == (0, 1, 64)
    assert (first.num_blocks_in_use, first.cache_usage, first.num_waiting) == (0, 0.0, 0)
    for name in ("a", "b"):
        engine.add_request(Request(name, PROMPT[:16], SamplingParams(max_tokens=3)))
    engine.step()
    during = engine.metrics()
    assert (during.num_admitted, during.num_waiting, during.num_blocks_in_use) == (1, 1, 4)
    drain(engine)
    after = engine.metrics()
    assert (after.num_blocks_in_use, after.num_admitted) == (0, 0)
    assert after.prefix_hit_rate == 12 / 32


def test_events_come_with_the_step_that_made_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=4)))
    (stored,) = engine.step().kv_events
    assert isinstance(stored, BlockStored)
    hashes = compute_sequence_hashes([*PROMPT, *reference(PROMPT, 2)], 4)
    assert stored.block_hashes == hashes[:4]
    later = [event for _ in range(3) for event in engine.step().kv_events]
    (decoded,) = later
    assert isinstance(decoded, BlockStored)
    assert (decoded.parent_hash, decoded.block_hashes) == (hashes[3], hashes[4:])
    engine.clear_cache()
    assert engine.has_work()
    assert engine.drain_events() == [AllBlocksCleared()]
    assert engine.num_cached_tokens(Request("?", PROMPT, SamplingParams())) == 0


def test_repr_gives_the_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = Request("a", PROMPT, SamplingParams(max_tokens=4))
    engine.add_request(request)
    engine.step()
    assert "0 waiting, 1 running (1 decoding)" in repr(engine)
    assert repr(request) == "Request(a, local, RUNNING, 18+1 tokens, 18 computed, 5 blocks)"


# -- the decode side --------------------------------------------------------------------------------------------------


def start_remote(engine: EngineCore, prompt: list[int] = PROMPT, max_tokens: int = 5) -> RemotePrefillRequest:
    engine.add_request(Request("a", prompt, SamplingParams(max_tokens=max_tokens), mode=PrefillMode.REMOTE))
    (start,) = engine.step().remote_prefills
    return start


def fill(engine: EngineCore, tokens: list[int], block_ids: tuple[int, ...]) -> int:
    """Write the KV of ``tokens`` as a prefill worker would; returns the first token."""
    assert isinstance(engine.executor, MockExecutor)
    config = EngineConfig(num_blocks=64, block_size=4)
    other = MockExecutor(config, MockConfig(speedup_ratio=0), vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    prefill = EngineCore(other, config, ManualClock(), worker_id="p")
    prefill.add_request(Request("x", tokens, SamplingParams(), mode=PrefillMode.HANDOFF))
    (chunk,) = prefill.step().handoff_chunks
    assert chunk.token_id is not None
    engine.executor.pool[list(block_ids)] = other.pool[list(chunk.block_ids)]
    return chunk.token_id


def finish_remote(engine: EngineCore, start: RemotePrefillRequest, loan: int = 1) -> bool:
    """As the ledger does when everything has arrived in the blocks of ``loan``."""
    lent = engine.loans.find(start.handoff_id, loan)
    assert lent is not None
    token = fill(engine, list(start.token_ids), lent.block_ids)
    is_resumed = engine.resume_handoff(start.handoff_id, loan, token, None)
    engine.end_loan(start.handoff_id, loan)
    return is_resumed


def test_what_need_not_wait_for_the_forward_pass_is_announced_before_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    start = start_remote(engine)
    finish_remote(engine, start)
    engine.add_request(Request("b", PROMPT[::-1], SamplingParams(max_tokens=5), mode=PrefillMode.REMOTE))
    announced: list[StepOutput] = []
    after = engine.step(announce=announced.append)
    (before,) = announced
    first, second = reference(PROMPT, 2)
    assert tokens_of(before.outputs) == [first]
    assert [prefill.request_id for prefill in before.remote_prefills] == ["b"]
    assert tokens_of(after.outputs) == [second]
    assert not after.remote_prefills

    announced.clear()
    assert engine.step(announce=announced.append).outputs
    assert not announced


def test_a_remote_prefill_joins_with_its_first_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    start = start_remote(engine)
    assert (start.token_ids, start.num_cached_tokens, len(start.block_ids)) == (tuple(PROMPT), 0, 5)
    assert not engine.has_work()
    assert engine.pool.num_quarantined == 5
    assert finish_remote(engine, start)
    outputs = drain(engine)
    assert tokens_of(outputs) == reference(PROMPT, 5)
    assert outputs[0].num_cached_tokens == 0
    assert engine.num_cached_tokens(Request("?", PROMPT, SamplingParams())) == 16, (
        "transferred blocks join the prefix cache"
    )


def test_a_prompt_that_ends_at_a_block_gets_the_next_block(make_engine: MakeEngine) -> None:
    engine = make_engine()
    start = start_remote(engine, PROMPT[:16])
    assert finish_remote(engine, start)
    assert tokens_of(drain(engine)) == reference(PROMPT[:16], 5)


def test_an_answer_of_one_token_ends_with_the_hand_off(make_engine: MakeEngine) -> None:
    engine = make_engine()
    start = start_remote(engine, max_tokens=1)
    assert finish_remote(engine, start)
    (output,) = drain(engine)
    assert output.finish_reason is FinishReason.LENGTH
    assert engine.pool.num_in_use == 0


def test_prefix_hits_are_named_and_stay_readable(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(Request("before", PROMPT, SamplingParams(max_tokens=1)))
    drain(engine)
    start = start_remote(engine, [*PROMPT, 7, 8, 9])
    assert start.num_cached_tokens == 16
    assert engine.pool.num_quarantined == 2
    engine.abort("a")
    engine.check_integrity()
    assert engine.pool.num_in_use == 4, "the prefill worker may be reading the hit"
    engine.end_loan(start.handoff_id, 1)
    assert engine.pool.num_free == 64


def test_without_prefill_workers_requests_that_wait_for_blocks_are_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8)
    engine.add_request(Request("first", list(range(20)), SamplingParams(max_tokens=4)))
    engine.step()
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=5), mode=PrefillMode.REMOTE))
    assert not engine.step().remote_prefills
    assert engine.scheduler.num_waiting == 1
    engine.keep_prefills_here()
    outputs = drain(engine)
    assert tokens_of([output for output in outputs if output.request_id == "a"]) == reference(PROMPT, 5)
    assert len(engine.loans) == 0


def test_what_is_lent_is_not_free_when_its_request_ends(make_engine: MakeEngine) -> None:
    engine = make_engine()
    start = start_remote(engine)
    engine.abort("a")
    assert engine.step().closed_handoffs == [start.handoff_id]
    assert engine.pool.num_quarantined == 5
    assert engine.has_unfinished()
    assert not engine.resume_handoff(start.handoff_id, 1, 7, None)
    engine.compute_handoff_here(start.handoff_id)
    engine.end_loan(start.handoff_id, 1)
    assert engine.pool.num_free == 64
    assert drain(engine) == []


@pytest.mark.parametrize("by", ["loss", "token"])
def test_whatever_is_lost_is_computed_here(make_engine: MakeEngine, by: str) -> None:
    engine = make_engine()
    start = start_remote(engine)
    if by == "loss":
        engine.compute_handoff_here(start.handoff_id)
    else:
        assert not engine.resume_handoff(start.handoff_id, 1, VOCAB_SIZE, None)
    # The writer is not known to have stopped, and writes what it likes.
    assert engine.pool.num_quarantined == 5
    assert isinstance(engine.executor, MockExecutor)
    engine.executor.pool[list(start.block_ids)] = 0
    assert tokens_of(drain(engine)) == reference(PROMPT, 5)
    engine.end_loan(start.handoff_id, 1)
    assert engine.pool.num_free == 64


def test_a_second_claimant_computes_into_other_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    start = start_remote(engine)
    fresh = engine.lend_fresh(start.handoff_id, 2)
    assert fresh is not None
    assert not set(start.block_ids) & set(fresh)
    engine.check_integrity()
    assert isinstance(engine.executor, MockExecutor)
    assert finish_remote(engine, start, loan=2)
    engine.executor.pool[list(start.block_ids)] = 0
    assert tokens_of(drain(engine)) == reference(PROMPT, 5)
    engine.check_integrity()
    engine.end_loan(start.handoff_id, 1)
    assert engine.pool.num_free == 64


def test_the_first_blocks_serve_if_the_second_claimant_leaves(make_engine: MakeEngine) -> None:
    engine = make_engine()
    start = start_remote(engine)
    engine.lend_fresh(start.handoff_id, 2)
    engine.end_loan(start.handoff_id, 2)
    assert finish_remote(engine, start)
    assert tokens_of(drain(engine)) == reference(PROMPT, 5)
    assert engine.pool.num_free == 64


def test_there_are_no_other_blocks_without_room_or_without_need(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8)
    start = start_remote(engine)
    assert engine.lend_fresh(start.handoff_id, 2) is None
    engine.abort("a")
    assert engine.lend_fresh(start.handoff_id, 2) is None
    engine.end_loan(start.handoff_id, 1)
    assert engine.pool.num_free == 8


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=0), SamplingParams(max_tokens=2, prompt_logprobs=0)])
def test_what_needs_the_prompts_logits_is_computed_here(make_engine: MakeEngine, sampling: SamplingParams) -> None:
    engine = make_engine()
    engine.add_request(Request("a", PROMPT, sampling, mode=PrefillMode.REMOTE))
    assert drain(engine)[-1].finish_reason is FinishReason.LENGTH


# -- the prefill side -------------------------------------------------------------------------------------------------


def hand_off(engine: EngineCore, num_load_tokens: int = 0, prompt: list[int] = PROMPT) -> StepOutput:
    engine.add_request(
        Request("h", prompt, SamplingParams(), mode=PrefillMode.HANDOFF, num_load_tokens=num_load_tokens)
    )
    return engine.step()


def test_chunks_leave_as_their_blocks_fill(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=18, exclusive_prefill=True)
    prompt = list(range(100, 145))
    chunks = [*hand_off(engine, prompt=prompt).handoff_chunks]
    while engine.has_work():
        chunks += engine.step().handoff_chunks
    assert [(chunk.first_block, len(chunk.block_ids), chunk.last) for chunk in chunks] == [
        (0, 4, False),
        (4, 5, False),
        (9, 3, True),
    ]
    assert [chunk.token_id for chunk in chunks] == [None, None, *reference(prompt, 1)]
    assert engine.pool.num_in_use == 12, "they are being sent"
    assert engine.has_unfinished()
    engine.sending_finished("h")
    assert engine.pool.num_free == 64
    assert engine.num_cached_tokens(Request("?", prompt, SamplingParams())) == 44
    engine.check_integrity()


def test_what_we_have_cached_is_sent_before_anything_is_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    hand_off(engine)
    drain(engine)
    engine.sending_finished("h")
    chunks = hand_off(engine).handoff_chunks
    assert [(chunk.first_block, len(chunk.block_ids), chunk.last) for chunk in chunks] == [(0, 4, False), (4, 1, True)]


def test_blocks_that_the_decode_worker_holds_are_read_not_computed(make_engine: MakeEngine) -> None:
    source, engine = make_engine(), make_engine()
    source.add_request(Request("a", PROMPT, SamplingParams(max_tokens=1)))
    drain(source)
    step = hand_off(engine, num_load_tokens=16)
    (load,) = step.kv_loads
    assert (load.first_block, len(load.block_ids)) == (0, 4)
    assert not engine.has_work()
    assert isinstance(engine.executor, MockExecutor)
    assert isinstance(source.executor, MockExecutor)
    engine.executor.pool[list(load.block_ids)] = source.executor.pool[:4]
    engine.kv_loaded("h", True)
    step = engine.step()
    assert engine.stats().tokens.num_prefilled == 2
    (chunk,) = step.handoff_chunks
    assert (chunk.first_block, len(chunk.block_ids), chunk.token_id) == (4, 1, reference(PROMPT, 1)[0])
    assert engine.num_cached_tokens(Request("?", PROMPT, SamplingParams())) == 16


def test_a_failed_read_is_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    hand_off(engine, num_load_tokens=16)
    engine.kv_loaded("h", False)
    step = engine.step()
    assert engine.stats().tokens.num_prefilled == 18
    (chunk,) = step.handoff_chunks
    assert (chunk.first_block, len(chunk.block_ids), chunk.token_id) == (4, 1, reference(PROMPT, 1)[0])


class Part:
    """A source with some blocks of ``PROMPT``. A test says when its loads end."""

    def __init__(self, first: int, end: int, *, is_pending: bool = False) -> None:
        self.pending: list[int] = []
        self.loads: list[KvLoad] = []
        self._first, self._end, self._is_pending = first, end, is_pending

    def start(self, loaded: Loaded, changed: Callable[[], None] = lambda: None) -> None: ...

    def stats(self) -> TierStats:
        return TierStats(TierCounts(), {}, 0)

    def find(self, request: Request, first_block: int) -> Hit | None:
        is_here = self._first <= first_block < self._end
        return Hit(self._end - first_block, 0.1, is_pending=self._is_pending) if is_here else None

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        self.loads.append(load)

    def arrives(self, engine: EngineCore, sender: EngineCore) -> None:
        (load,) = self.loads
        assert isinstance(engine.executor, MockExecutor)
        assert isinstance(sender.executor, MockExecutor)
        end = load.first_block + len(load.block_ids)
        engine.executor.pool[list(load.block_ids)] = sender.executor.pool[load.first_block : end]
        engine.kv_loaded("a", True)


@pytest.mark.parametrize(("is_pending", "num_prefilled"), [(False, 2), (True, 10)])
def test_what_one_source_lacks_the_next_one_loads_and_what_is_pending_then_is_computed(
    make_engine: MakeEngine, is_pending: bool, num_prefilled: int
) -> None:
    sender, engine = make_engine(), make_engine()
    sender.add_request(Request("a", PROMPT, SamplingParams(max_tokens=1)))
    drain(sender)
    first, second = Part(0, 2), Part(2, 4, is_pending=is_pending)
    engine.add_source(first)
    engine.add_source(second)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=3)))
    engine.step()
    first.arrives(engine, sender)
    if not is_pending:
        second.arrives(engine, sender)
    assert engine.scheduler.num_admitted == 1
    assert tokens_of(drain(engine)) == reference(PROMPT, 3)
    assert engine.stats().tokens.num_prefilled == num_prefilled
    assert (len(first.loads), len(second.loads)) == (1, int(not is_pending))
    assert engine.scheduler.num_admitted == 0


def test_prompt_logprobs_load_nothing(make_engine: MakeEngine) -> None:
    engine, source = make_engine(), Part(0, 4)
    engine.add_source(source)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    (output,) = drain(engine)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert not source.loads


def test_our_own_hits_are_not_read(make_engine: MakeEngine) -> None:
    engine = make_engine()
    hand_off(engine)
    engine.sending_finished("h")
    step = hand_off(engine, num_load_tokens=8)
    assert not step.kv_loads
    assert [(chunk.first_block, len(chunk.block_ids)) for chunk in step.handoff_chunks] == [(2, 2), (4, 1)]


def test_an_aborted_read_keeps_its_blocks_until_it_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    hand_off(engine, num_load_tokens=16)
    engine.abort("h")
    engine.abort("h")
    assert engine.pool.num_in_use == 5, "the read still lands there"
    assert not engine.has_work()
    engine.kv_loaded("h", True)
    assert engine.pool.num_free == 64
    assert engine.num_cached_tokens(Request("?", PROMPT, SamplingParams())) == 0
    engine.sending_finished("h")
    engine.check_integrity()


@pytest.mark.parametrize("num_more_steps", [0, 1])
def test_an_aborted_send_keeps_its_blocks_until_it_has_ended(make_engine: MakeEngine, num_more_steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    hand_off(engine)
    for _ in range(num_more_steps):
        engine.step()
    engine.abort("h")
    assert engine.pool.num_in_use == 5, "the writes still read from there"
    assert not engine.has_work()
    engine.kv_loaded("h", True)
    assert engine.num_requests == 1
    engine.sending_finished("h")
    assert engine.pool.num_free == 64
    assert engine.num_requests == 0


def test_before_anything_was_sent_an_abort_frees_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(Request("h", PROMPT, SamplingParams(), mode=PrefillMode.HANDOFF))
    engine.abort("h")
    assert engine.pool.num_free == 64
    assert not engine.has_unfinished()


def test_an_early_end_of_sending_is_an_abort(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    hand_off(engine)
    engine.sending_finished("h")
    assert engine.pool.num_free == 64
    assert not engine.has_work()


def test_exclusive_prefill_can_be_switched(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.set_exclusive_prefill(True)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=2)))
    step = hand_off(engine)
    assert engine.stats().tokens.num_prefilled == len(PROMPT)
    assert len(step.handoff_chunks) == 1
    assert not step.outputs
    assert tokens_of(drain(engine)) == reference(PROMPT, 2)
