"""How many cores a process may keep busy: by affinity, and by the CPU quota of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.core.cores import allowed_cores, cpu_quota, describe_cores, usable_cores

MakeRoot = Callable[..., Path]


@pytest.fixture
def make_root(tmp_path: Path) -> MakeRoot:
    """A root directory with this process's groups, and files below /sys/fs/cgroup."""

    def make(own: str, files: dict[str, str]) -> Path:
        for name, text in {"proc/self/cgroup": own, **{f"sys/fs/cgroup/{key}": files[key] for key in files}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "800000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/of/the/host\n", {"cpu.max": "100000 50000"}, 2.0),
        ("0::/\n3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3.0),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000"}, math.inf),
        ("0::/", {"cpu.max": "garbage"}, math.inf),
        ("0::/", {"cpu.max": "100000 0"}, math.inf),
    ],
)
def test_the_quota_is_the_least_of_all_groups_around(
    make_root: MakeRoot, own: str, files: dict[str, str], quota: float
) -> None:
    assert cpu_quota(make_root(own, files)) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf
    assert usable_cores(tmp_path) == allowed_cores()


@pytest.mark.parametrize(("quota", "count"), [("40000 100000", 1), ("199999 100000", 1), ("max 100000", None)])
def test_a_core_that_the_quota_pays_for_in_part_is_not_used_but_for_the_first(
    make_root: MakeRoot, quota: str, count: int | None
) -> None:
    root = make_root("0::/", {"cpu.max": quota})
    assert usable_cores(root) == allowed_cores()[:count]


def test_one_core_by_affinity_is_one_core_and_the_log_says_why(make_root: MakeRoot) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    os.sched_setaffinity(0, {core})
    try:
        assert usable_cores(make_root("0::/", {"cpu.max": "250000 100000"})) == [core]
        text = describe_cores(make_root("0::/", {"cpu.max": "250000 100000"}))
    finally:
        os.sched_setaffinity(0, before)
    assert text == f"1 usable cores ({os.cpu_count()} here, 1 by affinity, a CPU quota of 2.5)"
