"""Workers are lost, refuse and give up; clients leave: no token twice, none missing, nothing left running."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.frontend.doubles import FakeCluster, FakeWorker, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import Answer, RawClient, events, request_bytes, send
from tests.patience import PATIENCE_S, skip

from kvrelay.config import WorkerRole
from kvrelay.core.messages import RequestRefused
from kvrelay.errors import WorkerUnavailableError
from kvrelay.frontend.cluster import models
from kvrelay.frontend.generate import sequence
from kvrelay.frontend.loop_turns import START_COST, TURN_COST, LoopTurns
from kvrelay.marks.trace import Trace
from kvrelay.rpc import wire
from kvrelay.rpc.loopback import LoopbackRpcClient

T = TypeVar("T")
TOKENIZER = byte_level_tokenizer()
ANSWER = "Once upon a time 你好 🙂 by the sea."
TOKENS = tuple(TOKENIZER.encode(ANSWER).ids)
BODY: dict[str, object] = {
    "prompt": [5, 6, 7],
    "max_tokens": len(TOKENS),
    "stream": True,
    "return_token_ids": True,
    "seed": 11,
    "stream_options": {"include_usage": True},
}


async def ask(cluster: FakeCluster, **changes: object) -> Answer:
    assert cluster.frontend is not None
    return await send(cluster.frontend.port, "POST", "/v1/completions", {**BODY, **changes})


def streamed(answer: Answer) -> tuple[str, list[int]]:
    """Text and tokens of a stream."""
    choices = [event["choices"][0] for event in events(answer.body) if event.get("choices")]
    return "".join(choice["text"] for choice in choices), [token for choice in choices for token in choice["token_ids"]]


LONG = [5] * 300


async def test_a_request_too_large_for_one_message_is_told_so_and_runs_nowhere(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model_dir, Script(TOKENS)) as cluster:
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
        answer = await ask(cluster, prompt=LONG)
        assert (answer.status, "a GenerateRequest of" in answer.json["error"]["message"]) == (413, True)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_request_that_is_too_large_when_it_is_placed_again_is_told_so(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Found when its worker is lost, or when one has come for which it has waited."""
    die = FakeWorker.die

    async def die_and_shrink(worker: FakeWorker) -> None:
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
        await die(worker)

    monkeypatch.setattr(FakeWorker, "die", die_and_shrink)
    async with running(model_dir, Script(TOKENS, die_after=1), *[Script(TOKENS)] * (not waits)) as cluster:
        asking = asyncio.create_task(ask(cluster, prompt=LONG, stream=False, stream_options=None))
        if waits:
            await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == 1)
            await cluster.deregister("w0")
            await cluster.add_worker("w9", Script(TOKENS))
        answer = await asking
        assert (answer.status, "a GenerateRequest of" in answer.json["error"]["message"]) == (413, True)


@pytest.mark.parametrize("die_after", range(len(TOKENS)))
async def test_a_lost_worker_is_replaced_token_by_token(model_dir: Path, die_after: int) -> None:
    async with running(model_dir, Script(TOKENS, die_after=die_after), Script(TOKENS)) as cluster:
        answer = await ask(cluster)
        assert streamed(answer) == (ANSWER, list(TOKENS))
        usage = events(answer.body)[-1]["usage"]
        assert usage["completion_tokens"] == len(TOKENS)
        first, second = cluster.workers["w0"].requests[0], cluster.workers["w1"].requests[0]
        assert second.output_token_ids == TOKENS[:die_after]
        assert second.sampling == first.sampling
        assert second.prompt_token_ids == first.prompt_token_ids
        counts = cluster.frontend.metrics.of("tiny")
        assert counts.num_migrations == 1
        assert counts.of_worker("w1").itl.count == len(TOKENS) - max(die_after, 1)


