"""A data-parallel group of processes: which GPUs a rank sees, what ends it, what is refused before it starts."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.config import GroupConfig, MetricsConfig, VllmConfig, WorkerConfig, WorkerRole
from kvrelay.core.workers import WorkerInfo
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import ConfigError
from kvrelay.launch import dp_group
from kvrelay.launch.dp_group import devices_of_rank, join_group, run_group
from kvrelay.launch.serve import is_child, no_worker_takes_requests
from kvrelay.launch.worker_process import ready_line


def test_ranks_share_out_the_gpus(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"gpu{number}").touch()
    assert [devices_of_rank(rank, 2, 2, None, tmp_path) for rank in (0, 1)] == ["0,1", "2,3"]
    assert [devices_of_rank(rank, 2, 1, "7,5,3", tmp_path) for rank in (0, 1)] == ["7", "5"]
    assert devices_of_rank(0, 3, 2, None, tmp_path) is None
    assert devices_of_rank(0, 2, 1, "", tmp_path) is None
    assert devices_of_rank(0, 2, 1, None, tmp_path / "none") is None


# -- the processes ----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
rank = int(sys.argv[sys.argv.index("--dp-rank") + 1])
def end(*_):
    sys.exit(0)
signal.signal(signal.SIGTERM, end if "stubborn" not in sys.argv else signal.SIG_IGN)
print("up", rank, flush=True)
if "fails" in sys.argv and rank == 1:
    sys.exit(3)
if "stops" in sys.argv:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(300)
"""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ranks are small scripts. Returns the callback of SIGTERM."""
    stops: list[Any] = []

    def script(config: WorkerConfig) -> list[str]:
        return [sys.executable, "-c", SCRIPT, "--dp-rank", str(config.group.dp_rank), *config.model.split()]

    monkeypatch.setattr(dp_group, "worker_command", script)
    monkeypatch.setattr(dp_group, "on_terminate", stops.append)
    return stops


def group_of_scripts(arguments: str = "") -> WorkerConfig:
    return WorkerConfig(model_path=Path(), model=arguments, group=GroupConfig(dp=3))


@pytest.mark.parametrize(("announces", "silent"), [(True, [False, True]), (False, [True, True])])
def test_a_group_announces_itself_once(announces: bool, silent: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(dp_group, "start_child", lambda _, command, **__: commands.append(command))
    for rank in range(2):
        dp_group.start_rank(group_of_scripts(), rank, "/d", announces=announces and not rank)
    assert ["--no-ready-line" in command for command in commands] == silent


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_started_one_by_one_say_which_they_are(rank: int) -> None:
    group = GroupConfig(dp=2, dp_rank=rank, dp_address="10.0.0.2:7000")
    config = WorkerConfig(model_path=Path(), model="m", role=WorkerRole.DECODE, group=group)
    assert f"m (decode, rank {rank} of 2) at tcp://10.0.0.3:9500, as" in ready_line(
        config, "worker-a", "tcp://10.0.0.3:9500"
    )


async def test_a_rank_that_fails_ends_the_group(scripted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp_group, "GROUP_END_S", 0.1)
    assert await run_group(group_of_scripts("fails stubborn")) == 3


async def test_ranks_that_are_stopped_are_ended_at_once(scripted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp_group, "GROUP_END_S", math.inf)
    assert await run_group(group_of_scripts("fails stops")) == 3


async def test_a_group_that_is_told_to_leave_ends_in_order(
    scripted: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    running = asyncio.create_task(run_group(group_of_scripts()))
    printed, deadline = "", time.monotonic() + 60.0
    while not all(f"up {rank}" in printed for rank in range(3)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
        printed += capfd.readouterr().out
    scripted[0]()
    assert await running == 0


def test_ports_of_ranks_count_up(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(dp_group, "start_child", lambda name, command, environment: commands.append(command))
    metrics, group = MetricsConfig(metrics_port=9000), GroupConfig(dp=2)
    config = WorkerConfig(model_path=Path("m"), model="m", port=7000, metrics=metrics, group=group)
    for rank in (0, 1):
        dp_group.start_rank(config, rank, "/d")
    given = dict(zip(commands[1], commands[1][1:]))
    names = ("--dp", "--dp-rank", "--dp-address", "--worker-port", "--metrics-port")
    assert [given[name] for name in names] == ["2", "1", "/d", "7001", "9001"]
    assert "--kv-port" not in given, "any"


@pytest.mark.parametrize(("given", "expected"), [("0-5", ["0,1,2", "3,4,5"]), ("4", ["4", "4"])])
def test_ranks_of_vllm_share_out_the_cores(given: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engines.vllm.cores.allowed_cores", lambda: list(range(8)))
    commands: list[list[str]] = []
    monkeypatch.setattr(dp_group, "start_child", lambda name, command, environment: commands.append(command))
    config = config_of(GroupConfig(dp=2), "vllm")
    for rank in (0, 1):
        dp_group.start_rank(replace(config, vllm=VllmConfig(engine_cores=given)), rank, "/d")
    assert [command[command.index("--engine-cores") + 1] for command in commands] == expected


# -- in discovery -----------------------------------------------------------------------------------------------------


def test_ranks_are_children_of_the_process_that_their_parent_is() -> None:
    info = WorkerInfo(
        worker_id="w",
        epoch=0,
        role=WorkerRole.PREFILL,
        model="m",
        model_path="",
        address="",
        max_model_len=1,
        block_size=1,
        num_blocks=1,
        vocab_size=1,
        kv_compatibility="",
        host=socket.gethostname(),
        pid=11,
        dp_group="g",
        dp_rank=1,
        dp_size=2,
        dp_parent_pid=10,
    )
    assert is_child(info, {10})
    assert is_child(info, {11})
    assert not is_child(info, {12, 0})
    assert no_worker_takes_requests([info], {10})
    assert not no_worker_takes_requests([info], {10, 12})


# -- refused ----------------------------------------------------------------------------------------------------------


def config_of(group: GroupConfig, engine_kind: str = "torch") -> WorkerConfig:
    return WorkerConfig(model_path=bundled_checkpoint_path(), engine_kind=engine_kind, group=group)


@pytest.mark.parametrize(
    ("group", "engine", "reason"),
    [
        (GroupConfig(dp=2, dp_rank=0, dp_address="10.0.0.1:29500"), "torch", "reachable from other machines"),
        (GroupConfig(dp=2, dp_rank=0, dp_address="here"), "mock", "--dp-address here"),
        (GroupConfig(dp=2, dp_rank=0, dp_address="/x", ep=True), "torch", "this model has none"),
        (GroupConfig(dp=2, dp_rank=0, dp_address="/x", ep=True), "mock", "engine mock has no expert parallelism"),
        (GroupConfig(dp=2, dp_rank=0, dp_address="/x"), "openai", "engine openai computes elsewhere"),
    ],
)
def test_groups_that_cannot_be(group: GroupConfig, engine: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        join_group(config_of(group, engine))


def test_ranks_with_vllm_must_start_it_alike(tmp_path: Path) -> None:
    def join(rank: int, engine_args: str) -> str:
        config = config_of(GroupConfig(dp=2, dp_rank=rank, dp_address=str(tmp_path)), "vllm")
        with pytest.raises(ConfigError) as caught:
            join_group(replace(config, vllm=VllmConfig(engine_args=engine_args)))
        return caught.value.message

    with ThreadPoolExecutor(2) as pool:
        reasons = list(pool.map(join, (0, 1), ("", '{"quantization": "fp8"}')))
    assert all("--engine-args" in reason and "fp8" in reason for reason in reasons), reasons


def test_a_worker_without_a_group_joins_none() -> None:
    assert join_group(config_of(GroupConfig())) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dp": 2, "dp_rank": 2, "dp_address": "/x"}, "dp_rank 2 must be below dp 2"),
        ({"dp": 2, "dp_rank": 1}, "needs dp_address"),
        ({"dp": 2, "dp_address": "/x"}, "give dp_rank, too"),
        ({"dp": 65}, "dp must be between 1 and 64"),
    ],
)
def test_settings_that_do_not_fit_together(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        GroupConfig(**settings)
