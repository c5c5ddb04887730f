"""--tp and --pp: which worker gets which, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cli.main import cli
from kvrelay.launch import serve as launch_serve
from kvrelay.launch.serve import ServeOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What ``kvrelay serve`` would run."""
    seen: list[ServeOptions] = []

    def run_serve(options: ServeOptions) -> Coroutine[Any, Any, None]:
        async def nothing() -> None:
            seen.append(options)

        return nothing()

    monkeypatch.setattr(launch_serve, "run_serve", run_serve)
    return seen


def invoke(*arguments: str) -> None:
    CliRunner().invoke(cli, [*arguments], catch_exceptions=False, standalone_mode=False)


def value_of(flags: list[str], name: str) -> str | None:
    return flags[flags.index(name) + 1] if name in flags else None


def test_aggregated_workers_get_their_ranks(served: list[ServeOptions]) -> None:
    invoke("serve", "--prefill", "0", "--decode", "2", "--tp-decode", "2", "--pp", "2")
    (options,) = served
    for flags in options.worker_flags:
        assert (value_of(flags, "--tp"), value_of(flags, "--pp")) == ("2", "2")


def test_one_rank_needs_no_flags(served: list[ServeOptions]) -> None:
    invoke("serve", "--prefill", "1", "--decode", "1", "--tp", "2", "--tp-prefill", "1", "--tp-decode", "1")
    (options,) = served
    assert all("--tp" not in flags for flags in options.worker_flags)


@pytest.mark.parametrize("name", ["tp", "pp", "block-size"])
def test_each_kind_of_worker_gets_its_own(served: list[ServeOptions], name: str) -> None:
    invoke("serve", "--prefill", "1", "--decode", "1", f"--{name}-prefill", "2", f"--{name}-decode", "4")
    (options,) = served
    assert [value_of(flags, f"--{name}") for flags in options.worker_flags] == ["2", "4"]
    served.clear()
    invoke("serve", "--prefill", "1", "--decode", "1", f"--{name}-decode", "4")
    (options,) = served
    assert [value_of(flags, f"--{name}") for flags in options.worker_flags] == [None, "4"]


def test_data_parallel_ranks_of_each_kind(served: list[ServeOptions]) -> None:
    invoke(
        "serve", "--prefill", "1", "--decode", "2", "--dp-prefill", "2", "--dp", "3", "--ep", "--metrics-port", "9000"
    )
    (options,) = served
    assert options.num_engines == 2 + 3 + 3
    assert [value_of(flags, "--dp") for flags in options.worker_flags] == ["2", "3", "3"]
    assert [value_of(flags, "--metrics-port") for flags in options.worker_flags] == ["9000", "9002", "9005"]
    assert all("--ep" in flags for flags in options.worker_flags)
