"""Engine openai: what a server writes is what a client gets, whether the server tells token ids or only text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.zoo.cluster import CHAT, COMPLETIONS, MESSAGES, RESPONSES, body_of, stream_events, with_tools, zoo_cluster
from tests.zoo.models import ZooModel, zoo_model
from tests.zoo.test_calls import HERMES_CALL
from tests.zoo.upstream import Event, upstream
from tests.zoo.vocabularies import END, OTHER, Kind, bytes_of

from kvrelay.worker.decode import serving

PROMPT = "q"
TEXT = " there was a cat🙂"
CUTS: dict[str, tuple[Event, ...]] = {
    "words": (Event(" there"), Event(" was"), Event(" a"), Event(" cat🙂", finish="stop")),
    "finish-apart": (Event(" there"), Event(" was a cat"), Event("🙂"), Event("", finish="stop")),
    "letters": (*map(Event, TEXT[:-1]), Event("🙂", finish="length")),
    "at-once": (Event(TEXT, finish="stop"),),
}
PHRASES = (" there", " was", " a", " cat", "there", "was", "cat")


def model_of(directory: Path, kind: Kind, *phrases: str) -> ZooModel:
    return zoo_model(directory, kind, (PROMPT, *phrases, END))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", Kind)
async def test_a_server_that_tells_only_text(kind: Kind, cut: str, tmp_path: Path) -> None:
    model = model_of(tmp_path / "zoo", kind, *PHRASES)
    async with upstream(CUTS[cut]) as url, zoo_cluster(model.directory, "openai", upstream=url) as cluster:
        for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
            for stream in (False, True):
                assert (await cluster.ask(path, body_of(path, PROMPT), stream=stream)).text == TEXT
        stopped = await cluster.ask(COMPLETIONS, body_of(COMPLETIONS, PROMPT, stop=[" ca"]))
        assert stopped.text == " there was a"


@pytest.mark.parametrize("kind", [Kind.BYTE_LEVEL, Kind.LLAMA2, Kind.MISTRAL])
async def test_text_comes_as_it_is_written(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All of it is here at once, and what waits together leaves as one.
    monkeypatch.setattr(serving, "joined", list)
    model = model_of(tmp_path / "zoo", kind, *PHRASES)
    async with upstream(CUTS["words"]) as url, zoo_cluster(model.directory, "openai", upstream=url) as cluster:
        answer = await cluster.send(COMPLETIONS, body_of(COMPLETIONS, PROMPT, stream=True))
        texts = [choice["text"] for event in stream_events(answer.body) for choice in event["choices"]]
        written = "".join(texts)
        ends = {len("".join(texts[:number])) for number in range(len(texts))}
        assert written == TEXT
        assert ends.issuperset({len(" there"), len(" there was"), len(" there was a")}), "no piece waits for the next"


@pytest.mark.parametrize("kind", Kind)
async def test_special_tokens_in_the_text_of_a_server(kind: Kind, tmp_path: Path) -> None:
    """Some tokenizers put a space after a special token, as before a beginning."""
    model = model_of(tmp_path / "zoo", kind, *PHRASES)
    written = (Event(" there"), Event(OTHER), Event("was"), Event(f"{OTHER}{OTHER} cat"), Event("!", finish="stop"))
    async with upstream(written) as url, zoo_cluster(model.directory, "openai", upstream=url) as cluster:
        for stream in (False, True):
            body = body_of(COMPLETIONS, PROMPT)
            seen = await cluster.ask(COMPLETIONS, {**body, "skip_special_tokens": False}, stream=stream)
            assert seen.text == f" there{OTHER}was{OTHER}{OTHER} cat!"
            assert (await cluster.ask(COMPLETIONS, body, stream=stream)).text == " therewas cat!"


@pytest.mark.parametrize("kind", [Kind.QWEN, Kind.QWEN_SPECIAL, Kind.BYTE_LEVEL])
async def test_calls_of_a_server_that_tells_only_text(kind: Kind, tmp_path: Path) -> None:
    model = model_of(tmp_path / "zoo", kind, *HERMES_CALL)
    pieces = ("Sure.", "<tool_call>", *HERMES_CALL, "</tool_call>")
    written = (*map(Event, pieces[:-1]), Event(pieces[-1], finish="stop"))
    async with (
        upstream(written) as url,
        zoo_cluster(model.directory, "openai", upstream=url, tool_call_parser="hermes") as cluster,
    ):
        for path in (CHAT, RESPONSES, MESSAGES):
            for stream in (False, True):
                seen = await cluster.ask(path, with_tools(path), stream=stream)
                assert (seen.text, seen["calls"]) == ("Sure.", [("add", {"a": 7})])


@pytest.mark.parametrize("kind", Kind)
async def test_a_server_that_tells_ids(kind: Kind, tmp_path: Path) -> None:
    """As vLLM: the token that ends the answer has an id and no text."""
    smile = bytes_of(kind, "🙂")
    model = model_of(tmp_path / "zoo", kind, " there", " cat")
    ids = [model.id(piece) for piece in (" there", OTHER, " cat", *smile, END)]
    written = (*(Event("", [token]) for token in ids[:-1]), Event("", ids[-1:], "stop"))
    async with upstream(written) as url, zoo_cluster(model.directory, "openai", upstream=url) as cluster:
        for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
            for stream in (False, True):
                assert (await cluster.ask(path, body_of(path, PROMPT), stream=stream)).text == " there cat🙂"
