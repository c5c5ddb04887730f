"""The text of answers, for every kind of vocabulary, every API, whole and streamed, in both orders.

Expected texts are what transformers decodes of prompt and answer, without the prompt's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.zoo.cluster import CHAT, COMPLETIONS, MESSAGES, RESPONSES, body_of, zoo_cluster
from tests.zoo.models import zoo_model
from tests.zoo.vocabularies import END, OTHER, Kind, bytes_of

from kvrelay import LLM, SamplingParams

pytestmark = pytest.mark.slow

APIS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
PROMPT = "q"


@pytest.mark.parametrize("kind", Kind)
async def test_every_api_tells_the_same_text(kind: Kind, tmp_path: Path) -> None:
    script = (PROMPT, " there", " cat", OTHER, *bytes_of(kind, "🙂"), "!", END)
    model = zoo_model(tmp_path / "zoo", kind, script)
    expected = model.decoded(*script[1:], after=PROMPT)
    assert expected == " there cat🙂!"
    async with zoo_cluster(model.directory) as cluster:
        for path in APIS:
            for stream in (False, True):
                seen = await cluster.ask(path, body_of(path, PROMPT), stream=stream)
                assert (path, stream, seen.text) == (path, stream, expected)


@pytest.mark.parametrize("kind", [Kind.BYTE_LEVEL, Kind.LLAMA2, Kind.MISTRAL, Kind.GEMMA])
async def test_both_orders_tell_the_same_text(kind: Kind, tmp_path: Path) -> None:
    script = (PROMPT, " there", " cat", *bytes_of(kind, "🙂"), "!", END)
    model = zoo_model(tmp_path / "zoo", kind, script)
    async with zoo_cluster(model.directory, prefill=1) as cluster:
        for order in ("decode-first", "prefill-first"):
            for stream in (False, True):
                seen = await cluster.ask(COMPLETIONS, body_of(COMPLETIONS, PROMPT), stream=stream, order=order)
                assert seen.text == " there cat🙂!"


@pytest.mark.parametrize("kind", Kind)
async def test_stop_strings_echo_and_logprobs(kind: Kind, tmp_path: Path) -> None:
    smile = bytes_of(kind, "🙂")
    script = (PROMPT, " there", "cat", " cat", *smile, END)
    model = zoo_model(tmp_path / "zoo", kind, script)
    async with zoo_cluster(model.directory) as cluster:
        for stream in (False, True):
            stopped = await cluster.ask(COMPLETIONS, body_of(COMPLETIONS, PROMPT, stop=[" c"]), stream=stream)
            assert (stopped.text, stopped["finish"]) == (" therecat", "stop")
            at_once = await cluster.ask(COMPLETIONS, body_of(COMPLETIONS, PROMPT, stop=[" t"]), stream=stream)
            assert (at_once.text, at_once["finish"]) == ("", "stop")
            echoed = await cluster.ask(COMPLETIONS, body_of(COMPLETIONS, PROMPT, echo=True), stream=stream)
            assert echoed.text == PROMPT + " therecat cat🙂"
        answer = await cluster.send(COMPLETIONS, body_of(COMPLETIONS, PROMPT, logprobs=3, max_tokens=3))
        logprobs = answer.json["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [" there", "cat", " cat"]
        assert logprobs["text_offset"] == [0, 6, 9]
        assert all(len(top) == 3 for top in logprobs["top_logprobs"]), "no two tokens have one text"
        body = body_of(CHAT, PROMPT, logprobs=True, max_tokens=7)
        content = (await cluster.send(CHAT, body)).json["choices"][0]["logprobs"]["content"]
        assert [bytes(each["bytes"]) for each in content] == [
            b" there",
            b"cat",
            b" cat",
            *(bytes([byte]) for byte in "🙂".encode()),
        ]


@pytest.mark.parametrize("padding", [0, 7, -1])
@pytest.mark.parametrize("kind", [Kind.BYTE_LEVEL, Kind.QWEN, Kind.TEKKEN])
async def test_any_tokens_have_the_text_that_transformers_decodes(kind: Kind, padding: int, tmp_path: Path) -> None:
    """The mock engine writes any token, also bytes that are no characters, and rows that are no token."""
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, " there", "cat", " cat", "é", END), padding=padding)
    async with zoo_cluster(model.directory, "mock") as cluster:
        for number in range(4):
            body = body_of(COMPLETIONS, f"{number}q", return_token_ids=True, max_tokens=24, ignore_eos=True)
            choice = (await cluster.send(COMPLETIONS, body)).json["choices"][0]
            prompt, token_ids = choice["prompt_token_ids"], choice["token_ids"]
            assert choice["text"] == model.text_after(prompt, token_ids)
            assert (await cluster.ask(COMPLETIONS, body, stream=True)).text == choice["text"]


@pytest.mark.parametrize("kind", [Kind.BYTE_LEVEL, Kind.LLAMA2])
def test_the_python_api_tells_the_same_text(kind: Kind, tmp_path: Path) -> None:
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, " there", " cat", *bytes_of(kind, "🙂"), "!", END))
    with LLM(model.directory, num_threads=1, num_blocks=64) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0))
        assert output.text == " there cat🙂!"
        (chat,) = llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(temperature=0.0))
        assert chat.text == " there cat🙂!"


@pytest.mark.parametrize("kind", [Kind.BYTE_LEVEL, Kind.LLAMA2])
async def test_an_answer_completes_the_prompts_character(kind: Kind, tmp_path: Path) -> None:
    """Token ids as a prompt may end inside a character, for example those of an answer that was cut."""
    smile = bytes_of(kind, "🙂")
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, *smile, " cat", END))
    async with zoo_cluster(model.directory) as cluster:
        for size in range(1, 4):
            prompt = [model.id(piece) for piece in (PROMPT, *smile[:size])]
            for stream in (False, True):
                body = {**body_of(COMPLETIONS, ""), "prompt": prompt}
                assert (await cluster.ask(COMPLETIONS, body, stream=stream)).text == "🙂 cat"
