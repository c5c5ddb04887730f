"""Fields that promise something are honoured or refused by name; advice is accepted."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from random import Random

import pytest
from tests.executors.constrained import TOKENIZER as CHECKPOINT
from tests.executors.constrained import random_answer
from tests.frontend.doubles import EOS, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import events, send
from tests.frontend.test_api import FOX, with_logprobs

from kvrelay.frontend.openai.requests import CompletionRequest, parse_body
from kvrelay.frontend.openai.structured import constraint_of
from kvrelay.frontend.openai.unknown import ADVICE, OURS, UNSUPPORTED

TOKENIZER = byte_level_tokenizer()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}


async def test_neighbours_names_are_refused_with_ours(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), on_unknown_field="ignore") as cluster:
        for name, ours in OURS.items():
            answer = await send(cluster.frontend.port, "POST", COMPLETIONS, {"prompt": "a", name: 1})
            assert (answer.status, answer.error["param"]) == (400, name)
            assert ours in str(answer.error["message"])
        for name in UNSUPPORTED:
            answer = await send(cluster.frontend.port, "POST", CHAT, {"messages": [USER], name: 1})
            assert (answer.status, answer.error["param"]) == (400, name)


async def test_advice_is_accepted_and_logged_once(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [USER], "max_tokens": 1, **{name: {"a": 1} for name in ADVICE if name != "user"}, "user": "u"}
    async with running(model_dir, Script((10,)), on_unknown_field="refuse") as cluster:
        with caplog.at_level(logging.WARNING, "kvrelay.frontend.openai.unknown"):
            for _ in range(2):
                assert (await send(cluster.frontend.port, "POST", CHAT, body)).status == 200
    logged = [record.getMessage() for record in caplog.records]
    assert len([line for line in logged if "service_tier is accepted" in line]) == 1
    assert len(logged) == len(ADVICE)


@pytest.mark.parametrize(("mode", "status", "num_logged"), [("refuse", 400, 0), ("warn", 200, 1), ("ignore", 200, 0)])
async def test_unknown_fields(
    model_dir: Path, caplog: pytest.LogCaptureFixture, mode: str, status: int, num_logged: int
) -> None:
    async with running(model_dir, Script((10,)), on_unknown_field=mode) as cluster:
        with caplog.at_level(logging.WARNING, "kvrelay.frontend.openai.unknown"):
            for _ in range(2):
                body = {"prompt": "a", "max_tokens": 1, "temprature\n": 1}
                answer = await send(cluster.frontend.port, "POST", COMPLETIONS, body)
                assert answer.status == status
                if status == 400:
                    assert answer.error["param"] == "temprature\n"
    assert len(caplog.records) == num_logged
    assert not any("\n" in record.getMessage() for record in caplog.records)


def completion(**fields: object) -> CompletionRequest:
    return parse_body(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest)


@pytest.mark.parametrize("seed", range(5))
def test_bad_words_stand_in_no_answer(seed: int) -> None:
    words = ["a", "th", " o", "\n", ".", "/", "é"]
    constraint = constraint_of(completion(bad_words=words))
    assert constraint is not None
    rng = Random(seed)
    text = random_answer(constraint.grammar, rng, end_at=0.02)
    assert not any(word in text for word in words)


def test_only_allowed_tokens_are_taken() -> None:
    constraint = constraint_of(completion(allowed_token_ids=[300, 301, 305, 300]))
    assert constraint is not None
    assert constraint.param == "allowed_token_ids"
    assert constraint.grammar.source == "start: <[300,301,305]>*"
    pieces = "|".join(re.escape(CHECKPOINT.decode([token])) for token in (300, 301, 305))
    texts = [random_answer(constraint.grammar, Random(seed), end_at=0.05) for seed in range(5)]
    assert all(re.fullmatch(f"({pieces})*", text) for text in texts)
    assert any(texts)


async def test_a_cache_salt_travels_and_is_no_empty_text(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        await send(port, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "cache_salt": "tenant"})
        assert cluster.workers["w0"].requests[0].sampling.cache_salt == "tenant"
        answer = await send(port, "POST", COMPLETIONS, {"prompt": "a", "cache_salt": ""})
        assert (answer.status, answer.error["param"]) == (400, "cache_salt")


async def test_tokens_as_ids(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = await with_logprobs(cluster)
        body = {"prompt": "a", "max_tokens": len(FOX), "logprobs": 1, "return_tokens_as_token_ids": True}
        logprobs = (await send(port, "POST", COMPLETIONS, body)).json["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in FOX]
        assert logprobs["text_offset"] == [len(TOKENIZER.decode(FOX[:count])) for count in range(len(FOX))]
        chat = {"messages": [USER], "max_tokens": 2, "logprobs": True, "return_tokens_as_token_ids": True}
        content = (await send(port, "POST", CHAT, chat)).json["choices"][0]["logprobs"]["content"]
        assert content[0]["token"] == f"token_id:{FOX[0]}"
        assert bytes(content[0]["bytes"]).decode() == TOKENIZER.decode(FOX[:1])


async def test_text_offsets_count_in_the_text_that_is_returned(model_dir: Path) -> None:
    async with running(model_dir) as cluster:
        port = await with_logprobs(cluster)
        body = {"prompt": "你好 fox", "max_tokens": len(FOX), "logprobs": 1, "echo": True}
        choice = (await send(port, "POST", COMPLETIONS, body)).json["choices"][0]
        offsets, text = choice["logprobs"]["text_offset"], choice["text"]
        prompt = TOKENIZER.encode("你好 fox").ids
        assert text == "你好 foxthe fox"
        assert offsets[len(prompt) :] == [6 + len(TOKENIZER.decode(FOX[:count])) for count in range(len(FOX))]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        assert offsets[len(prompt) - 1] < 6, "a character of several tokens counts once"
        stream = events((await send(port, "POST", COMPLETIONS, {**body, "stream": True})).body)
        streamed = [event["choices"][0]["logprobs"]["text_offset"] for event in stream]
        assert [offset for part in streamed for offset in part] == offsets


async def test_prompts_are_truncated_from_the_left(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        port = cluster.frontend.port
        long = list(range(10, 210)) * 5
        for prompt, keep, expected in (
            (long, 3, long[-3:]),
            (long, -1, long[-511:]),
            ("the fox " * 2000, 2, TOKENIZER.encode("the fox " * 2000).ids[-2:]),
        ):
            body = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": keep}
            assert (await send(port, "POST", COMPLETIONS, body)).status == 200
            assert list(cluster.workers["w0"].requests[-1].prompt_token_ids) == expected
        for keep in (0, -2, 513):
            answer = await send(port, "POST", COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": keep})
            assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_final_message_is_continued(model_dir: Path, stream: bool) -> None:
    async with running(model_dir, Script((*FOX, EOS), stop_at=len(FOX) + 1)) as cluster:
        messages = [USER, {"role": "assistant", "content": "See "}]
        body = {"messages": messages, "continue_final_message": True, "echo": True, "stream": stream}
        answer = await send(cluster.frontend.port, "POST", CHAT, body)
        if stream:
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in events(answer.body))
        else:
            text = answer.json["choices"][0]["message"]["content"]
        assert text == "See the fox"
        prompt = TOKENIZER.decode(cluster.workers["w0"].requests[0].prompt_token_ids)
        assert prompt == "[user] x\n[assistant] See "


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"messages": [USER, {"role": "assistant", "content": "a"}], "add_generation_prompt": True},
    ],
)
async def test_what_cannot_be_continued_is_refused(model_dir: Path, fields: dict[str, object]) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        answer = await send(cluster.frontend.port, "POST", CHAT, {**fields, "continue_final_message": True})
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")