async def test_the_gaps_between_tokens_that_come_with_the_first_are_counted(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, per_output=3)) as cluster:
        assert streamed(await ask(cluster, max_tokens=2 * len(TOKENS)))[0] == 2 * ANSWER
        assert cluster.frontend is not None
        assert cluster.frontend.metrics.of("tiny").latencies.itl.count == 2 * len(TOKENS) - 1


@pytest.mark.parametrize(
    ("changes", "interval"),
    [
        ({"stream": False, "stream_options": None}, 16),
        ({"stream": False, "stream_options": None, "stop": "never"}, 1),
        ({}, 1),
    ],
)
async def test_tokens_that_nobody_reads_one_by_one_come_several_at_once(
    model_dir: Path, changes: dict[str, object], interval: int
) -> None:
    """Also when the worker dies in between; the gaps between tokens are counted for each of them."""
    async with running(model_dir, Script(TOKENS, die_after=17), Script(TOKENS)) as cluster:
        answer = await ask(cluster, max_tokens=2 * len(TOKENS), **changes)
        text = streamed(answer)[0] if not changes else json.loads(answer.body)["choices"][0]["text"]
        assert text == 2 * ANSWER
        first, second = cluster.workers["w0"].requests[0], cluster.workers["w1"].requests[0]
        assert first.report_interval == second.report_interval == interval
        assert second.output_token_ids == (2 * TOKENS)[:17]
        assert cluster.frontend is not None
        assert cluster.frontend.metrics.of("tiny").latencies.itl.count == 2 * len(TOKENS) - 1


async def test_tokens_of_one_step_share_the_time_before_it(model_dir: Path) -> None:
    """Five at once, each in an output of its own, as of a worker that speculates: five equal gaps each time. The first
    answer token has none, and nothing passes until the four that come with it."""
    async with running(model_dir, Script(TOKENS, per_output=5, splits=True, delay_s=0.01)) as cluster:
        began_s = time.monotonic()
        answer = await ask(cluster, max_tokens=20)
        assert len(streamed(answer)[0]) > 0
        assert cluster.frontend is not None
        gaps = cluster.frontend.metrics.of("tiny").latencies.itl
        assert sum(gaps.counts) == 19
        assert [count % 5 for count in gaps.counts] == [4] + [0] * (len(gaps.counts) - 1)
        assert 3 * 0.01 <= gaps.total_s <= time.monotonic() - began_s


async def test_an_answer_of_two_tokens_is_judged_by_its_one_gap(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, delay_s=0.05)) as cluster:
        counts = cluster.frontend.metrics.of("tiny")
        for objective_ms, judged in (("49", (1, 0)), ("100000", (1, 1))):
            headers = {"x-kvrelay-slo-ttft-ms": "100000", "x-kvrelay-slo-itl-ms": objective_ms}
            await send(cluster.frontend.port, "POST", "/v1/completions", {**BODY, "max_tokens": 2}, headers)
            assert (counts.num_late_gaps, counts.num_in_time) == judged


@pytest.mark.parametrize("lost", range(len(TOKENS) - 1))
async def test_a_gap_is_a_lost_worker(model_dir: Path, lost: int) -> None:
    """Whatever output is lost: the connection ends for both sides, and another worker goes on before the gap."""
    async with running(model_dir, Script(TOKENS, lose_at=lost), Script(TOKENS)) as cluster:
        broken = set(cluster.workers["w0"].server.peers)
        answer = await ask(cluster)
        assert streamed(answer) == (ANSWER, list(TOKENS))
        assert events(answer.body)[-1]["usage"]["completion_tokens"] == len(TOKENS)
        assert cluster.workers["w1"].requests[0].output_token_ids == TOKENS[:lost]
        assert cluster.frontend.metrics.of("tiny").num_migrations == 1
        await cluster.until(lambda: not broken & set(cluster.workers["w0"].server.peers))


