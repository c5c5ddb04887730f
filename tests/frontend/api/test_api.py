"""The rest of the API: echo, logprobs, token ids, tokenizer endpoints, usage, headers, metrics, documents."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from tests.frontend.doubles import FakeCluster, FakeWorker, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import events, send

from kvrelay.core.event_codec import encode_frame
from kvrelay.core.events import LoadMetrics
from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.core.messages import GenerateRequest, OutputBatch, TokenOutput
from kvrelay.core.sealing import new_secret, seal
from kvrelay.core.status import FinishReason
from kvrelay.rpc.base import Peer

TOKENIZER = byte_level_tokenizer()
FOX = TOKENIZER.encode("the fox").ids


def position(token: int, logprob: float = -0.5) -> PositionLogprobs:
    return PositionLogprobs(
        TokenLogprob(token, logprob, 1), (TokenLogprob(token, logprob, 1), TokenLogprob(0, -3.0, 2))
    )


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


class LogprobWorker(FakeWorker):
    """Answers every request with FOX and numbers for each token."""

    async def _generate(self, peer: Peer, request: GenerateRequest) -> None:
        count = min(len(FOX), request.sampling.max_tokens)
        prompt = None
        if request.sampling.prompt_logprobs is not None:
            prompt = (None, *(position(token) for token in request.prompt_token_ids[1:]))
        if count == 0:
            self._send(peer, TokenOutput(request.request_id, (), FinishReason.LENGTH, prompt_logprobs=prompt))
        for number in range(count):
            output = TokenOutput(
                request.request_id,
                (FOX[number],),
                FinishReason.LENGTH if number == count - 1 else None,
                (position(FOX[number], float("-inf") if number else -0.5),)
                if request.sampling.logprobs is not None
                else None,
                prompt_logprobs=prompt if number == 0 else None,
                position=number,
            )
            self.server.send(peer, OutputBatch((output,)))


async def with_logprobs(cluster: FakeCluster) -> int:
    worker = cluster.workers["lp"] = LogprobWorker(cluster.network, Script(), "lp")
    await worker.server.start()
    await cluster.register(worker)
    await cluster.until(lambda: bool(cluster.frontend.cluster.models))
    return cluster.frontend.port


async def test_completion_logprobs(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = await with_logprobs(cluster)
        body = {"prompt": "a", "max_tokens": len(FOX), "logprobs": 2}
        choice = (await send(port, "POST", "/v1/completions", body)).json["choices"][0]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == "the fox"
        assert logprobs["token_logprobs"] == [-0.5, *[-9999.0] * (len(FOX) - 1)]
        assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
        assert logprobs["top_logprobs"][0] == {logprobs["tokens"][0]: -0.5, "<|end|>": -3.0}
        stream = events((await send(port, "POST", "/v1/completions", {**body, "stream": True})).body)
        parts = [event["choices"][0]["logprobs"] for event in stream]
        for name in logprobs:
            assert flat(part[name] for part in parts) == logprobs[name]


async def test_chat_logprobs(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = await with_logprobs(cluster)
        messages = [{"role": "user", "content": "x"}]
        body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": len(FOX)}
        content = (await send(port, "POST", "/v1/chat/completions", body)).json["choices"][0]["logprobs"]["content"]
        assert "".join(item["token"] for item in content) == "the fox"
        assert bytes(flat(item["bytes"] for item in content)) == b"the fox"
        assert content[0]["top_logprobs"][1]["token"] == "<|end|>"
        assert cluster.workers["lp"].requests[0].sampling.logprobs == 2


async def test_echo_scores_the_prompt(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = await with_logprobs(cluster)
        body = {"prompt": FOX, "max_tokens": 0, "echo": True, "logprobs": 1}
        choice = (await send(port, "POST", "/v1/completions", body)).json["choices"][0]
        assert choice["text"] == "the fox"
        assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (len(FOX) - 1)]
        both = (await send(port, "POST", "/v1/completions", {**body, "max_tokens": 3})).json["choices"][0]
        assert len(both["logprobs"]["tokens"]) == len(FOX) + 3


async def test_echo_streams_the_prompt_first(model_dir: Path) -> None:
    async with running(model_dir, Script(tuple(FOX))) as cluster:
        body = {"prompt": ["say ", "cry "], "n": 2, "max_tokens": len(FOX), "echo": True, "stream": True}
        texts: dict[int, str] = {}
        for event in events((await send(cluster.frontend.port, "POST", "/v1/completions", body)).body):
            choice = event["choices"][0]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {0: "say the fox", 1: "say the fox", 2: "cry the fox", 3: "cry the fox"}


async def test_prompt_logprobs(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = await with_logprobs(cluster)
        body = {"prompt": FOX, "max_tokens": 1, "prompt_logprobs": 1}
        shown = (await send(port, "POST", "/v1/completions", body)).json["choices"][0]["prompt_logprobs"]
        assert shown[0] is None
        assert shown[1][str(FOX[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.decode([FOX[1]])}


async def test_token_ids_of_prompt_and_answer_are_returned(model_dir: Path) -> None:
    async with running(model_dir, Script(tuple(FOX), per_output=2)) as cluster:
        port = cluster.frontend.port
        body = {"prompt": [4, 5], "max_tokens": len(FOX), "return_token_ids": True}
        choice = (await send(port, "POST", "/v1/completions", body)).json["choices"][0]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (FOX, [4, 5])
        stream = [
            e["choices"][0]
            for e in events((await send(port, "POST", "/v1/completions", {**body, "stream": True})).body)
        ]
        assert flat(choice["token_ids"] for choice in stream) == FOX
        assert stream[0]["prompt_token_ids"] == [4, 5]
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": len(FOX), "return_token_ids": True}
        whole = (await send(port, "POST", "/v1/chat/completions", chat)).json
        assert whole["choices"][0]["token_ids"] == FOX
        assert whole["prompt_token_ids"] == list(cluster.workers["w0"].requests[-1].prompt_token_ids)
        parts = events((await send(port, "POST", "/v1/chat/completions", {**chat, "stream": True})).body)
        assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert flat(part["choices"][0].get("token_ids", []) for part in parts) == FOX


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_continuous_usage(model_dir: Path, path: str) -> None:
    async with running(model_dir, Script(tuple(FOX), cached=1)) as cluster:
        prompt = {"prompt": [4, 5]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**prompt, "max_tokens": len(FOX), "stream": True, "stream_options": options}
        parts = events((await send(cluster.frontend.port, "POST", path, body)).body)
        counts = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
        assert counts == [*range(1, len(FOX) + 1), len(FOX)]
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_stop_token_and_include_stop(model_dir: Path) -> None:
    async with running(model_dir, Script(tuple(FOX), stop_at=len(FOX))) as cluster:
        port = cluster.frontend.port
        body = {"prompt": "a", "max_tokens": 100, "stop_token_ids": [FOX[-1]]}
        choice = (await send(port, "POST", "/v1/completions", body)).json["choices"][0]
        assert choice["text"] == TOKENIZER.decode(FOX[:-1])
        body = {**body, "include_stop_str_in_output": True}
        assert (await send(port, "POST", "/v1/completions", body)).json["choices"][0]["text"] == "the fox"
        sent = cluster.workers["w0"].requests[0].sampling
        assert sent.stop_token_ids == (FOX[-1],)


async def test_min_tokens_come_before_stop_strings(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENIZER.encode("x").ids)) as cluster:
        body = {"prompt": "a", "max_tokens": 10, "min_tokens": 4, "stop": "x"}
        choice = (await send(cluster.frontend.port, "POST", "/v1/completions", body)).json["choices"][0]
        assert choice["text"] == "xxxx"
        assert choice["finish_reason"] == "stop"


async def test_sampling_reaches_the_worker(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        body = {
            "prompt": "a", "max_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 2,
            "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"7": -5},
            "ignore_eos": True, "priority": -2,
        }  # fmt: skip
        await send(cluster.frontend.port, "POST", "/v1/completions", body)
        request = cluster.workers["w0"].requests[0]
        sampling = msgspec.structs.asdict(request.sampling)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty"):
            assert sampling[name] == body[name]
        assert sampling["logit_bias"] == {7: -5.0}
        assert request.priority == -2


async def test_tokenize_and_back(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        answer = (await send(port, "POST", "/tokenize", {"prompt": "你好 fox", "return_token_strs": True})).json
        assert answer["tokens"] == TOKENIZER.encode("你好 fox").ids
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        assert (await send(port, "POST", "/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": "你好 fox"}
        chat = (await send(port, "POST", "/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json
        assert TOKENIZER.decode(chat["tokens"]) == "[user] x\n[assistant] "


async def test_objectives_and_the_decision_travel_in_headers(model_dir: Path) -> None:
    async with running(model_dir, Script(tuple(FOX))) as cluster:
        port = cluster.frontend.port
        for stream in (True, False):
            body = {"prompt": FOX, "max_tokens": 3, "stream": stream}
            asked = {"x-kvrelay-decision": "1", "x-kvrelay-slo-ttft-ms": "250", "x-kvrelay-slo-itl-ms": "12.5"}
            answer = await send(port, "POST", "/v1/completions", body, asked)
            assert answer.headers["x-kvrelay-decision"] == "told;slo=250,12.5"
            silent = await send(port, "POST", "/v1/completions", body, {"x-kvrelay-decision": "0"})
            assert "x-kvrelay-decision" not in silent.headers
        for name in ("x-kvrelay-slo-ttft-ms", "x-kvrelay-slo-itl-ms"):
            for nonsense in ("0", "-1", "nan", "inf", "1e9", "1e-4", "5e-324", "soon", ""):
                wrong = await send(port, "POST", "/v1/completions", body, {name: nonsense})
                assert wrong.status == 400
                assert name in wrong.body.decode()


async def test_a_prompt_counts_once_for_each_choice_and_once_in_the_usage(model_dir: Path) -> None:
    """As in vLLM, where each choice is a request of the engine: the counter tells what workers prefill."""
    async with running(model_dir, Script(tuple(FOX))) as cluster:
        body = {"prompt": FOX, "max_tokens": 3, "n": 2}
        answer = await send(cluster.frontend.port, "POST", "/v1/completions", body)
        assert msgspec.json.decode(answer.body)["usage"]["prompt_tokens"] == len(FOX)
        text = (await send(cluster.frontend.port, "GET", "/metrics")).body.decode()
        assert f'kvrelay_prompt_tokens_total{{model="tiny"}} {2.0 * len(FOX)}' in text.splitlines()


async def test_headers_metrics_and_documents(model_dir: Path) -> None:
    async with running(model_dir, Script(tuple(FOX), cached=2)) as cluster:
        port = cluster.frontend.port
        for stream in (True, False):
            body = {"prompt": FOX, "max_tokens": 3, "stream": stream}
            answer = await send(port, "POST", "/v1/completions", body, {"x-request-id": "mine-1"})
            assert answer.headers["x-request-id"].startswith("cmpl-mine-1")
            assert answer.headers["x-kvrelay-worker"] == "w0"
        text = (await send(port, "GET", "/metrics")).body.decode()
        assert "\nprocess_cpu_seconds_total " in text
        for line in (
            'kvrelay_requests_total{endpoint="/v1/completions",model="tiny",status="200"} 2.0',
            'kvrelay_generation_tokens_total{model="tiny"} 6.0',
            f'kvrelay_prompt_tokens_total{{model="tiny"}} {2.0 * len(FOX)}',
            'kvrelay_cached_prompt_tokens_total{model="tiny"} 4.0',
            "kvrelay_requests_in_flight 0.0",
            'kvrelay_time_to_first_token_seconds_count{model="tiny"} 2.0',
            'kvrelay_inter_token_latency_seconds_count{model="tiny"} 4.0',
            'kvrelay_workers{model="tiny"} 1.0',
        ):
            assert line in text
        document = (await send(port, "GET", "/openapi.json")).json
        assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"}
        fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
        assert {"prompt", "top_k", "return_token_ids"} <= set(fields)
        assert set((await send(port, "GET", "/version")).json) == {"version"}


async def test_load_samples_reach_the_router(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), Script((10,))) as cluster:
        sample = LoadMetrics("w0", 5, 8, 50, 100, 3, 0.5, 0.0)
        seen: list[LoadMetrics] = []
        cluster.frontend.cluster.model(None).router.apply_metrics = seen.append
        bus = cluster.broker.plane().events
        # What somebody else publishes about the worker does not count.
        await bus.publish(cluster.keys.worker_load("w1"), encode_frame(sample))
        await bus.publish(cluster.keys.worker_load("nobody"), encode_frame(sample))
        await bus.publish(cluster.keys.worker_load("w0"), encode_frame(sample))
        await bus.publish(cluster.keys.worker_load("w0"), b"garbage")
        await bus.publish(cluster.keys.worker_kv_events("w0"), b"garbage")
        await cluster.until(lambda: seen == [sample])


async def test_only_what_the_worker_has_sealed_counts(model_dir: Path) -> None:
    """Whoever may publish can choose the subject; the secret comes over the worker's own connection."""
    async with running(model_dir) as cluster:
        worker = await cluster.add_worker("w0", Script((10,)), public_key="key of w0")
        worker.publish_secret = secret = new_secret()
        await cluster.until(lambda: bool(cluster.frontend.cluster.models))
        seen: list[LoadMetrics] = []
        cluster.frontend.cluster.model(None).router.apply_metrics = seen.append
        bus, subject = cluster.broker.plane().events, cluster.keys.worker_load("w0")
        true, false = (LoadMetrics("w0", 5, 8, 50, 100, 3, 0.5, 0.0, seq=seq) for seq in (1, 2))
        await bus.publish(subject, encode_frame(false))
        await bus.publish(subject, seal(new_secret(), subject, encode_frame(false)))
        await bus.publish(subject, seal(secret, cluster.keys.worker_kv_events("w0"), encode_frame(false)))
        await bus.publish(subject, seal(secret, subject, encode_frame(true)))
        await cluster.until(lambda: bool(seen))
        assert seen == [true]


