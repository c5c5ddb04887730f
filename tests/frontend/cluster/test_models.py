"""Several models behind one frontend, and one name that passes from old weights to new ones."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from tests.frontend.doubles import FakeCluster, Script, running
from tests.frontend.raw_http import send
from tests.patience import PATIENCE_S

from kvrelay.config import WorkerRole
from kvrelay.control.base import WatchEvent
from kvrelay.data.tokenizer_files import tokenizer_fingerprint
from kvrelay.frontend.api import server as server_module
from kvrelay.frontend.tokens.tokenizer import load_tokenizer

BODY: dict[str, object] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "return_token_ids": True}


async def tokens_of(cluster: FakeCluster) -> list[int]:
    assert cluster.frontend is not None
    answer = await send(cluster.frontend.port, "POST", "/v1/completions", BODY)
    assert answer.status == 200, answer.body
    tokens: list[int] = answer.json["choices"][0]["token_ids"]
    return tokens


async def test_models_come_with_their_first_worker_and_go_with_their_last(model_dir: Path) -> None:
    async with running(model_dir, Script()) as cluster:
        frontend = cluster.frontend
        assert frontend is not None

        async def names() -> list[str]:
            listed = (await send(frontend.port, "GET", "/v1/models")).json["data"]
            return [model["id"] for model in listed]

        assert await names() == ["tiny"]
        await cluster.add_worker("w1", Script(tokens=(20,)), model="other")
        await cluster.until(lambda: len(frontend.cluster.models) == 2)
        assert await names() == ["tiny", "other"]
        answer = await send(frontend.port, "POST", "/v1/completions", {**BODY, "model": "other"})
        assert answer.json["choices"][0]["token_ids"] == [20, 20]
        assert await tokens_of(cluster) == [10, 10]

        await cluster.deregister("w0")
        await cluster.until(lambda: len(frontend.cluster.models) == 1)
        assert await names() == ["other"]


async def test_a_frontend_listens_once_it_is_connected_to_the_workers(model_dir: Path) -> None:
    """It may share its port with others, which would have served who is sent here too early."""
    cluster = FakeCluster(model_dir)
    try:
        for number in range(3):
            await cluster.add_worker(f"w{number}", Script())
        gone = await cluster.add_worker("gone", Script())
        await gone.die()
        frontend = await cluster.start()
        assert frontend.cluster.model(None).worker_ids == ["w0", "w1", "w2"]
    finally:
        await cluster.close()


async def test_a_model_that_may_come_is_not_missing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 404 ends a client's attempts, and another frontend at this port serves the model."""
    monkeypatch.setattr(server_module, "SYNC_TIMEOUT_S", 0.0)
    cluster = FakeCluster(model_dir)
    may_list = asyncio.Event()
    watch = cluster.control.discovery.watch

    async def watch_later(prefix: str) -> AsyncIterator[WatchEvent]:
        await may_list.wait()
        async for event in watch(prefix):
            yield event

    monkeypatch.setattr(cluster.control.discovery, "watch", watch_later)
    try:
        frontend = await cluster.start()

        async def status(model: str) -> int:
            answer = await send(frontend.port, "POST", "/v1/completions", {**BODY, "model": model})
            shown = await send(frontend.port, "GET", f"/v1/models/{model}")
            assert shown.status == answer.status
            for each in (answer, shown):
                assert ("retry-after" in each.headers) == (answer.status == 503)
            return answer.status

        assert await status("tiny") == 503, "not listed yet"
        assert (await send(frontend.port, "GET", "/v1/models")).status == 503
        may_list.set()
        assert await frontend.cluster.wait_synced(PATIENCE_S)
        assert (await send(frontend.port, "GET", "/v1/models")).json["data"] == []
        assert await status("tiny") == 503, "no worker has come yet"
        gone = await cluster.add_worker("gone", Script(), model="other")
        await gone.die()
        await cluster.add_worker("w0", Script())
        await cluster.until(lambda: bool(frontend.cluster.models))
        assert await status("other") == 503, "listed, and not connected"
        assert await status("unknown") == 404
    finally:
        may_list.set()
        await cluster.close()