async def test_a_gap_moves_every_request_of_the_connection(model_dir: Path) -> None:
    """They share one stream of messages, so none of them knows what else was in what was lost."""
    async with running(model_dir, Script(TOKENS, delay_s=0.01)) as cluster:
        worker = cluster.workers["w0"]
        asking = [asyncio.create_task(ask(cluster, seed=seed)) for seed in range(3)]
        await cluster.until(lambda: len(worker.requests) == 3)
        worker.script.lose_at = 5
        await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == 3)
        worker.script.lose_at = None
        assert [streamed(answer) for answer in await asyncio.gather(*asking)] == [(ANSWER, list(TOKENS))] * 3


@pytest.mark.parametrize("stop", [None, ["a time"]])
async def test_repeated_outputs_are_delivered_once(model_dir: Path, stop: list[str] | None) -> None:
    async with running(model_dir, Script(TOKENS, repeat=True), Script(TOKENS, repeat=True)) as cluster:
        text, tokens = streamed(await ask(cluster, stop=stop))
        assert text == (ANSWER if stop is None else "Once upon ")
        assert tokens == list(TOKENS[: len(tokens)])
        assert not cluster.frontend.metrics.of("tiny").num_migrations


async def test_a_client_that_leaves_while_its_worker_does_not_read(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort cannot be told, so the connection ends: the worker must not go on for nobody."""
    async with running(model_dir, Script(TOKENS, delay_s=0.01), max_n=4) as cluster:
        worker, frontend = cluster.workers["w0"], cluster.frontend
        client = await RawClient.connect(frontend.port)
        client.writer.write(request_bytes("POST", "/v1/completions", json.dumps({**BODY, "max_tokens": 400}).encode()))
        await cluster.until(lambda: len(worker.requests) == 1)
        before = set(worker.server.peers)

        def full(_: LoopbackRpcClient, message: object) -> None:
            raise WorkerUnavailableError("the queue is full")

        with monkeypatch.context() as patch:
            patch.setattr(LoopbackRpcClient, "send", full)
            await client.close()
            await cluster.until(lambda: not before & set(worker.server.peers))
        await cluster.until(lambda: len(worker.server.peers) == 1)


async def test_stop_strings_go_on_across_workers(model_dir: Path) -> None:
    for die_after in range(1, 8):
        async with running(model_dir, Script(TOKENS, die_after=die_after), Script(TOKENS)) as cluster:
            answer = await ask(cluster, stop=["a time"], stream=False, stream_options=None)
            choice = answer.json["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Once upon ", "stop", "a time")


async def test_a_replacement_is_waited_for(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, die_after=3)) as cluster:
        client = await RawClient.connect(cluster.frontend.port)
        client.writer.write(request_bytes("POST", "/v1/completions", json.dumps(BODY).encode()))
        await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == 1)
        await cluster.deregister("w0")
        await cluster.add_worker("w9", Script(TOKENS))
        assert streamed(await client.read_answer()) == (ANSWER, list(TOKENS))
        await client.close()


async def test_a_continued_sequence_is_placed_by_its_prompt_and_the_answer_so_far(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next worker prefills both: these are looked up in the caches, and a turn of the loop is spent on them."""
    costs: list[int] = []
    monkeypatch.setattr(LoopTurns, "take", recording(LoopTurns.take, lambda turns, cost: costs.append(cost)))
    async with running(model_dir, Script(TOKENS, die_after=3)) as cluster:
        asked: list[tuple[int, ...]] = []
        router = cluster.frontend.cluster.model(None).router
        router.choose = recording(router.choose, lambda request: asked.append(tuple(request.token_ids)))
        asking = asyncio.create_task(ask(cluster))
        await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == 1)
        costs.clear()
        await cluster.deregister("w0")
        await cluster.add_worker("w9", Script(TOKENS))
        assert streamed(await asking) == (ANSWER, list(TOKENS))
        assert (asked[0], asked[-1]) == ((5, 6, 7), (5, 6, 7, *TOKENS[:3]))
        assert set(costs) == {START_COST + 3 + 3}


