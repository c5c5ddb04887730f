"""The clusters that an operator's commands find without a control URL."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest

from kvrelay.cli.main import run
from kvrelay.errors import ConfigError
from kvrelay.launch.clusters import RunningCluster, announced, choose_cluster, running_clusters, this_process


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KVRELAY_CONTROL", raising=False)
    (tmp_path / "session").mkdir()
    return tmp_path


def cluster(port: int = 8000, namespace: str = "default") -> RunningCluster:
    return RunningCluster(
        *this_process(),
        port=port,
        url=f"http://127.0.0.1:{port}",
        model="m",
        shape="1P1D",
        control="nats://TOKEN@127.0.0.1:4222",
        discovery="",
        namespace=namespace,
    )


def test_only_the_user_can_read_it_and_it_ends_with_the_cluster(state: Path) -> None:
    with announced(cluster()):
        (file,) = state.rglob("*.json")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert file.is_relative_to(state / "session")
        assert choose_cluster(None) == cluster()
    assert not [*state.rglob("*.json")]
    with pytest.raises(ConfigError, match="no cluster of yours"):
        choose_cluster(None)


def test_a_full_disk_keeps_nothing_of_it(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        os.close(os_open(path, flags, mode))
        return os_open("/dev/full", os.O_WRONLY)

    os_open = os.open
    with monkeypatch.context() as disk:
        disk.setattr(os, "open", full)
        with announced(cluster()):
            disk.undo()
            assert running_clusters() == []
    assert not [*state.rglob("*.json")]


def test_what_dead_processes_left_is_ignored_and_removed(state: Path) -> None:
    place = state / "state" / "kvrelay" / "clusters"
    place.mkdir(parents=True)
    mine = cluster()
    for name, other in {
        "ended": msgspec.structs.replace(mine, pid=2**22 + 1),
        "reused": msgspec.structs.replace(mine, started_s=mine.started_s - 1000.0),
        "elsewhere": msgspec.structs.replace(mine, machine="another-host", pid=2**22 + 1),
    }.items():
        (place / f"{name}.json").write_text(json.dumps(msgspec.structs.asdict(other)))
    (place / "torn.json").write_text("{")
    assert running_clusters() == []
    assert {file.stem for file in place.iterdir()} == {"elsewhere", "torn"}


def test_of_two_one_must_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [cluster(8000), cluster(8001, "lab")]
    monkeypatch.setattr("kvrelay.launch.clusters.running_clusters", lambda: both)
    with pytest.raises(ConfigError, match=r"2 clusters of yours run here.*--cluster 8000.*--cluster 8001"):
        choose_cluster(None)
    with pytest.raises(ConfigError, match="port or process id 8002"):
        choose_cluster("8002")
    assert choose_cluster("8001") == both[1]
    assert choose_cluster(None, "lab") == both[1]


def test_without_a_home_that_can_be_written_a_cluster_serves(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(state / "file"))
    with announced(cluster()):
        assert running_clusters() == []


def test_commands_take_the_found_cluster_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    put = AsyncMock()
    monkeypatch.setattr("kvrelay.launch.admin.config_set", put)
    with announced(cluster(namespace="lab")):
        assert run(["config", "set", "router.temperature", "1"]) == 0
        assert (put.await_args.args[0].control, put.await_args.args[0].namespace) == (cluster().control, "lab")
        assert run(["config", "set", "router.temperature", "1", "--control", "nats://t@h:1"]) == 0
        assert (put.await_args.args[0].control, put.await_args.args[0].namespace) == ("nats://t@h:1", "default")
    assert run(["config", "set", "router.temperature", "1"]) == 2