async def test_other_weights_under_a_name_wait_for_the_last_old_worker(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are continued on any worker of their model, so these must not be mixed."""
    async with running(model_dir, Script(tokens=(10,))) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        new = await cluster.add_worker("w1", Script(tokens=(20,)), weights_fingerprint="new")
        await cluster.until(lambda: "or another tokenizer serve the name tiny" in caplog.text)
        assert [await tokens_of(cluster) for _ in range(3)] == [[10, 10]] * 3
        assert not new.requests

        await cluster.deregister("w0")
        await cluster.until(lambda: [model.worker_ids for model in frontend.cluster.models] == [["w1"]])
        assert await tokens_of(cluster) == [20, 20]


async def test_a_checkpoint_that_cannot_be_read_is_tried_again(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = Path(shutil.copytree(model_dir, tmp_path / "damaged"))
    template = damaged / "chat_template.jinja"
    template.write_bytes(b"\xff")
    async with running(model_dir, Script()) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        await cluster.add_worker("w1", Script(), model="other", model_path=str(damaged))
        await cluster.until(lambda: str(template) in caplog.text)
        template.write_text("{{ messages }}")
        await cluster.until(lambda: len(frontend.cluster.models) == 2)


async def test_an_unexpected_error_does_not_shut_a_worker_out(model_dir: Path) -> None:
    async with running(model_dir, Script()) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        outcomes = [OSError("too many open files"), load_tokenizer(model_dir)]
        frontend.cluster.tokenizer_of = Mock(side_effect=outcomes)
        await cluster.add_worker("w1", Script(), model="other")
        await cluster.until(lambda: len(frontend.cluster.models) == 2)


async def test_a_worker_that_waits_for_a_name_loads_no_tokenizer(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may wait for hours, and is looked at twice a second."""
    caplog.set_level(logging.DEBUG)
    async with running(model_dir, Script()) as cluster:
        assert cluster.frontend is not None
        cluster.frontend.cluster.tokenizer_of = Mock(side_effect=AssertionError("loaded for nobody"))
        await cluster.add_worker("w1", Script(), weights_fingerprint="new")
        await cluster.until(lambda: caplog.text.count("or another tokenizer serve the name tiny") >= 3)


async def test_a_worker_that_returns_to_a_name_now_taken_waits(model_dir: Path) -> None:
    async with running(model_dir, Script(tokens=(10,))) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        old = cluster.workers["w0"]
        await cluster.deregister("w0")
        await cluster.until(lambda: not frontend.cluster.models)
        await cluster.add_worker("w1", Script(tokens=(20,)), weights_fingerprint="new")
        await cluster.until(lambda: bool(frontend.cluster.models))

        await cluster.register(old)
        assert [await tokens_of(cluster) for _ in range(3)] == [[20, 20]] * 3
        await cluster.deregister("w1")
        await cluster.until(lambda: bool(frontend.cluster.models) and frontend.cluster.models[0].worker_ids == ["w0"])
        assert await tokens_of(cluster) == [10, 10]


@pytest.mark.parametrize(
    "value",
    [b"{", b"[" * 100_000, b'{"worker_id": "w0", "epoch": 9, "role": "prefill"}'],
    ids=["truncated", "nested", "incomplete"],
)
async def test_no_entry_ends_the_watch(model_dir: Path, value: bytes) -> None:
    async with running(model_dir, Script(), Script()) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        for key in ("evil", "w0"):
            await cluster.put_entry(key, value)
        await cluster.add_worker("w2", Script())
        await cluster.until(lambda: frontend.cluster.model(None).worker_ids == ["w0", "w1", "w2"])
        assert await tokens_of(cluster) == [10, 10]


async def test_an_entry_cannot_speak_for_another_worker(model_dir: Path) -> None:
    async with running(model_dir, Script()) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        forged = cluster.workers["w0"].info(model_dir, role=WorkerRole.PREFILL, epoch=99)
        await cluster.put_entry("evil", msgspec.json.encode(forged))
        await cluster.add_worker("w1", Script())
        await cluster.until(lambda: frontend.cluster.model(None).worker_ids == ["w0", "w1"])


async def test_a_served_worker_that_names_an_unknown_model_and_comes_back(model_dir: Path) -> None:
    """Its entry was overwritten, with a later epoch; when its own stands again it serves again."""
    async with running(model_dir, Script()) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        await cluster.register(cluster.workers["w0"], model="unknown", epoch=99)
        await cluster.until(lambda: frontend.cluster.count_workers()["tiny"] == 0)
        await cluster.register(cluster.workers["w0"])
        await cluster.until(lambda: frontend.cluster.count_workers()["tiny"] == 1)
        assert await tokens_of(cluster) == [10, 10]


async def test_limits_that_a_worker_lowered_come_back_when_it_leaves(model_dir: Path) -> None:
    async with running(model_dir, Script()) as cluster:
        frontend = cluster.frontend
        assert frontend is not None
        model = frontend.cluster.model(None)
        assert (model.max_model_len, model.vocab_size) == (512, 400)
        await cluster.add_worker("w1", Script(), max_model_len=256, vocab_size=300)
        await cluster.until(lambda: len(model.worker_ids) == 2)
        assert (model.max_model_len, model.vocab_size) == (256, 300)
        await cluster.deregister("w1")
        await cluster.until(lambda: model.worker_ids == ["w0"])
        assert (model.max_model_len, model.vocab_size) == (512, 400)


async def test_a_frontend_with_another_copy_of_the_tokenizer_is_refused_loudly(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With 200 and other text it would go unnoticed."""
    ours = tmp_path / "model"
    shutil.copytree(model_dir, ours)
    theirs = tokenizer_fingerprint(ours)
    (ours / "tokenizer_config.json").write_text('{"chat_template": "another"}')
    cluster = FakeCluster(ours)
    try:
        await cluster.add_worker("w0", Script(), tokenizer_fingerprint=theirs)
        frontend = await cluster.start()
        await cluster.until(lambda: "differs from the copy that w0 has" in caplog.text)
        answer = await send(frontend.port, "POST", "/v1/completions", BODY)
        assert answer.status in (404, 503)
        assert not cluster.workers["w0"].requests
        await cluster.add_worker("w1", Script(), tokenizer_fingerprint=tokenizer_fingerprint(ours))
        await cluster.until(lambda: [model.worker_ids for model in frontend.cluster.models] == [["w1"]])
        assert await tokens_of(cluster) == [10, 10]
    finally:
        await cluster.close()


async def test_an_adapter_is_a_model_with_a_parent(model_dir: Path) -> None:
    """Its requests carry its id, which names contents; other contents are served only once these are gone."""
    cluster = FakeCluster(model_dir)
    try:
        old = await cluster.add_worker("w0", Script(tokens=(10,)), adapters=("chat@1", "sql@1"))
        frontend = await cluster.start()
        listed = (await send(frontend.port, "GET", "/v1/models")).json["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [("tiny", None), ("chat", "tiny"), ("sql", "tiny")]
        shown = (await send(frontend.port, "GET", "/v1/models/sql")).json
        assert (shown["id"], shown["parent"]) == ("sql", "tiny")

        async def ask(model: str) -> tuple[int, str]:
            answer = await send(frontend.port, "POST", "/v1/completions", BODY | {"model": model})
            return answer.status, answer.json.get("model", "")

        for name, carried in (("tiny", ""), ("chat", "chat@1"), ("sql", "sql@1")):
            assert await ask(name) == (200, name)
            assert old.requests[-1].sampling.adapter == carried
        assert (await ask("sql@1"))[0] == (await ask("none"))[0] == 404

        new = await cluster.add_worker("w1", Script(tokens=(20,)), adapters=("chat@2",))
        await cluster.until(lambda: [model.worker_ids for model in frontend.cluster.models] == [["w0", "w1"]])
        for _ in range(4):
            assert await ask("chat") == (200, "chat")
            assert await ask("tiny") == (200, "tiny")
        assert {each.sampling.adapter for each in new.requests} == {""}
        await cluster.deregister("w0")
        await cluster.until(lambda: [model.worker_ids for model in frontend.cluster.models] == [["w1"]])
        assert await ask("chat") == (200, "chat")
        assert new.requests[-1].sampling.adapter == "chat@2"
        assert (await ask("sql"))[0] == 404
    finally:
        await cluster.close()


async def test_workers_may_have_different_adapters(model_dir: Path) -> None:
    """Each request runs on a worker that has its adapter; the list is that of all workers and follows them."""
    cluster = FakeCluster(model_dir)
    try:
        old = await cluster.add_worker("w0", Script(tokens=(10,)), adapters=("chat@1",))
        frontend = await cluster.start()
        new = await cluster.add_worker("w1", Script(tokens=(10,)), adapters=("chat@1", "sql@1"))
        await cluster.until(lambda: [model.worker_ids for model in frontend.cluster.models] == [["w0", "w1"]])

        async def ask(model: str) -> int:
            return (await send(frontend.port, "POST", "/v1/completions", BODY | {"model": model})).status

        async def listed() -> list[str]:
            return [each["id"] for each in (await send(frontend.port, "GET", "/v1/models")).json["data"]]

        assert await listed() == ["tiny", "chat", "sql"]
        for _ in range(8):
            assert await ask("sql") == await ask("chat") == await ask("tiny") == 200
        assert {each.sampling.adapter for each in old.requests} <= {"", "chat@1"}
        assert [each.sampling.adapter for each in new.requests].count("sql@1") == 8
        await cluster.deregister("w1")
        await cluster.until(lambda: [model.worker_ids for model in frontend.cluster.models] == [["w0"]])
        assert await listed() == ["tiny", "chat"]
        assert (await ask("sql"), await ask("chat")) == (404, 200)
    finally:
        await cluster.close()