async def test_the_trace_hears_the_marks_of_each_attempt(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, bytes]] = []
    monkeypatch.setattr(
        Trace,
        "heard",
        recording(Trace.heard, lambda trace, number, marks: heard.extend([(number, marks)] if marks else [])),
    )
    first, second = Script(TOKENS, die_after=3, marks=(b"a", b"b")), Script(TOKENS, marks=(b"c", b"d"))
    async with running(model_dir, first, second) as cluster:
        assert streamed(await ask(cluster)) == (ANSWER, list(TOKENS))
        assert heard == [(0, b"a"), (1, b"c"), (1, b"d")]
    heard.clear()
    async with running(model_dir, Script(TOKENS, repeat=True, marks=(b"a", b"b"))) as cluster:
        assert streamed(await ask(cluster)) == (ANSWER, list(TOKENS))
        assert heard == [(0, b"a"), (0, b"a"), (0, b"b")], "what is said twice may have been marked by two workers"


def recording(call: Callable[..., T], record: Callable[..., object]) -> Callable[..., T]:
    def recorded(*arguments: object) -> T:
        record(*arguments)
        return call(*arguments)

    return recorded


async def test_sequences_that_waited_for_the_same_worker_are_placed_in_turns(model_dir: Path) -> None:
    num_sequences = 4 * TURN_COST // START_COST
    async with running(model_dir, Script(TOKENS, hang=True)) as cluster:
        asking = asyncio.create_task(ask(cluster, n=num_sequences, stream=False, stream_options=None))
        await cluster.until(lambda: len(cluster.workers["w0"].requests) == num_sequences)
        turns = cluster.frontend.cluster.model(None).turns
        await cluster.workers["w0"].die()
        await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == num_sequences)
        assert turns.num_turns == 0
        await cluster.deregister("w0")
        heir = await cluster.add_worker("w9", Script(TOKENS))
        answer = await asking
        assert [choice["text"] for choice in answer.json["choices"]] == [ANSWER] * num_sequences
        assert len(heir.requests) == num_sequences
        assert turns.num_turns >= 4


async def test_migration_is_bounded_and_ends_with_an_error(model_dir: Path) -> None:
    scripts = [Script(TOKENS, die_after=1) for _ in range(4)]
    async with running(model_dir, *scripts, migration_limit=2) as cluster:
        answer = await ask(cluster)
        assert answer.status == 200
        last = events(answer.body)[-1]
        assert last["error"]["type"] == "server_error"
        assert "lost" in last["error"]["message"]
        assert cluster.frontend.metrics.of("tiny").num_migrations == 2
        assert cluster.frontend.metrics.requests["/v1/completions", "broken", "tiny"] == 1


async def test_requests_leave_a_worker_with_a_failed_engine(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, fail_after=2), Script(TOKENS)) as cluster:
        assert streamed(await ask(cluster)) == (ANSWER, list(TOKENS))


async def test_the_end_of_a_worker_that_gave_a_request_up_does_not_move_it_again(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, fail_after=2), Script(TOKENS, delay_s=0.005)) as cluster:
        first, second = cluster.workers["w0"], cluster.workers["w1"]
        asking = asyncio.create_task(ask(cluster))
        await cluster.until(lambda: len(second.requests) == 1)
        await first.die()
        assert streamed(await asking) == (ANSWER, list(TOKENS))
        assert cluster.frontend.metrics.of("tiny").num_migrations == len(second.requests) == 1


async def test_each_loss_begins_the_wait_for_a_worker_anew(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, die_after=3)) as cluster:
        asking = asyncio.create_task(ask(cluster))
        for number, heir in enumerate((Script(TOKENS, die_after=3), Script(TOKENS))):
            await cluster.until(lambda seen=number: cluster.frontend.metrics.of("tiny").num_migrations > seen)
            await cluster.deregister(f"w{number}")
            skip(0.9 * sequence.REPLACEMENT_WAIT_S)
            await cluster.add_worker(f"w{number + 1}", heir)
        assert streamed(await asking) == (ANSWER, list(TOKENS))


