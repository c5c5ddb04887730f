"""Fields that promise something are honoured or refused by name; advice is accepted."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, get_type_hints

import msgspec
import pytest
from tests.executors.constrained import TOKENIZER as CHECKPOINT
from tests.executors.constrained import random_answer
from tests.frontend.api.test_api import FOX, with_logprobs
from tests.frontend.doubles import EOS, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import events, send
from tests.lazily import anthropic, openai

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.anthropic import CountTokensRequest, MessagesRequest
from kvrelay.frontend.api.fields import ADVICE, TABLES, RequestFields
from kvrelay.frontend.openai.requests import ChatCompletionRequest, CompletionRequest, parse_body
from kvrelay.frontend.openai.structured import constraint_of
from kvrelay.frontend.responses import InputTokensRequest, ResponsesRequest
from tools import field_table

TOKENIZER = byte_level_tokenizer()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}


CLIENTS: list[tuple[type[msgspec.Struct], Callable[[], Any]]] = [
    (CompletionRequest, lambda: openai.types.completion_create_params.CompletionCreateParamsBase),
    (ChatCompletionRequest, lambda: openai.types.chat.completion_create_params.CompletionCreateParamsBase),
    (ResponsesRequest, lambda: openai.types.responses.response_create_params.ResponseCreateParamsBase),
    (InputTokensRequest, lambda: openai.types.responses.input_token_count_params.InputTokenCountParams),
    (MessagesRequest, lambda: anthropic.types.message_create_params.MessageCreateParamsBase),
    (MessagesRequest, lambda: anthropic.types.beta.message_create_params.MessageCreateParamsBase),
    (CountTokensRequest, lambda: anthropic.types.message_count_tokens_params.MessageCountTokensParams),
]
BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params frequency_penalty ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p
    min_tokens model n presence_penalty priority prompt_logprobs repetition_detection repetition_penalty request_id
    response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids
    stream stream_interval stream_options structured_outputs temperature thinking_token_budget top_k top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    bootstrap_host bootstrap_port bootstrap_room custom_logit_processor custom_params data_parallel_rank
    disagg_prefill_dp_rank ebnf extra_key images_config json_schema lora_path ngram_corpus_id no_stop_trim regex
    return_cached_tokens_details return_hidden_states return_routed_experts rid routed_dp_rank routed_experts_start_len
    session_params stop_regex
"""
"""What vLLM (0.32) and SGLang (0.6) add to completions and to chats, and the names that they share with OpenAI."""
SERVERS = [
    (CompletionRequest, f"{BOTH} prompt echo suffix prompt_embeds best_of custom_labels"),
    (
        ChatCompletionRequest,
        f"""{BOTH} messages add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
        echo include_reasoning max_completion_tokens media_io_kwargs mm_processor_kwargs parallel_tool_calls
        reasoning_effort return_prompt_text tool_choice tools top_logprobs input_ids max_dynamic_patch min_dynamic_patch
        return_meta_info return_prompt_token_ids separate_reasoning stream_reasoning task use_audio_in_video""",
    ),
    (
        ResponsesRequest,
        """ignore_eos include_stop_str_in_output skip_special_tokens request_id mm_processor_kwargs priority cache_salt
        enable_response_messages previous_input_messages previous_response structured_outputs repetition_penalty seed
        stop logit_bias top_k vllm_xargs""",
    ),
]


@pytest.mark.parametrize("text", ["16.0", "1.6e1"])
def test_a_whole_number_may_be_written_as_a_float(text):
    """It is an integer in JSON Schema, and for vLLM; some languages have no other numbers."""
    body = (
        b'{"prompt": "x", "model": "m", "max_tokens": %s, "n": 2.0, "seed": -3e0, "temperature": 1.0}' % text.encode()
    )
    request = parse_body(body, CompletionRequest)
    assert (request.max_tokens, request.n, request.seed, request.temperature) == (16, 2, -3, 1.0)
    assert [type(each) for each in (request.max_tokens, request.n, request.seed)] == [int] * 3


@pytest.mark.parametrize("number", ["16.5", "-0.1", "1e-9", "NaN", "1e400", "-1e400", '"16"', "true", "[16.0]"])
def test_any_other_number_is_refused(number):
    with pytest.raises(InvalidInputError) as caught:
        parse_body(b'{"prompt": "x", "n": 1.0, "max_tokens": %s}' % number.encode(), CompletionRequest)
    assert caught.value.param == (None if number == "NaN" else "max_tokens")


