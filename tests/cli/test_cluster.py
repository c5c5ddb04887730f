"""Arguments of the commands that speak to a running cluster."""

from __future__ import annotations

from unittest.mock import AsyncMock

import pytest

from kvrelay.cli.main import run
from kvrelay.config import ControlConfig
from kvrelay.control.memory import MemoryBroker
from kvrelay.launch.admin import config_get, config_set, config_unset

KEY = "disagg.max_prefill_queue_size"


@pytest.mark.parametrize("value", ["-5", "-0.5", "-.5", "-1e3"])
def test_a_negative_value_is_a_value(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "set", KEY, value]) == 2
    error = capsys.readouterr().err
    assert value in error
    assert "option" not in error


def test_a_negative_value_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    put = AsyncMock()
    monkeypatch.setattr("kvrelay.launch.admin.config_set", put)
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
    monkeypatch.setattr("kvrelay.launch.admin.connect_control", AsyncMock(side_effect=lambda _: broker.plane()))
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