async def test_an_answer_that_has_begun_waits_for_the_heir_of_a_failed_engine(model_dir: Path) -> None:
    """As for that of a lost worker: an engine whose rank was killed says so before its worker ends."""
    async with running(model_dir, Script(TOKENS, fail_after=3)) as cluster:
        client = await RawClient.connect(cluster.frontend.port)
        client.writer.write(request_bytes("POST", "/v1/completions", json.dumps(BODY).encode()))
        await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == 1)
        await cluster.deregister("w0")
        await cluster.add_worker("w9", Script(TOKENS))
        assert streamed(await client.read_answer()) == (ANSWER, list(TOKENS))
        await client.close()


async def test_an_answer_with_an_adapter_waits_for_a_worker_that_has_it(model_dir: Path) -> None:
    """Another worker of the model is free all the time, and has it not."""
    async with running(model_dir, Script((10,))) as cluster:
        await cluster.add_worker("w1", Script(TOKENS, fail_after=3), adapters=("sql@1",))
        await cluster.until(lambda: [model.worker_ids for model in cluster.frontend.cluster.models] == [["w0", "w1"]])
        asking = asyncio.create_task(ask(cluster, model="sql"))
        await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == 1)
        await cluster.deregister("w1")
        heir = await cluster.add_worker("w9", Script(TOKENS), adapters=("sql@1", "chat@1"))
        assert streamed(await asking) == (ANSWER, list(TOKENS))
        assert [each.sampling.adapter for each in heir.requests] == ["sql@1"]
        assert not cluster.workers["w0"].requests


async def test_a_worker_that_was_lost_and_is_back_takes_what_the_next_one_loses(model_dir: Path) -> None:
    """No worker comes after the second loss: the first one, which only froze, has come back before it."""
    async with running(model_dir, Script(TOKENS, lose_at=3), Script(TOKENS, hang=True)) as cluster:
        first, second = cluster.workers["w0"], cluster.workers["w1"]
        asking = asyncio.create_task(ask(cluster))
        await cluster.until(lambda: len(second.requests) == 1)
        await cluster.until(lambda: len(first.server.peers) == 1)
        first.script.lose_at = None
        await second.die()
        assert streamed(await asking) == (ANSWER, list(TOKENS))
        assert cluster.frontend.metrics.of("tiny").num_migrations == 2


async def test_an_answer_that_has_begun_asks_a_full_worker_again(model_dir: Path) -> None:
    full = RequestRefused("", "full", 429, True)
    async with running(model_dir, Script(TOKENS, die_after=3), Script(TOKENS, refuse=full)) as cluster:
        asking = asyncio.create_task(ask(cluster))
        await cluster.until(lambda: len(cluster.workers["w1"].requests) == 2)
        cluster.workers["w1"].script.refuse = None
        assert streamed(await asking) == (ANSWER, list(TOKENS))


@pytest.mark.parametrize("n", [2, 3])
async def test_a_choice_that_is_refused_after_another_has_begun_asks_again(model_dir: Path, n: int) -> None:
    """Under load a third of the streams with n=2 broke off: their first choice had been streamed already."""
    full = RequestRefused("", "full", 429, True)
    async with running(model_dir, Script(TOKENS, refuse=full, refuses="-1")) as cluster:
        asking = asyncio.create_task(ask(cluster, n=n))
        worker = cluster.workers["w0"]
        await cluster.until(lambda: len(worker.requests) == n + 1)
        worker.script.refuse = None
        answer = await asking
        pieces = [choice for event in events(answer.body) for choice in event.get("choices", ())]
        assert {choice["index"] for choice in pieces} == set(range(n))
        for index in range(n):
            assert "".join(choice["text"] for choice in pieces if choice["index"] == index) == ANSWER


