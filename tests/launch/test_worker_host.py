"""One more worker on a host: what it must not share with the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.config import MetricsConfig, TransferConfig, VllmConfig, WorkerConfig
from kvrelay.http import reserve_port
from kvrelay.launch import worker_host
from kvrelay.launch.worker_host import beside, next_free_port


@pytest.fixture(autouse=True)
def _all_ports_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "is_free", lambda host, port: True)


def base(**given: object) -> WorkerConfig:
    metrics, transfer = MetricsConfig(metrics_port=9000), TransferConfig(transport="p2p", kv_port=21000)
    return replace(WorkerConfig(model_path=Path("m"), metrics=metrics, transfer=transfer), **given)  # type: ignore[arg-type]


def ports(config: WorkerConfig) -> tuple[int, int]:
    return config.metrics.metrics_port, config.transfer.kv_port


def test_ports_count_up_and_those_of_workers_that_have_left_are_used_again() -> None:
    first = beside([], base(), 3)
    second = beside([first], base(), 3)
    third = beside([first, second], base(), 3)
    assert [ports(each) for each in (first, second, third)] == [(9000, 21000), (9001, 21001), (9002, 21002)]
    assert ports(beside([first, third], base(), 3)) == (9001, 21001)
    no_ports = base(metrics=MetricsConfig(), transfer=TransferConfig())
    assert ports(beside([no_ports], no_ports, 3)) == (0, 0)


def test_workers_of_vllm_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engines.vllm.cores.allowed_cores", lambda: list(range(8)))
    common = base(engine_kind="vllm", vllm=VllmConfig(engine_cores="0-5"))
    first = beside([], common, 3)
    second = beside([first], common, 3)
    assert [each.vllm.engine_cores for each in (first, second)] == ["0,1", "2,3"]
    assert beside([second], common, 3).vllm.engine_cores == "0,1"


def test_a_port_that_another_program_has_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with reserve_port("127.0.0.1", 0) as reserved:
        reserved.listen()
        port = int(reserved.getsockname()[1])
        assert next_free_port("127.0.0.1", port, 1, set()) > port
