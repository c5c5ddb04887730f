"""The start of ``serve``, without processes."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from kvrelay.config import (
    EngineConfig,
    FrontendConfig,
    MetricsConfig,
    RouterConfig,
    RunnerConfig,
    WorkerConfig,
    WorkerRole,
)
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import FatalError
from kvrelay.http import reserve_port
from kvrelay.launch.children import Child
from kvrelay.launch.serve import LocalCluster, ServeConfig


def serve_config(model_path: Path) -> ServeConfig:
    common = WorkerConfig(model_path=model_path, model="tiny")
    workers = (replace(common, role=WorkerRole.PREFILL), replace(common, role=WorkerRole.DECODE))
    return ServeConfig(workers, workers, FrontendConfig(port=0), RouterConfig())


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
async def test_a_broken_tokenizer_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Frontends would try again until the start timeout, and ``serve`` would wait for them."""
    path = Path(shutil.copytree(bundled_checkpoint_path(), tmp_path / "model"))
    (path / name).write_text("{% for")
    cluster = LocalCluster(serve_config(path))
    steps = Mock()
    monkeypatch.setattr("kvrelay.launch.serve.on_terminate", lambda stop: None)
    monkeypatch.setattr(cluster, "start", AsyncMock(side_effect=steps.start))
    monkeypatch.setattr("kvrelay.launch.serve.TOKENIZER_CHECK_AFTER_S", 0.0)
    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", AsyncMock())
    monkeypatch.setattr("kvrelay.launch.serve.list_workers", AsyncMock(return_value=[]))
    monkeypatch.setattr(cluster, "shut_down", AsyncMock(side_effect=steps.stop))
    with pytest.raises(FatalError) as caught:
        await cluster.run()
    assert str(path / name) in caught.value.message
    assert caught.value.exit_code == 1
    assert [call[0] for call in steps.method_calls] == ["start", "stop"]


def test_an_extra_worker_has_the_settings_of_its_kind_and_ports_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--tp-decode 2 --block-size-decode 32 --metrics-port N``: the decode worker has N + 1."""
    started: list[list[str]] = []

    def start(name: str, command: list[str], **_: object) -> Child:
        started.append(command)
        return Child(name, command, Mock(poll=lambda: None))

    monkeypatch.setattr("kvrelay.launch.serve.start_child", start)
    with reserve_port("127.0.0.1", 0) as reserved:
        port = int(reserved.getsockname()[1])
    common = WorkerConfig(model_path=Path("m"), model="tiny", metrics=MetricsConfig(metrics_port=port))
    prefill = replace(common, role=WorkerRole.PREFILL)
    decode = replace(common, role=WorkerRole.DECODE, engine=EngineConfig(block_size=32), runner=RunnerConfig(tp=2))
    second = replace(decode, metrics=MetricsConfig(metrics_port=port + 1))
    cluster = LocalCluster(ServeConfig((prefill, second), (prefill, decode), FrontendConfig(port=0), RouterConfig()))
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH):
        cluster.start_ordered(role)
    words = [dict(itertools.pairwise(command)) for command in started]
    assert [each["--role"] for each in words] == ["prefill", "decode", "both"]
    assert [(each.get("--tp"), each.get("--block-size")) for each in words] == [(None, None), ("2", "32"), ("2", "32")]
    ports = [int(each["--metrics-port"]) for each in words]
    assert ports == sorted(set(ports))
    assert min(ports) > port + 1


async def test_ready_means_every_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a port, and each learns of the workers by itself, of one long before the other perhaps."""
    pids = [(7, 3), (8, 2), None, (7, 3), (9, 3), (8, 3)]
    answers = [(200, b'{"pid":%d,"workers":%d}' % pid) if pid else (503, b"{}") for pid in pids]
    told = iter(answers)

    async def call(*_: object, **__: object) -> tuple[int, bytes]:
        return next(told)

    config = serve_config(Path())
    cluster = LocalCluster(msgspec.structs.replace(config, workers=(*config.workers, config.workers[1])))
    cluster.frontends = [Mock(pid=7, exit_code=None), Mock(pid=8, exit_code=None)]
    monkeypatch.setattr("kvrelay.launch.serve.http_call", call)
    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", AsyncMock())
    monkeypatch.setattr("kvrelay.launch.serve.list_workers", AsyncMock(return_value=["a worker", "another", "a third"]))
    assert await cluster.until_ready()
    assert next(told, None) is None, "9 is no frontend of ours"


@pytest.mark.parametrize(
    ("host", "shown"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("::", "127.0.0.1"), ("", "127.0.0.1"), ("localhost", "localhost")],
)
def test_the_url_of_a_host_is_one_that_clients_reach(host: str, shown: str) -> None:
    frontend = FrontendConfig(host=host, port=8000)
    cluster = LocalCluster(msgspec.structs.replace(serve_config(Path()), frontend=frontend))
    assert cluster.url == f"http://{shown}:8000"


@pytest.mark.parametrize(("settings", "is_alone"), [({}, False), ({"access_log_file": "x"}, False), ({}, True)])
def test_stdout_is_left_to_the_access_log(
    capsys: pytest.CaptureFixture[str], settings: dict[str, str], is_alone: bool
) -> None:
    frontend = FrontendConfig(access_log="json" if settings or is_alone else "off", **settings)
    LocalCluster(msgspec.structs.replace(serve_config(Path()), frontend=frontend)).announce()
    out, err = capsys.readouterr()
    assert ("kvrelay is ready" in err, "kvrelay is ready" in out) == (is_alone, not is_alone)