async def test_choices_of_which_one_is_refused_before_any_has_begun_are_refused(model_dir: Path) -> None:
    full = RequestRefused("", "full", 429, True)
    async with running(model_dir, Script(TOKENS, refuse=full, refuses="-0")) as cluster:
        assert (await ask(cluster, n=2)).status == 429
        assert (await ask(cluster, n=2, stream=False, stream_options=None)).status == 429


async def test_an_answer_that_every_worker_refuses_ends_in_time(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "REPLACEMENT_WAIT_S", 1.2)
    full = RequestRefused("", "full", 429, True)
    async with running(model_dir, Script(TOKENS, die_after=3), Script(TOKENS, refuse=full)) as cluster:
        answer = await ask(cluster)
        assert "full" in events(answer.body)[-1]["error"]["message"]
        assert 2 <= len(cluster.workers["w1"].requests) <= 4


async def test_a_failure_without_another_worker_is_told(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, fail_after=0)) as cluster:
        answer = await ask(cluster)
        assert answer.status == 503
        assert "engine failed" in answer.error["message"]


async def test_a_refusal_goes_to_the_next_worker(model_dir: Path) -> None:
    refusal = RequestRefused("", "draining", 503, True)
    async with running(model_dir, Script(refuse=refusal), Script(TOKENS)) as cluster:
        for _ in range(2):
            assert streamed(await ask(cluster)) == (ANSWER, list(TOKENS))
        assert len(cluster.workers["w0"].requests) >= 1


@pytest.mark.parametrize("waits_s", [(2.5, 40.0, 7.0), (40.0, 7.0, 2.5)])
async def test_refused_everywhere_says_when_the_first_worker_is_free(
    model_dir: Path, waits_s: tuple[float, ...]
) -> None:
    refusals = [RequestRefused("", "the queue is full", 429, True, retry_after_s=wait_s) for wait_s in waits_s]
    async with running(model_dir, *(Script(refuse=refusal) for refusal in refusals)) as cluster:
        answer = await ask(cluster)
        assert answer.status == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.error["message"] == "the queue is full"
        assert [len(worker.requests) for worker in cluster.workers.values()] == [1, 1, 1]


@pytest.mark.parametrize("first", [0, 1])
async def test_a_worker_that_leaves_does_not_say_when_one_is_free(model_dir: Path, first: int) -> None:
    full = RequestRefused("", "the queue is full", 429, True, retry_after_s=40.0)
    leaving = RequestRefused("", "the worker is draining", 503, True)
    refusals = (full, leaving)[first], (leaving, full)[first]
    async with running(model_dir, *(Script(refuse=refusal) for refusal in refusals)) as cluster:
        answer = await ask(cluster)
        assert answer.headers["retry-after"] == "40"
        assert [len(worker.requests) for worker in cluster.workers.values()] == [1, 1]


async def test_a_final_refusal_is_passed_on(model_dir: Path) -> None:
    refusal = RequestRefused("", "does not fit into the KV pool", 400, False)
    async with running(model_dir, Script(refuse=refusal), Script(TOKENS)) as cluster:
        answer = await ask(cluster)
        assert answer.status == 400
        assert sum(len(worker.requests) for worker in cluster.workers.values()) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_everything(model_dir: Path, stream: bool) -> None:
    async with running(model_dir, Script(TOKENS, delay_s=0.01)) as cluster:
        client = await RawClient.connect(cluster.frontend.port)
        body = b'{"prompt": "a", "n": 3, "max_tokens": 400, "stream": %s}' % (b"true" if stream else b"false")
        client.writer.write(request_bytes("POST", "/v1/completions", body))
        worker = cluster.workers["w0"]
        await cluster.until(lambda: len(worker.requests) == 3)
        await client.close()
        await cluster.until(lambda: len(worker.aborted) == 3)
        await cluster.until(lambda: cluster.frontend.metrics.num_in_flight_of() == 0)
        assert cluster.frontend.metrics.requests["/v1/completions", "disconnected", "tiny"] == 1


