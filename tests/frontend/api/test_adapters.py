"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: what operators are told, and what users may ask for."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.adapters import write_adapter
from tests.frontend.doubles import FakeCluster, Script
from tests.frontend.raw_http import Answer, send
from tests.patience import skip

from kvrelay.config import MetricsConfig
from kvrelay.control.base import WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.control_codec import decode_adapter
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import WorkerUnavailableError
from kvrelay.frontend.cluster import adapters as adapters_module
from kvrelay.http.api_keys import new_api_key

JSON = {"content-type": "application/json"}
BODY = {"prompt": [5, 6, 7], "max_tokens": 2}
ROOM = {"max_adapters": 4, "engine": "vllm"}


class Loading:
    """A cluster whose workers load what the control plane says, as far as ``refusals`` (by worker) let them. A worker
    in ``silent`` does nothing."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.refusals: dict[str, str] = {}
        self.silent: set[str] = set()
        self.entries: dict[str, AdapterEntry] = {}

    @property
    def port(self) -> int:
        assert self.cluster.frontend is not None
        return self.cluster.frontend.port

    async def follow(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def apply(event: WatchEvent) -> None:
            name = self.cluster.keys.adapter_name(event.key)
            self.entries.pop(name, None)
            if event.kind is WatchKind.PUT:
                self.entries[name] = decode_adapter(name, event.value)
            tasks.add(asyncio.create_task(self.register()))

        await follow(self.cluster.control.discovery, self.cluster.keys.adapters, apply)

    async def register(self) -> None:
        ids = tuple(entry.id for entry in self.entries.values())
        for worker in self.cluster.workers.values():
            if worker.worker_id not in self.silent:
                reason = self.refusals.get(worker.worker_id)
                shown = {"adapters": ids} if reason is None else {"refused_adapters": dict.fromkeys(ids, reason)}
                await self.cluster.register(worker, **ROOM, **shown)

    async def load(self, path: Path | str, name: str = "sql", **more: object) -> Answer:
        body = {"lora_name": name, "lora_path": str(path), **more}
        return await send(self.port, "POST", "/v1/load_lora_adapter", body, JSON)

    async def unload(self, name: str = "sql") -> Answer:
        return await send(self.port, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, JSON)

    async def ask(self, model: str) -> int:
        return (await send(self.port, "POST", "/v1/completions", BODY | {"model": model})).status

    async def listed(self) -> dict[str, str]:
        """Names, each with its root."""
        cards = (await send(self.port, "GET", "/v1/models")).json["data"]
        return {card["id"]: card["root"] for card in cards}


@asynccontextmanager
async def loading(model_dir: Path, num_workers: int = 2, **settings: object) -> AsyncIterator[Loading]:
    cluster = FakeCluster(model_dir)
    found = Loading(cluster)
    following = asyncio.create_task(found.follow())
    try:
        for number in range(num_workers):
            await cluster.add_worker(f"w{number}", Script(), **ROOM)
        frontend = await cluster.start(**settings)
        await cluster.until(lambda: len(frontend.cluster.model(None).worker_ids) == num_workers)
        yield found
    finally:
        await end_tasks([following])
        await cluster.close()


def error_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["message"]


async def test_an_adapter_is_loaded_asked_for_and_unloaded(model_dir: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "files", 1)
    async with loading(model_dir) as found:
        assert await found.ask("sql") == 404
        answer = await found.load(path)
        assert (answer.status, answer.body.decode()) == (200, "Success: LoRA adapter 'sql' added successfully.")
        entry = found.entries["sql"]
        assert (entry.model, entry.path) == ("tiny", str(path))
        assert await found.listed() == {"tiny": str(model_dir), "sql": str(path)}
        assert await found.ask("sql") == await found.ask("tiny") == 200
        carried = [each.sampling.adapter for worker in found.cluster.workers.values() for each in worker.requests]
        assert sorted(carried) == ["", entry.id]
        status, message = error_of(await found.load(path))
        assert (status, message.partition(".")[0]) == (400, "The lora adapter 'sql' has already been loaded")
        answer = await found.unload()
        assert (answer.status, answer.body.decode()) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert list(await found.listed()) == ["tiny"]
        assert await found.ask("sql") == 404
        assert error_of(await found.unload()) == (404, "The lora adapter 'sql' cannot be found.")
        # Other contents under the name, once it is free.
        shutil.rmtree(path)
        write_adapter(path, 2)
        assert (await found.load(path)).status == 200
        assert found.entries["sql"].digest != entry.digest
        assert await found.ask("sql") == 200


async def test_other_frontends_and_later_ones_know_what_was_loaded(model_dir: Path, tmp_path: Path) -> None:
    """A worker may come and go meanwhile: its adapter is told to retry, not unknown."""
    path = write_adapter(tmp_path / "files", 1)
    async with loading(model_dir) as found:
        assert (await found.load(path, "org/sql")).status == 200
        first = found.cluster.frontend
        assert first is not None
        await first.close()
        found.silent.add("w0")
        await found.cluster.register(found.cluster.workers["w0"], **ROOM)
        frontend = await found.cluster.start()
        await found.cluster.until(lambda: len(frontend.cluster.model("org/sql").worker_ids) == 2)
        assert await found.ask("org/sql") == 200
        assert [each.sampling.adapter for each in found.cluster.workers["w0"].requests] == []
        await found.cluster.deregister("w1")
        await found.cluster.until(lambda: frontend.cluster.model(None).worker_ids == ["w0"])
        assert list(await found.listed()) == ["tiny"], "no worker has it"
        answer = await send(found.port, "POST", "/v1/completions", BODY | {"model": "org/sql"})
        assert error_of(answer) == (503, "no worker has the adapter `org/sql` at the moment")
        assert await found.ask("none") == 404
        assert await found.ask("tiny") == 200


async def test_a_name_that_is_unloaded_gets_no_new_request_while_workers_still_publish_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "UNLOAD_TIMEOUT_S", 0.01)
    async with loading(model_dir) as found:
        assert (await found.load(write_adapter(tmp_path / "files", 1))).status == 200
        found.silent |= {"w0", "w1"}
        assert (await found.unload()).status == 200
        assert await found.ask("sql") == 404
        assert list(await found.listed()) == ["tiny"]
        assert (await found.unload()).status == 404


async def test_what_one_worker_cannot_load_is_loaded_by_none(model_dir: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "files", 1)
    async with loading(model_dir) as found:
        found.refusals["w1"] = "adapter sql was replaced"
        assert error_of(await found.load(path)) == (400, "worker w1: adapter sql was replaced")
        assert found.entries == {}
        assert await found.ask("sql") == 404
        found.refusals.clear()
        assert (await found.load(path)).status == 200


@pytest.mark.parametrize("silent", [{"w0"}, {"w0", "w1"}])
async def test_a_worker_that_does_not_answer_holds_no_adapter_up(model_dir: Path, silent: set[str]) -> None:
    """One that has it is enough."""
    async with loading(model_dir) as found:
        found.silent = silent
        frontend = found.cluster.frontend
        assert frontend is not None
        adapters = frontend.cluster.adapters
        asking = asyncio.create_task(adapters.load(AdapterEntry("sql", "tiny", "/adapters/sql", "0" * 16)))
        await found.cluster.until(lambda: "sql" in adapters.entries)
        if len(silent) == 1:
            await found.cluster.until(lambda: "sql" in frontend.cluster.model(None).adapters)
        skip(adapters_module.LOAD_TIMEOUT_S)
        if len(silent) == 1:
            await asking
            assert await found.ask("sql") == 200
        else:
            with pytest.raises(WorkerUnavailableError, match="no worker has loaded adapter sql in time: w0, w1"):
                await asking
            assert await found.ask("sql") == 404


async def test_bad_loads_are_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "files", 1)
    torn = write_adapter(tmp_path / "torn", 1)
    (torn / "adapter_model.safetensors").write_bytes(b"\x10\x00")
    async with loading(model_dir) as found:
        for answer, status, reason in (
            (await found.load(""), 400, "Both 'lora_name' and 'lora_path' must be provided."),
            (await found.load(path, ""), 400, "Both 'lora_name' and 'lora_path' must be provided."),
            (
                await found.load(tmp_path / "none"),
                404,
                f"No such file or directory on {socket.gethostname()}; frontends",
            ),
            (await found.load(path / "adapter_config.json"), 404, "Not a directory"),
            (await found.load(torn), 400, "no complete safetensors file"),
            (await found.load(path, "tiny"), 400, "The lora adapter 'tiny' conflicts with a served base model."),
            (await found.load(path, "a\nb"), 400, "printable"),
            (await found.load(path, "a" * 257), 400, "256"),
            (await found.load(path, load_inplace=True), 400, "load_inplace is not supported"),
            (await found.load(path, base_model_name="other"), 404, "other"),
            (await found.unload(""), 400, "'lora_name' needs to be provided"),
            (await send(found.port, "POST", "/v1/load_lora_adapter", {"lora_name": "x"}, JSON), 400, "lora_path"),
            (await send(found.port, "POST", "/v1/load_lora_adapter", b"{", JSON), 400, "JSON"),
            (
                await send(
                    found.port,
                    "POST",
                    "/v1/load_lora_adapter",
                    {"lora_name": "x", "lora_path": str(path)},
                    {"content-type": "text/plain"},
                ),
                400,
                "Only 'application/json' is allowed",
            ),
        ):
            assert answer.status == status, answer.body
            assert reason in error_of(answer)[1]
        assert found.entries == {}
        await found.cluster.add_worker("m0", Script(), engine="mock")
        frontend = found.cluster.frontend
        assert frontend is not None
        await found.cluster.until(lambda: len(frontend.cluster.model(None).worker_ids) == 3)
        status, message = error_of(await found.load(path))
        assert status == 400
        assert message.startswith("worker m0 (engine mock) loads no adapters at run time")


async def test_an_adapter_of_the_workers_start_is_neither_replaced_nor_unloaded(
    model_dir: Path, tmp_path: Path
) -> None:
    async with loading(model_dir) as found:
        await found.cluster.register(found.cluster.workers["w0"], **ROOM, adapters=("sql@1",))
        frontend = found.cluster.frontend
        assert frontend is not None
        await found.cluster.until(lambda: "sql" in frontend.cluster.model(None).adapters)
        assert error_of(await found.load(write_adapter(tmp_path / "files", 1)))[0] == 400
        status, message = error_of(await found.unload())
        assert (status, "--lora-dir" in message) == (400, True)


async def test_only_operators_load_adapters(model_dir: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "files", 1)
    (user, user_line), (operator, operator_line) = new_api_key("alice"), new_api_key("chief")
    (tmp_path / "keys").write_text(user_line)
    (tmp_path / "operators").write_text(operator_line)
    settings = {
        "api_keys_file": str(tmp_path / "keys"),
        "monitoring": MetricsConfig(metrics_keys_file=str(tmp_path / "operators")),
    }
    async with loading(model_dir, **settings) as found:

        async def call(path: str, body: dict[str, object], key: str) -> Answer:
            known = {"authorization": f"Bearer {key}"} if key else {}
            return await send(found.port, "POST", path, body, JSON | known)

        body = {"lora_name": "sql", "lora_path": str(path)}
        for key, status in (("", 401), ("wrong", 401), (user, 403), (operator, 200)):
            assert (await call("/v1/load_lora_adapter", body, key)).status == status
        for key, status in (("", 401), (user, 403), (operator, 200)):
            assert (await call("/v1/unload_lora_adapter", {"lora_name": "sql"}, key)).status == status
