"""The openai package against a real socket, with scripted workers."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from tests.frontend.doubles import CHAT_TEMPLATE, FakeCluster, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import send
from tests.lazily import openai

TOKENIZER = byte_level_tokenizer()
ANSWER = "Grüße, 你好 🙂 the fox."
TOKENS = tuple(TOKENIZER.encode(ANSWER).ids)
SCRIPT = Script(TOKENS, stop_at=None)


def client(cluster: FakeCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)


async def test_the_client_lists_the_models(model_dir: Path) -> None:
    async with running(model_dir, SCRIPT) as cluster, client(cluster) as api:
        models = await api.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await api.models.retrieve("tiny")).id == "tiny"


@pytest.mark.parametrize("name", ["org/name", "a/b/c d", "ünï/x:y%2F?#"])
async def test_a_model_is_found_by_a_name_with_slashes(model_dir: Path, name: str) -> None:
    async with running(model_dir) as cluster, client(cluster) as api:
        await cluster.add_worker("w0", SCRIPT, model=name)
        await cluster.until(lambda: bool(cluster.frontend.cluster.models))
        assert (await api.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError, match="other"):
            await api.models.retrieve("org/other")
        port = cluster.frontend.port
        for path in (f"/v1/models/{quote(name)}", f"/tokenizer_info?model={quote(name, safe='')}"):
            answer = await send(port, "GET", path)
            assert name in (answer.json.get("id"), answer.json.get("model")), answer
        assert b'endpoint="/v1/models/{id}"' in (await send(port, "GET", "/metrics")).body


async def test_the_client_gets_a_completion(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, cached=3)) as cluster, client(cluster) as api:
        answer = await api.completions.create(model="tiny", prompt="Hello fox", max_tokens=len(TOKENS))
        assert answer.choices[0].text == ANSWER
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(TOKENIZER.encode("Hello fox").ids)
        assert answer.usage.completion_tokens == len(TOKENS)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        request = cluster.workers["w0"].requests[0]
        assert list(request.prompt_token_ids) == TOKENIZER.encode("Hello fox").ids


@pytest.mark.parametrize("per_output", [1, 3, 100])
async def test_completion_stream_equals_whole(model_dir: Path, per_output: int) -> None:
    async with running(model_dir, Script(TOKENS, per_output=per_output)) as cluster, client(cluster) as api:
        stream = await api.completions.create(
            model="tiny", prompt=[1, 2, 3], max_tokens=len(TOKENS), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
        assert "".join(texts) == ANSWER
        assert not any("\ufffd" in text for text in texts)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(TOKENS)
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_choices_of_several_prompts_come_in_order(model_dir: Path) -> None:
    async with running(model_dir, SCRIPT) as cluster, client(cluster) as api:
        answer = await api.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=4, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        sent = cluster.workers["w0"].requests
        assert [request.sampling.seed for request in sent] == [7, 8, 7, 8]
        assert len({request.request_id for request in sent}) == 4
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)


async def test_the_client_gets_a_chat_answer(model_dir: Path) -> None:
    async with running(model_dir, SCRIPT) as cluster, client(cluster) as api:
        answer = await api.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "fox"}]},
            ],
            max_completion_tokens=len(TOKENS),
        )
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].message.role == "assistant"
        prompt = cluster.workers["w0"].requests[0].prompt_token_ids
        assert TOKENIZER.decode(list(prompt)) == "[system] Be brief.\n[user] Hi\nfox\n[assistant] "
        assert "raise_exception" in CHAT_TEMPLATE


async def test_the_client_streams_a_chat_answer(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, stop_at=len(TOKENS))) as cluster, client(cluster) as api:
        stream = await api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True, n=2
        )
        texts, finishes, roles = {0: "", 1: ""}, {}, {}
        async for chunk in stream:
            choice = chunk.choices[0]
            if choice.delta.role:
                roles[choice.index] = choice.delta.role
            assert choice.index in roles, "the role comes first"
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
        # The last token is the stop token: it counts, but is not shown.
        assert texts == {0: ANSWER[:-1], 1: ANSWER[:-1]}
        assert finishes == {0: "stop", 1: "stop"}


async def test_chat_without_max_tokens_may_use_the_whole_context(model_dir: Path) -> None:
    async with running(model_dir, Script(TOKENS, stop_at=2)) as cluster, client(cluster) as api:
        await api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        request = cluster.workers["w0"].requests[0]
        assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)


async def test_errors_become_the_clients_exceptions(model_dir: Path) -> None:
    async with running(model_dir, SCRIPT) as cluster, client(cluster) as api:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await api.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            await api.completions.create(model="tiny", prompt="x", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="two tools have the name f"):
            await api.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                tools=[{"type": "function", "function": {"name": "f"}}] * 2,
            )