async def test_a_stop_string_aborts_on_the_worker(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, delay_s=0.001)) as cluster:
        answer = await ask(cluster, stop="upon", max_tokens=400, return_token_ids=False)
        assert "".join(event["choices"][0]["text"] for event in events(answer.body)[:-1]) == "Once "
        await cluster.until(lambda: len(cluster.workers["w0"].aborted) == 1)


@pytest.mark.parametrize("header", [True, False])
async def test_a_deadline_cancels_the_request(model_dir: Path, header: bool) -> None:
    async with running(model_dir, Script(hang=True)) as cluster:
        body = {"prompt": "a"} if header else {"prompt": "a", "timeout": 30}
        headers = {"x-request-timeout-s": "30"} if header else {}
        asking = asyncio.create_task(send(cluster.frontend.port, "POST", "/v1/completions", body, headers))
        worker = cluster.workers["w0"]
        await cluster.until(lambda: len(worker.requests) == 1)
        skip(30)
        assert (await asking).status == 504
        await cluster.until(lambda: len(worker.aborted) == 1)


async def test_without_a_worker_requests_get_503(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = cluster.frontend.port
        assert (await send(port, "GET", "/health")).status == 503
        assert (await send(port, "GET", "/live")).status == 200
        answer = await send(port, "POST", "/v1/completions", {"prompt": "a"})
        assert answer.status == 503
        assert "retry-after" in answer.headers


async def test_requests_follow_workers_that_come_and_go(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        frontend = cluster.frontend
        worker = await cluster.add_worker("w0", Script(TOKENS))
        await cluster.until(lambda: bool(frontend.cluster.models))
        answer = await send(frontend.port, "GET", "/health")
        assert (answer.status, answer.json["workers"]) == (200, 1)
        await cluster.deregister("w0")
        await cluster.until(lambda: not frontend.cluster.models)
        assert (await ask(cluster, model="tiny")).status == 503
        assert (await ask(cluster, model="never-served")).status == 404  # clients choose such names
        counted = frontend.metrics.requests
        await cluster.until(lambda: counted["/v1/completions", "503", "tiny"] == 1)
        await cluster.until(lambda: counted["/v1/completions", "404", ""] == 1)
        await cluster.register(worker, epoch=2)
        await cluster.until(lambda: bool(frontend.cluster.models))
        assert streamed(await ask(cluster)) == (ANSWER, list(TOKENS))
        await cluster.register(worker, epoch=3, role=WorkerRole.PREFILL)
        await cluster.until(lambda: not frontend.cluster.models)
        await cluster.register(worker, epoch=4)
        await cluster.until(lambda: bool(frontend.cluster.models))


async def test_a_draining_worker_finishes_what_it_has(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, delay_s=0.01)) as cluster:
        asking = asyncio.create_task(ask(cluster))
        await cluster.until(lambda: len(cluster.workers["w0"].requests) == 1)
        await cluster.deregister("w0")
        await cluster.until(lambda: not cluster.frontend.cluster.models)
        assert streamed(await asking) == (ANSWER, list(TOKENS))
        assert not cluster.frontend.metrics.of("tiny").num_migrations


async def test_requests_succeed_while_the_control_plane_is_away(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS)) as cluster:
        cluster.broker.go_offline()
        assert streamed(await ask(cluster)) == (ANSWER, list(TOKENS))
        cluster.broker.go_online()
        await cluster.add_worker("w1", Script(TOKENS))
        await cluster.until(lambda: len(cluster.frontend.cluster.model(None).worker_ids) == 2)


async def test_a_connection_that_breaks_is_made_again(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS)) as cluster:
        worker = cluster.workers["w0"]
        for peer in list(worker.server.peers):
            worker.server.disconnect(peer)
        await cluster.until(lambda: len(worker.server.peers) == 1 and bool(cluster.frontend.cluster.models))
        assert streamed(await ask(cluster)) == (ANSWER, list(TOKENS))


