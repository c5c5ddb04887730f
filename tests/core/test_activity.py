"""What workers have done: sums and differences; and CPU time and memory of a family of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvrelay.core.activity import Activity, SessionActivity, Spent
from kvrelay.core.event_codec import decode_load, encode_frame
from kvrelay.core.events import LoadMetrics
from kvrelay.core.process_usage import FAMILY_S, FRESH_S, ProcessUsage
from kvrelay.errors import ProtocolError

EARLY = Activity({"remote": 2}, {"host": 16}, Spent(2, 0.5), Spent(2, 1.0), Spent(1, 0.1), (1, 0, 2), 3.0, 100)
LATE = Activity({"remote": 5, "local_short": 1}, {"host": 16}, Spent(4, 1.5), Spent(3, 4.0), Spent(1, 0.1), (1, 4, 2))


def test_a_difference_is_what_was_done_meanwhile() -> None:
    done = msgspec.structs.replace(LATE, cpu_s=3.5, rss_bytes=90).since(EARLY)
    assert done.places == {"remote": 3, "local_short": 1}
    assert (done.loaded, done.sends) == ({}, Spent())
    assert (done.claims.mean_s, done.handoffs.mean_s, done.sends.mean_s) == (0.5, 3.0, None)
    assert (done.prefills, done.cpu_s, done.rss_bytes) == ((0, 4, 0), 0.5, 90)
    # The first one has no counts; one that was rebuilt counts from zero again.
    assert LATE.since(Activity()).prefills == LATE.prefills
    assert EARLY.since(LATE) == Activity(prefills=(0, 0, 0), cpu_s=3.0, rss_bytes=100)


def test_workers_add_up_and_times_follow_each_other() -> None:
    both = EARLY.plus(LATE)
    assert (both.places, both.loaded) == ({"remote": 7, "local_short": 1}, {"host": 32})
    assert (both.claims, both.handoffs) == (Spent(6, 2.0), Spent(5, 5.0))
    later = msgspec.structs.replace(LATE, rss_bytes=70)
    assert (EARLY.plus(later).rss_bytes, EARLY.then(later).rss_bytes) == (170, 100)


def test_sessions_add_up_and_those_paused_are_a_level() -> None:
    early = Activity(sessions=SessionActivity(5, 10, 2, {"pool": 100, "host": 30}, 1.0))
    late = Activity(sessions=SessionActivity(3, 14, 3, {"pool": 160, "host": 30, "computed": 8}, 1.5))
    done = late.since(early).sessions
    assert done == SessionActivity(3, 4, 1, {"pool": 60, "computed": 8}, 0.5)
    both = SessionActivity(8, 24, 5, {"pool": 260, "host": 60, "computed": 8}, 2.5)
    assert early.plus(late).sessions == both
    assert early.then(late).sessions == msgspec.structs.replace(both, num_paused=5)


def test_a_sample_carries_it_and_nonsense_is_refused() -> None:
    load = LoadMetrics("w", 0, 1, 0, 1, 0, 0.0, 0.0, activity=EARLY)
    assert decode_load(encode_frame(load)) == load
    nonsense = Activity(sessions=SessionActivity(saved_s=-1.0))
    for wrong in (
        nonsense,
        Activity({"remote": -1}),
        Activity(cpu_s=-1.0),
        Activity(dict.fromkeys(map(str, range(33)), 1)),
    ):
        with pytest.raises(ProtocolError):
            decode_load(encode_frame(msgspec.structs.replace(load, activity=wrong)))


def a_process(proc: Path, pid: int, ticks: tuple[int, int], pages: int, children: tuple[int, ...]) -> None:
    """As in the kernel's proc(5): the name has a space and a bracket."""
    folder = proc / str(pid)
    for thread in (pid, pid + 1):
        (folder / "task" / str(thread)).mkdir(parents=True, exist_ok=True)
    (folder / "task" / str(pid) / "children").write_text("")
    (folder / "task" / str(pid + 1) / "children").write_text(" ".join(map(str, children)) + " ")
    fields = ["R", *["0"] * 10, *map(str, ticks), *["7"] * 10]
    (folder / "stat").write_text(f"{pid} (a ) b) {' '.join(fields)}")
    (folder / "statm").write_text(f"99 {pages} 1 1 0 1 0")


def test_a_family_of_processes_is_added_up(tmp_path: Path) -> None:
    now_s = 0.0
    usage = ProcessUsage(lambda: now_s, tmp_path)
    page, second = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    a_process(tmp_path, os.getpid(), (0, 0), 10, (500, 510))
    a_process(tmp_path, 500, (second, second), 5, ())
    a_process(tmp_path, 510, (2 * second, 0), 7, (520,))
    a_process(tmp_path, 520, (0, 3 * second), 1, ())
    found = usage.read()
    assert found.rss_bytes == 23 * page
    assert found.cpu_s >= 7.0
    a_process(tmp_path, 520, (0, 3 * second), 11, (530,))
    a_process(tmp_path, 530, (0, 0), 1000, ())
    assert usage.read() == found
    now_s += FRESH_S
    assert usage.read().rss_bytes == 33 * page
    now_s += FAMILY_S
    assert usage.read().rss_bytes == 1033 * page


@pytest.mark.skipif(sys.platform != "linux", reason="the files are Linux's")
def test_a_real_child_counts() -> None:
    script = "x = bytearray(50_000_000)\nprint(flush=True)\ninput()"
    alone = ProcessUsage().read()
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        together = ProcessUsage().read()
        assert alone.rss_bytes > 1_000_000
        if Path(f"/proc/self/task/{os.getpid()}/children").exists():
            assert together.rss_bytes > alone.rss_bytes + 40_000_000
        child.communicate(b"\n")