async def test_chat_without_a_chat_template_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 9, "eos_token_id": 0}))
    async with running(tmp_path, Script((10,))) as cluster:
        port = cluster.frontend.port
        chat = await send(port, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert chat.status == 400
        await send(port, "POST", "/v1/completions", {"prompt": "a", "top_k": 2})
        sampling = cluster.workers["w0"].requests[0].sampling
        assert (sampling.temperature, sampling.top_k) == (0.25, 2)


MESSAGES = [{"role": "user", "content": "go"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "go"}),
        ("/v1/completions", {"prompt": ["go", "on"], "echo": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "go"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ],
)
async def test_text_with_a_token_that_the_model_does_not_have_is_refused(
    model_dir: Path, path: str, body: dict[str, object]
) -> None:
    """A tokenizer may have more tokens than the model has rows."""
    cluster = FakeCluster(model_dir)
    try:
        worker = cluster.workers["w0"] = FakeWorker(cluster.network, Script((10,)), "w0")
        await worker.server.start()
        await cluster.register(worker, vocab_size=40)
        await cluster.start()
        await cluster.until(lambda: cluster.frontend.cluster.model(None).vocab_size == 40)
        answer = await send(cluster.frontend.port, "POST", path, body)
        assert answer.status == 400
        assert "but the model has only 40 tokens" in str(answer.json["error"])
        assert not worker.requests
    finally:
        await cluster.close()
