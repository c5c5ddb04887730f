from __future__ import annotations

import asyncio
import gc
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.patience import until

from kvrelay import LLM, AsyncLLM, SamplingParams
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import CheckpointError, ConfigError, EngineDeadError, InvalidInputError, PromptTooLongError
from kvrelay.executors.mock import MockExecutor, mock_generate
from kvrelay.llm import embedded
from kvrelay.llm.embedded import embedded_cluster
from kvrelay.worker.reporting.publisher import MIN_INTERVAL_S

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
MOCK = {"engine": "mock", "num_blocks": 256, "max_num_seqs": 8, "max_model_len": 4000, "speedup_ratio": 0.0}
LONG = [20 + number * 7 % 400 for number in range(300)]


def expected(tokens: list[int], count: int) -> tuple[int, ...]:
    config = json.loads((bundled_checkpoint_path() / "config.json").read_text())
    return tuple(mock_generate(tokens, count, vocab_size=config["vocab_size"], eos_token_ids=(config["eos_token_id"],)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**MOCK) as made:
        yield made


@pytest.fixture(scope="module")
def split() -> Iterator[LLM]:
    with LLM(prefill=1, decode=1, max_local_prefill_length=0, **MOCK) as made:
        yield made


def test_the_three_lines_of_the_readme() -> None:
    """The bundled checkpoint, computed for real; the split gives the same answers, from the same process."""
    prompts = ["Once upon a time", "Once upon a time " * 20]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    settings = {"dtype": "float32", "num_blocks": 256, "num_threads": 1}
    with LLM(**settings) as llm:
        whole = llm.generate(prompts, params)
    assert all(len(output.token_ids) == 16 and output.text and output.finish_reason == "length" for output in whole)
    with LLM(prefill=1, decode=1, max_local_prefill_length=32, **settings) as llm:
        split = llm.generate(prompts, params)
        # The answer may be complete before the prefill side has counted its hand-off.
        until(lambda: llm.status()[0]["prefill"]["num_prefills"] == 1)
        assert llm.status()[1]["decode"]["num_remote_done"] == 1
    assert [output.token_ids for output in split] == [output.token_ids for output in whole]


def test_token_ids_in_and_out(llm: LLM) -> None:
    outputs = llm.generate([[5, 6, 7], LONG], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [(5, 6, 7), tuple(LONG)]
    assert [output.token_ids for output in outputs] == [expected([5, 6, 7], 8), expected(LONG, 8)]
    assert outputs[0].prompt is None
    for same in ([5, 6, 7], (5, 6, 7), np.array([5, 6, 7])):
        assert llm.generate(same, GREEDY)[0].token_ids == outputs[0].token_ids


def test_more_prompts_than_an_engine_takes_at_once(split: LLM) -> None:
    prompts = [[number, *LONG[: 40 + number]] for number in range(5, 45)]
    outputs = split.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [expected(prompt, 8) for prompt in prompts]


def test_each_prompt_may_have_its_own_settings(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(max_tokens=3, temperature=0.0, n=2, logprobs=1, detokenize=False)]
    first, second = llm.generate(["one", "two"], params)
    assert len(first.token_ids) == 8
    assert first.text == llm.decode(first.token_ids)
    assert [len(output.token_ids) for output in second.outputs] == [3, 3]
    assert [output.text for output in second.outputs] == ["", ""]
    assert second.outputs[1].logprobs is not None
    assert len(second.outputs[1].logprobs) == 3
    with pytest.raises(InvalidInputError, match="2 prompts and 1 sampling_params"):
        llm.generate(["one", "two"], [GREEDY])


def test_settings_are_read_once_a_call_and_anew_with_the_next(llm: LLM) -> None:
    """What an object of settings holds may change between two calls."""
    stops: list[str] = []
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=stops)
    whole, other = llm.generate([[5, 6, 7], [5, 6, 8]], params)
    assert len(whole.token_ids) == len(other.token_ids) == 8
    stops.append(whole.text[:2])
    stopped, same = llm.generate([[5, 6, 7], [5, 6, 8]], [params, GREEDY])
    assert stopped.finish_reason == "stop"
    assert same.token_ids == other.token_ids


def test_a_stop_string_ends_an_answer(llm: LLM) -> None:
    whole = llm.generate("stop here", SamplingParams(max_tokens=40, temperature=0.0))[0].text
    stop = whole[len(whole) // 2 :][:3]
    output = llm.generate("stop here", SamplingParams(max_tokens=40, temperature=0.0, stop=stop))[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_a_conversation_and_several(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    outputs = llm.chat(messages, GREEDY)
    assert len(outputs) == 1
    assert "hello" in (outputs[0].prompt or "")
    assert [output.token_ids for output in llm.chat([messages, messages], GREEDY)] == [outputs[0].token_ids] * 2
    with pytest.raises(InvalidInputError, match="malformed messages"):
        llm.chat([{"content": "nobody said it"}], GREEDY)


def test_text_with_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    model = Path(shutil.copytree(bundled_checkpoint_path(), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 300}
    (model / "config.json").write_text(json.dumps(config))
    with LLM(str(model), **MOCK) as llm:
        with pytest.raises(InvalidInputError, match="but the model has only 300 tokens"):
            llm.generate("Once upon a time", GREEDY)
        with pytest.raises(InvalidInputError, match=r"between 0 and 299, got 300$"):
            llm.generate([5, 300], GREEDY)
        assert len(llm.generate([5], GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", GREEDY, InvalidInputError),
        ([[]], GREEDY, InvalidInputError),
        ([-1], GREEDY, InvalidInputError),
        ([10**9], GREEDY, InvalidInputError),
        ([5.5], GREEDY, TypeError),
        ([["5"]], GREEDY, TypeError),
        ({"prompt": "x"}, GREEDY, TypeError),
        (None, GREEDY, TypeError),
        ([5] * 5000, GREEDY, PromptTooLongError),
        ("x", SamplingParams(temperature=-1.0), InvalidInputError),
        ("x", SamplingParams(n=0), InvalidInputError),
        ("x", SamplingParams(n=2**40), InvalidInputError),
        ("x", SamplingParams(max_tokens=5.5), InvalidInputError),
        ("x", SamplingParams(stop_token_ids="7"), InvalidInputError),
        ("x", SamplingParams(logit_bias={"7": 1.0}), InvalidInputError),
        ("x", SamplingParams(temperature=np.float32(0.5)), InvalidInputError),
        ("x", SamplingParams(cache_salt="\ud800"), UnicodeEncodeError),
        ("x", SamplingParams(stop=""), InvalidInputError),
        ("x", SamplingParams(stop="a", detokenize=False), InvalidInputError),
    ],
)
def test_bad_input_is_refused_and_the_rest_goes_on(
    llm: LLM, prompt: object, params: SamplingParams, error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate(prompt, params)  # type: ignore[arg-type]
    assert len(llm.generate("good", GREEDY)[0].token_ids) == 8


def test_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting num_block \(did you mean num_blocks\?\)"):
        LLM(num_block=3)
    with pytest.raises(ConfigError, match="decode must be at least 1"):
        LLM(decode=0)
    with pytest.raises(ConfigError, match="there is no engine nonsense"):
        LLM(engine="nonsense")
    with pytest.raises(CheckpointError, match="does not exist"):
        LLM("./no-such-checkpoint")


def test_what_is_closed_stays_closed_and_leaves_no_thread() -> None:
    before, interval = set(threading.enumerate()), sys.getswitchinterval()
    llm = LLM(prefill=1, decode=1, **MOCK)
    llm.close()
    llm.close()
    with pytest.raises(InvalidInputError, match="closed"):
        llm.generate("too late")
    del llm
    dropped = LLM(**MOCK)
    del dropped
    gc.collect()
    left = [thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio_")]
    assert left == []
    assert sys.getswitchinterval() == interval


async def test_it_is_closed_in_a_thread_that_runs_a_loop() -> None:
    """As a notebook's does."""
    with LLM(**MOCK) as llm:
        assert llm.generate("x", GREEDY)


def test_an_engine_that_dies_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(executor: MockExecutor, work: object) -> None:
        raise RuntimeError("the device is on fire")

    llm = LLM(**MOCK)
    monkeypatch.setattr(MockExecutor, "execute", fail)
    with pytest.raises(EngineDeadError, match="on fire"):
        llm.generate("x", GREEDY)
    with pytest.raises(EngineDeadError):
        llm.generate("x", GREEDY)
    llm.close()


async def test_pieces_of_an_answer_come_as_they_are_made() -> None:
    """By an engine that takes time: what is there at once comes at once."""
    async with AsyncLLM(**{**MOCK, "speedup_ratio": 1.0}) as llm:
        whole = await llm.generate([5, 6, 7], GREEDY)
        deltas = [delta async for delta in llm.stream([5, 6, 7], GREEDY)]
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


async def test_leaving_a_stream_or_cancelling_a_call_frees_its_blocks() -> None:
    async with AsyncLLM(prefill=1, decode=1, max_local_prefill_length=0, **{**MOCK, "speedup_ratio": 1.0}) as llm:
        endless = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
        stream = llm.stream(LONG, endless)
        async for _ in stream:
            break
        await stream.aclose()
        call = asyncio.create_task(llm.generate(LONG[::-1], endless))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(30):
            while any(status["load"]["kv_active_blocks"] for status in await llm.status()):
                await asyncio.sleep(0.01)
        assert len((await llm.generate(LONG, GREEDY)).token_ids) == 8


def indexed(llm: AsyncLLM) -> bool:
    """Whether the router knows of a block that a worker holds."""
    router = llm.cluster.model.router
    return any(router.indexed_blocks(worker.identity.worker_id) for worker in llm.cluster.workers)


@pytest.mark.parametrize(("decode", "has_choice"), [(1, False), (2, True)])
async def test_workers_publish_only_if_there_is_a_choice_between_them(
    decode: int, has_choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers: list[MemoryBroker] = []

    def made(tick_s: float) -> MemoryBroker:
        brokers.append(MemoryBroker(tick_s=tick_s))
        return brokers[0]

    monkeypatch.setattr(embedded, "MemoryBroker", made)
    heard: list[str] = []
    async with AsyncLLM(decode=decode, **MOCK) as llm:
        plane, keys = brokers[0].plane(), Keys(llm.cluster.config.control.namespace)
        for subject in (keys.kv_events, keys.load_metrics):
            await plane.events.subscribe(subject, lambda subject, _: heard.append(subject))
        first = await llm.generate(LONG, GREEDY)
        await asyncio.sleep(4 * MIN_INTERVAL_S)
        async with asyncio.timeout(30):
            while has_choice and not (heard and indexed(llm)):
                await asyncio.sleep(0.01)
        assert bool(heard) == indexed(llm) == has_choice
        again = await llm.generate(LONG, GREEDY)
        await plane.close()
    assert again.num_cached_tokens == len(LONG) // 16 * 16
    assert again.token_ids == first.token_ids == expected(LONG, 8)


def test_a_batch_has_no_objective_between_tokens_unless_it_is_asked_for():
    assert embedded_cluster(None, 1, 1, "mock", {}).config.disagg.disagg_policy == "threshold"
    assert embedded_cluster(None, 1, 1, "mock", {"disagg_policy": "cost"}).config.disagg.disagg_policy == "cost"


@pytest.mark.parametrize("engine", ["mock", "torch"])
def test_a_damaged_tokenizer_is_the_error_of_the_constructor(tmp_path: Path, engine: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(bundled_checkpoint_path(), checkpoint)
    (checkpoint / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match=r"cannot load .*tokenizer\.json"):
        LLM(checkpoint, engine=engine, num_blocks=64)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        LLM(checkpoint, engine=engine, num_blocks=64)
