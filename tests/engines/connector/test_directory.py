"""A vLLM and a worker that find each other in a directory: stale, foreign and late copies move nothing."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.engines.vllm.staged import LAYOUT, Paged, VllmRequest

from kvrelay.engines.connector.directory import (
    CONFIG_KEY,
    ENGINE,
    ENGINE_LOCK,
    POOL,
    DirectoryPools,
    EngineEntry,
    StagingDirectory,
)
from kvrelay.engines.connector.terms import StagedKv, StagingPlace, encode_request
from kvrelay.engines.connector.tickets import TicketTable
from kvrelay.engines.hosted.backend import UnconfirmedError
from kvrelay.engines.openai import staged as staged_module
from kvrelay.engines.openai.staged import ServerStaging
from kvrelay.errors import ConfigError, InvalidInputError, KvrelayError

NUM_STAGED = 12
ENTRY = EngineEntry("vllm m scripted", LAYOUT, 64, 256)
TOKENS = list(range(100, 140))
STAGED = (7, 2, 9)


class _Vllm:
    """A vLLM whose connector has announced itself in the directory."""

    def __init__(self, path: Path, entry: EngineEntry = ENTRY) -> None:
        self._directory = StagingDirectory(str(path))
        self._lock = self._directory.hold(ENGINE_LOCK, "vLLM")
        self._directory.write(ENGINE, entry)
        self.paged = Paged(DirectoryPools(self._directory, entry))

    def run(self, name: str, params: object) -> int:
        """How many tokens were loaded. What is not loaded is computed; either way all KV must be right."""
        tokens = [*TOKENS, 5]
        blocks = self.paged.take(len(tokens))
        num_loaded = self.paged.run(VllmRequest(name, tokens, params), blocks)  # type: ignore[arg-type]
        self.paged.require(blocks, tokens, len(tokens))
        self.paged.scheduler.finished(name)
        return num_loaded

    def close(self) -> None:
        fd, self._lock = self._lock, -1
        if fd >= 0:
            os.close(fd)


class _Worker:
    def __init__(self, path: Path) -> None:
        self.staging = ServerStaging(str(path), "the server http://s")
        self._fd = os.memfd_create("staging")
        os.ftruncate(self._fd, NUM_STAGED * LAYOUT.block_bytes)
        self.staging.publish(StagingPlace(f"/proc/{os.getpid()}/fd/{self._fd}", NUM_STAGED, LAYOUT))

    def lend(self, op: str) -> staged_module.StagingUse:
        return self.staging.lend(encode_request(StagedKv(op, STAGED, len(TOKENS))))  # type: ignore[arg-type]

    def lose_memory(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self.staging.close()
        self.lose_memory()


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[_Vllm]:
    found = _Vllm(tmp_path / "staging")
    yield found
    found.close()


@pytest.fixture
def worker(vllm: _Vllm, tmp_path: Path) -> Iterator[_Worker]:
    found = _Worker(tmp_path / "staging")
    yield found
    found.close()


async def test_what_is_saved_for_one_request_is_loaded_for_another(vllm: _Vllm, worker: _Worker) -> None:
    save = worker.lend("save")
    assert not save.is_copied
    vllm.run("p", save.params)
    assert save.is_copied
    await save.end()
    load = worker.lend("load")
    assert vllm.run("d", load.params) == len(TOKENS)
    await load.end()


async def test_a_copy_after_the_end_moves_nothing(vllm: _Vllm, worker: _Worker) -> None:
    """The client has gone, and vLLM begins the request only now. Its blocks are another request's."""
    late = worker.lend("save")
    await late.end()
    other = worker.lend("save")
    vllm.run("late", late.params)
    assert not late.is_copied
    assert not other.is_copied
    vllm.run("p", other.params)
    await other.end()
    stale = worker.lend("load")
    await stale.end()
    assert vllm.run("stale", stale.params) == 0
    assert worker.lend("load").params != stale.params


async def test_blocks_are_free_only_when_a_copy_in_progress_has_ended(
    vllm: _Vllm, worker: _Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = StagingDirectory(str(worker.staging._directory.path)).read(POOL, StagingPlace)
    assert place is not None
    connector = TicketTable(Path(place.tickets), NUM_STAGED)
    monkeypatch.setattr(staged_module, "QUIET_TIMEOUT_S", 0.0)
    use = worker.lend("save")
    with connector.copying(STAGED, use.params["kvrelay"]["ticket"]) as may_copy:
        assert may_copy
        with pytest.raises(UnconfirmedError, match="in the middle of a copy"):
            await use.end()
    await worker.lend("save").end()


def test_a_copy_that_fails_is_not_confirmed(vllm: _Vllm, worker: _Worker) -> None:
    use = worker.lend("save")
    table = TicketTable(worker.staging._table._path, NUM_STAGED)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), table.copying(STAGED, use.params["kvrelay"]["ticket"]):
        raise ZeroDivisionError
    assert not use.is_copied
    assert worker.staging._table is not None
    assert worker.staging._table.is_quiet()


