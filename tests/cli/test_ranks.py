"""--tp and --pp: which worker gets which, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cli.main import cli
from kvrelay.config import WorkerConfig
from kvrelay.launch import serve as launch_serve
from kvrelay.launch.children import worker_command
from kvrelay.launch.serve import ServeConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """What ``kvrelay serve`` would run."""
    seen: list[ServeConfig] = []

    def run_serve(config: ServeConfig) -> Coroutine[Any, Any, None]:
        async def nothing() -> None:
            seen.append(config)

        return nothing()

    monkeypatch.setattr(launch_serve, "run_serve", run_serve)
    return seen


def invoke(*arguments: str) -> None:
    CliRunner().invoke(cli, [*arguments], catch_exceptions=False, standalone_mode=False)


def value_of(worker: WorkerConfig, name: str) -> str | None:
    """What the worker's command line says; None: nothing."""
    words = worker_command(worker)
    return words[words.index(name) + 1] if name in words else None


def test_aggregated_workers_get_their_ranks(served: list[ServeConfig]) -> None:
    invoke("serve", "--prefill", "0", "--decode", "2", "--tp-decode", "2", "--pp", "2")
    (config,) = served
    assert config.shape == "2 aggregated"
    for worker in config.workers:
        assert (value_of(worker, "--tp"), value_of(worker, "--pp")) == ("2", "2")


def test_one_rank_needs_no_flags(served: list[ServeConfig]) -> None:
    invoke("serve", "--prefill", "1", "--decode", "1", "--tp", "2", "--tp-prefill", "1", "--tp-decode", "1")
    (config,) = served
    assert [value_of(worker, "--tp") for worker in config.workers] == [None, None]


def test_a_flag_wins_over_the_environment_in_children_too(
    served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have our environment: a default that was asked for must be told."""
    monkeypatch.setenv("KVRELAY_TP", "2")
    monkeypatch.setenv("KVRELAY_ENABLE_PREFIX_CACHING", "false")
    invoke("serve", "--tp-prefill", "1", "--enable-prefix-caching")
    (config,) = served
    assert [value_of(worker, "--tp") for worker in config.workers] == ["1", "2"]
    assert all("--enable-prefix-caching" in worker_command(worker) for worker in config.workers)


@pytest.mark.parametrize("name", ["tp", "pp", "block-size"])
def test_each_kind_of_worker_gets_its_own(served: list[ServeConfig], name: str) -> None:
    invoke("serve", "--prefill", "1", "--decode", "1", f"--{name}-prefill", "2", f"--{name}-decode", "4")
    (config,) = served
    assert config.shape == "1P1D"
    assert [value_of(worker, f"--{name}") for worker in config.workers] == ["2", "4"]
    served.clear()
    invoke("serve", "--prefill", "1", "--decode", "1", f"--{name}-decode", "4")
    (config,) = served
    assert [value_of(worker, f"--{name}") for worker in config.workers] == [None, "4"]


def test_data_parallel_ranks_of_each_kind(served: list[ServeConfig]) -> None:
    invoke(
        "serve", "--prefill", "1", "--decode", "2", "--dp-prefill", "2", "--dp", "3", "--ep", "--metrics-port", "9000"
    )
    (config,) = served
    assert config.num_engines == 2 + 3 + 3
    assert [value_of(worker, "--dp") for worker in config.workers] == ["2", "3", "3"]
    assert [value_of(worker, "--metrics-port") for worker in config.workers] == ["9000", "9002", "9005"]
    assert all("--ep" in worker_command(worker) for worker in config.workers)


def test_a_group_with_vllm_has_the_cores_of_all_its_ranks(
    served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.engines.vllm.cores.allowed_cores", lambda: list(range(8)))
    sizes = ("--prefill", "1", "--decode", "1", "--dp-prefill", "2", "--engine-cores", "0-5")
    invoke("serve", "--engine", "vllm", *sizes)
    (config,) = served
    assert [value_of(worker, "--engine-cores") for worker in config.workers] == ["0,1,2,3", "4,5"]
