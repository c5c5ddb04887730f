"""Arguments of the commands that speak to a running cluster."""

from __future__ import annotations

import socket
from unittest.mock import AsyncMock

import msgspec
import pytest

from kvrelay.cli.main import run
from kvrelay.config import ControlConfig, DisaggConfig, WorkerRole
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker, MemoryControlPlane
from kvrelay.core.workers import CallerInfo, WorkerInfo
from kvrelay.errors import WorkerUnavailableError
from kvrelay.launch.admin import config_get, config_set, config_unset
from kvrelay.launch.worker_calls import WorkerCalls
from kvrelay.placement.threshold import DisaggPolicy

KEY = "disagg.max_prefill_queue_size"


@pytest.fixture(autouse=True)
def control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the commands look for a cluster on this machine."""
    monkeypatch.setenv("KVRELAY_CONTROL", "nats://token@127.0.0.1:1")


@pytest.mark.parametrize("value", ["-5", "-0.5", "-.5", "-1e3"])
def test_a_negative_value_is_a_value(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "set", KEY, value]) == 2
    error = capsys.readouterr().err
    assert value in error
    assert "option" not in error


def test_a_negative_value_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    put = AsyncMock()
    monkeypatch.setattr("kvrelay.launch.admin.config_set", put)
    monkeypatch.setattr("kvrelay.launch.admin.checked", lambda key, value: value)
    for arguments in (
        ["router.router_seed", "-5", "--namespace", "x"],
        ["--namespace", "x", "router.router_seed", "-5"],
    ):
        assert run(["config", "set", *arguments]) == 0
        config, key, value = put.await_args.args
        assert (config.namespace, key, value) == ("x", "router.router_seed", "-5")


@pytest.mark.parametrize("arguments", [["--contrl", "x", KEY, "5"], [KEY, "-5", "--contrl", "x"]])
def test_a_wrong_option_is_refused_all_the_same(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "set", *arguments]) == 2
    assert "--contrl" in capsys.readouterr().err


async def test_set_and_unset_say_what_they_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = MemoryBroker()
    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", AsyncMock(side_effect=lambda _: broker.plane()))
    here = ControlConfig(namespace="lab")
    await config_set(here, KEY, "4")
    await config_set(here, KEY, "5")
    await config_unset(here, KEY)
    started = "what each process was started with"
    assert capsys.readouterr().out.splitlines() == [
        f"{KEY} is 4 in namespace lab (before: {started})",
        f"{KEY} is 5 in namespace lab (before: 4)",
        f"{KEY} is {started} in namespace lab (before: 5)",
    ]
    await config_get(here, KEY)
    await config_get(here, None)
    out, one_and_all = capsys.readouterr()
    assert out == "", "standard output has settings only"
    one, every = one_and_all.splitlines()
    assert one == f"{KEY} is {started} in namespace lab"
    assert every.startswith("every setting is what each process")
    assert KEY in every


async def test_set_says_if_a_setting_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = MemoryBroker()
    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", AsyncMock(side_effect=lambda _: broker.plane()))
    plane, policy = broker.plane(), DisaggPolicy(DisaggConfig())
    lease = await plane.discovery.grant(600.0)
    for worker_id, role in (("d-1", WorkerRole.DECODE), ("d-2", WorkerRole.BOTH), ("p-1", WorkerRole.PREFILL)):
        info = WorkerInfo(worker_id, 0, role, "m", "/m", "tcp://127.0.0.1:1", 4096, 16, 100, 1000, "hash")
        await plane.discovery.put(Keys("lab").worker(worker_id), msgspec.json.encode(info), lease)

    async def answer(_: WorkerCalls, worker_id: str, *__: object, **___: object) -> dict[str, object]:
        known = {"disagg_policy": policy.config.disagg_policy, "unused": policy.unused}
        return {"worker_id": worker_id, "disagg": {} if worker_id == "d-2" else known}

    monkeypatch.setattr(WorkerCalls, "ask", answer)
    here = ControlConfig(namespace="lab")

    async def note(key: str, value: str) -> str:
        await config_set(here, key, value)
        return capsys.readouterr().err

    said = await note("disagg.max_local_prefill_length", "512")
    assert "has no effect on 1 of 2 workers that take requests (d-1: --disagg-policy auto)" in said
    assert "`kvrelay config set disagg.disagg_policy threshold`" in said
    policy.set("disagg_policy", "threshold")
    assert await note("disagg.disagg_policy", "threshold") == ""
    assert await note("disagg.max_local_prefill_length", "512") == ""

    assert await note("router.overlap_weight", "2") == ""
    assert await note("router.router", "random") == ""
    assert 'no effect while router.router is "random", only under kv or kv-weights' in await note(
        "router.overlap_weight", "2"
    )
    await note("router.router", "kv")
    assert await note("router.overlap_weight", "2") == ""
    await plane.close()


HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("gpu1", "http://127.0.0.1:1"), (HERE, "http://127.0.0.1:2")], "http://127.0.0.1:2"),
        ([("gpu1", "https://0.0.0.0:8443")], "https://gpu1:8443"),
        ([("gpu1", "http://10.0.0.4:8000"), (HERE, "http://0.0.0.0:8000")], "http://127.0.0.1:8000"),
        ([("gpu1", "http://127.0.0.1:1"), (HERE, "http://["), (HERE, "")], None),
    ],
)
@pytest.mark.parametrize("command", [["top", "--once"], ["waterfall", "cmpl-1"], ["status", "--explain", "hello"]])
def test_a_frontend_is_found_in_discovery(
    command: list[str],
    entries: list[tuple[str, str]],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One on this machine first, and none that only another machine reaches."""
    broker = MemoryBroker()

    async def connect(_: ControlConfig) -> MemoryControlPlane:
        plane = broker.plane()
        for number, (host, url) in enumerate(entries):
            entry = msgspec.json.encode(CallerInfo(f"f{number}", "key", host, 7, url=url))
            await plane.discovery.put(Keys("default").frontend(f"f{number}"), entry, await plane.discovery.grant(30.0))
        return plane

    monkeypatch.setattr("kvrelay.launch.request_plane.connect_control", connect)
    ask = AsyncMock(side_effect=WorkerUnavailableError("asked"))
    monkeypatch.setattr("kvrelay.launch.frontend_calls.http_call", ask)
    assert run(command) != 0
    if expected is None:
        assert "give --url" in capsys.readouterr().err
    else:
        assert {call.args[0] for call in ask.await_args_list} == {expected}