async def test_requests_of_a_worker_that_was_restarted_are_computed(
    vllm: _Vllm, worker: _Worker, tmp_path: Path
) -> None:
    before = worker.lend("load")
    worker.close()
    assert vllm.run("no worker", before.params) == 0
    again = _Worker(tmp_path / "staging")
    try:
        assert vllm.run("old pool", before.params) == 0
        save = again.lend("save")
        vllm.run("p", save.params)
        await save.end()
        assert vllm.run("d", again.lend("load").params) == len(TOKENS)
        assert [path.name for path in (tmp_path / "staging").glob("tickets-*")] == [
            f"tickets-{save.params['kvrelay']['pool']}"
        ]
    finally:
        again.close()


async def test_a_worker_that_was_killed_leaves_no_pool_that_is_used(vllm: _Vllm, tmp_path: Path) -> None:
    """Its file is in the directory, its memory is gone."""
    worker = _Worker(tmp_path / "staging")
    use = worker.lend("load")
    worker.lose_memory()
    assert vllm.run("d", use.params) == 0
    worker.staging.close()


async def test_another_model_at_the_server_is_noticed_on_both_sides(
    vllm: _Vllm, worker: _Worker, tmp_path: Path
) -> None:
    assert worker.staging.changed() is None
    use = worker.lend("load")
    vllm.close()
    other = _Vllm(tmp_path / "staging", msgspec.structs.replace(ENTRY, fingerprint="vllm other scripted"))
    try:
        assert other.run("d", use.params) == 0
        assert worker.staging.changed() == "the server http://s was vllm m scripted and is vllm other scripted now"
    finally:
        other.close()
    same = _Vllm(tmp_path / "staging")
    assert worker.staging.changed() is None
    same.close()


def test_each_end_is_there_once(vllm: _Vllm, worker: _Worker, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another worker uses the staging directory"):
        _Worker(tmp_path / "staging")
    with pytest.raises(ConfigError, match="another vLLM uses the staging directory"):
        _Vllm(tmp_path / "staging")


def _refusal(path: Path) -> str:
    with pytest.raises(InvalidInputError) as caught:
        ServerStaging(str(path), "the server http://s")
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_a_vllm_in_the_directory_the_worker_does_not_start(tmp_path: Path) -> None:
    assert "no vLLM with kvrelay's connector uses" in _refusal(tmp_path / "staging")
    _Vllm(tmp_path / "staging").close()
    assert "no vLLM with kvrelay's connector uses" in _refusal(tmp_path / "staging"), "it has ended"
    with pytest.raises(ConfigError, match="needs --upstream-staging DIR"):
        ServerStaging("", "the server")


def test_another_version_of_kvrelay_is_refused(vllm: _Vllm, worker: _Worker, tmp_path: Path) -> None:
    use = worker.lend("load")
    file = tmp_path / "staging" / POOL
    file.write_bytes(msgspec.json.encode({"version": 99}))
    assert vllm.run("d", use.params) == 0
    file.write_bytes(b"{")
    assert vllm.run("d", use.params) == 0
    worker.close()
    (tmp_path / "staging" / ENGINE).write_bytes(msgspec.json.encode({"version": 1}))
    assert "is of version 1, this is 2" in _refusal(tmp_path / "staging")


def test_a_directory_that_others_may_use_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    with pytest.raises(ConfigError, match="and to no one else"):
        StagingDirectory(str(shared))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        StagingDirectory(str(tmp_path / "file"))
    for config in ({}, {CONFIG_KEY: 5}, {CONFIG_KEY: ""}):
        with pytest.raises(ConfigError, match=f'needs "{CONFIG_KEY}"'):
            StagingDirectory.configured(config)


@pytest.mark.parametrize(
    "wrong", [{"pool": "", "ticket": 0}, {"ticket": 0}, {"ticket": -1}, {"ticket": 2**70}, {"pool": "guessed"}]
)
def test_a_request_that_is_not_the_workers_moves_nothing(
    vllm: _Vllm, worker: _Worker, wrong: dict[str, object]
) -> None:
    params = worker.lend("load").params
    assert vllm.run("d", {"kvrelay": {**params["kvrelay"], **wrong}}) == 0


def test_a_damaged_ticket_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table"
    with pytest.raises(KvrelayError, match="cannot be used"):
        TicketTable(file, 4)
    TicketTable(file, 4, create=True)
    with pytest.raises(KvrelayError, match="no ticket table of 5 blocks"):
        TicketTable(file, 5)


def test_the_lock_of_a_killed_connector_is_free(vllm: _Vllm, worker: _Worker) -> None:
    assert worker.staging._table is not None
    fd = os.open(worker.staging._table._path, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_RDLCK, 0, 0, 1, 0))
    assert not worker.staging._table.is_quiet()
    os.close(fd)
    assert worker.staging._table.is_quiet()