@pytest.mark.parametrize(("kind", "params"), CLIENTS)
def test_every_field_of_the_official_clients_is_named(kind: type[msgspec.Struct], params: Callable[[], Any]) -> None:
    given = get_type_hints(params())
    assert len(given) > 10
    assert set(given) <= TABLES[kind].names


@pytest.mark.parametrize(("kind", "names"), SERVERS)
def test_every_field_of_other_servers_is_named(kind: type[msgspec.Struct], names: str) -> None:
    assert set(names.split()) <= TABLES[kind].names


@pytest.mark.parametrize("kind", TABLES)
def test_a_field_has_one_verdict(kind: type[msgspec.Struct]) -> None:
    table = TABLES[kind]
    lists = (table.done, table.renamed.keys(), table.refused.keys(), table.advice)
    assert len(table.names) == sum(map(len, lists))
    assert table.done == set(kind.__struct_fields__)


def test_the_page_has_this_table() -> None:
    page = field_table.PAGE.read_text(encoding="utf-8")
    assert page == field_table.with_section(page), "run: python tools/field_table.py"


@pytest.mark.parametrize("kind", TABLES)
def test_refused_fields_are_refused_by_name_and_null_is_absent(kind: type[msgspec.Struct]) -> None:
    table, fields = TABLES[kind], RequestFields("ignore")
    for name in (*table.renamed, *table.refused):
        with pytest.raises(InvalidInputError, match=re.escape(str(table.renamed.get(name, "not supported")))) as caught:
            fields.check(kind, {name: msgspec.Raw(b"17")})
        assert caught.value.param == name
        assert name in caught.value.message
        fields.check(kind, {name: msgspec.Raw(b"null")})
    for name, refusal in table.refused.items():
        for value in (refusal.harmless, refusal.harmless is True, [], {}, ""):
            fields.check(kind, {name: msgspec.Raw(msgspec.json.encode(value))})
        if refusal.harmless is True:
            with pytest.raises(InvalidInputError, match=name):
                fields.check(kind, {name: msgspec.Raw(b"false")})


def test_a_refused_field_that_asks_for_nothing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = RequestFields("ignore")
    given = {"use_beam_search": msgspec.Raw(b"false"), "suffix": msgspec.Raw(b"null")}
    for _ in range(2):
        fields.check(CompletionRequest, given)
    assert [record.getMessage() for record in caplog.records] == [
        "the field use_beam_search is accepted and has no effect (this is logged once)"
    ]


async def test_refused_and_harmless_fields_in_requests(model_dir: Path) -> None:
    async with running(model_dir, Script((10,)), on_unknown_field="refuse") as cluster:
        port = cluster.frontend.port
        for path, body, field in (
            (COMPLETIONS, {"prompt": "a"}, "tools"),
            (COMPLETIONS, {"prompt": "a"}, "max_new_tokens"),
            (CHAT, {"messages": [USER]}, "suffix"),
            (CHAT, {"messages": [USER]}, "thinking"),
            ("/v1/kvrelay/route", {"prompt": "a"}, "n_predict"),
            ("/tokenize", {"prompt": "a"}, "tools"),
            ("/detokenize", {"tokens": [10]}, "vllm_xargs"),
        ):
            answer = await send(port, "POST", path, {**body, field: "x"})
            assert (answer.status, answer.error["param"]) == (400, field)
        harmless = {"length_penalty": 1.0, "suffix": None, "use_beam_search": False, "tools": []}
        answer = await send(port, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1, **harmless})
        assert answer.status == 200


async def test_advice_is_accepted_and_logged_once(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": [USER], "max_tokens": 1, **{name: {"a": 1} for name in ADVICE}}
    async with running(model_dir, Script((10,)), on_unknown_field="refuse") as cluster:
        with caplog.at_level(logging.WARNING, "kvrelay.frontend.api.fields"):
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
        with caplog.at_level(logging.WARNING, "kvrelay.frontend.api.fields"):
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


@pytest.mark.parametrize("parser", ["none", "qwen3"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_final_message_is_continued(model_dir: Path, stream: bool, parser: str) -> None:
    async with running(model_dir, Script((*FOX, EOS), stop_at=len(FOX) + 1), reasoning_parser=parser) as cluster:
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
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
    ],
)
async def test_what_cannot_be_continued_is_refused(model_dir: Path, fields: dict[str, object]) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        answer = await send(cluster.frontend.port, "POST", CHAT, {**fields, "continue_final_message": True})
        assert (answer.status, answer.error["param"]) in [(400, "continue_final_message"), (400, "messages")]