@pytest.mark.parametrize("changes", [{}, {"model": "tiny"}, {"stream": False, "stream_options": None}])
async def test_a_request_waits_for_connections_that_have_just_broken(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """After a pause of this process or of the network all connections are gone, and all workers live."""
    monkeypatch.setattr(models, "RECONNECT_S", 2 * PATIENCE_S)
    async with running(model_dir, Script(TOKENS)) as cluster:
        model = cluster.frontend.cluster.model("tiny")
        await cluster.workers["w0"].die()
        await cluster.until(lambda: not model.is_available)
        asking = asyncio.create_task(ask(cluster, **changes))
        await cluster.until(lambda: cluster.frontend.cluster.cold_start.num_unplaced == 1)
        await cluster.add_worker("w0", Script(TOKENS))
        assert (await asking).status == 200
        assert cluster.workers["w0"].requests[0].output_token_ids == ()


async def test_a_request_that_waits_in_vain_for_a_connection_gets_503(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "RECONNECT_S", sequence.REPLACEMENT_WAIT_S)
    async with running(model_dir, Script(TOKENS)) as cluster:
        model = cluster.frontend.cluster.model("tiny")
        await cluster.workers["w0"].die()
        await cluster.until(lambda: not model.is_available)
        asking = asyncio.create_task(ask(cluster))
        await cluster.until(lambda: cluster.frontend.cluster.cold_start.num_unplaced == 1)
        skip(sequence.REPLACEMENT_WAIT_S)
        answer = await asking
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        monkeypatch.setattr(models, "RECONNECT_S", 0.0)
        assert b"at the moment" in (await ask(cluster, model="tiny")).body


async def test_a_defect_hits_one_request_only(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS)) as cluster:
        tokenizer = cluster.frontend.cluster.model(None).tokenizer
        make, made = tokenizer.detokenizer, []

        class Broken:
            def push(self, token_ids: object) -> str:
                raise ZeroDivisionError

            def flush(self) -> str:
                return ""

        tokenizer.detokenizer = lambda *given: made.append(1) or (Broken() if len(made) == 1 else make(*given))
        broken, fine = await asyncio.gather(ask(cluster, stream_options=None), ask(cluster))
        assert (broken.status, fine.status) == (500, 200)
        assert streamed(fine) == (ANSWER, list(TOKENS))
        await cluster.until(lambda: cluster.frontend.metrics.num_in_flight_of() == 0)
        await cluster.until(lambda: len(cluster.workers["w0"].aborted) == 1)


@pytest.mark.parametrize("refuse", [None, RequestRefused("", "full", 429, True)], ids=["lost", "refused"])
async def test_a_defect_while_a_request_goes_on_elsewhere_is_an_error(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, refuse: RequestRefused | None
) -> None:
    """Not a client that waits for ever: whether it was refused or lost, and in the task that waits for a worker."""

    def defect(*_: object) -> None:
        raise ZeroDivisionError

    async with running(model_dir, Script(TOKENS, die_after=3, refuse=refuse)) as cluster:
        with monkeypatch.context() as patch:
            if refuse is None:
                asking = asyncio.create_task(ask(cluster))
                await cluster.until(lambda: cluster.frontend.metrics.of("tiny").num_migrations == 1)
                patch.setattr(sequence.Sequence, "start", defect)
                await cluster.deregister("w0")
                await cluster.add_worker("w9", Script(TOKENS))
                assert "internal error" in events((await asking).body)[-1]["error"]["message"]
            else:
                patch.setattr(type(cluster.frontend.metrics), "refused", defect)
                answer = await ask(cluster, stream_options=None)
                assert answer.status == 500
        await cluster.until(lambda: cluster.frontend.metrics.num_in_flight_of() == 0)
