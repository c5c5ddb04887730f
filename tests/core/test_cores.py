"""How many cores a process may keep busy: by affinity, and by the CPU quota of its control groups."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.core.cores import allowed_cores, cpu_quota, describe_cores, may_change_niceness, set_niceness, usable_cores

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


@pytest.mark.skipif(not may_change_niceness(), reason="this user may not undo niceness")
def test_a_thread_yields_the_cores_alone_and_takes_that_back() -> None:
    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def changed(*added: int) -> list[int]:
        found = []
        for each in added:
            set_niceness(each)
            found.append(own())
        return found

    before = own()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(changed, 3, 100, 0).result() == [min(19, before + 3), 19, before]
    assert own() == before


def test_a_user_who_may_not_undo_niceness_does_not_begin_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowering_only(which: int, who: int, niceness: int) -> None:
        if niceness <= os.getpriority(os.PRIO_PROCESS, os.getpid()):
            raise PermissionError

    monkeypatch.setattr(os, "setpriority", lowering_only)
    assert not may_change_niceness()
