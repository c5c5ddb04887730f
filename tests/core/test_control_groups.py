"""What control groups leave of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.control_groups import available_bytes


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/a/b", {"a/memory.max": 700, "a/memory.current": 100, "a/b/memory.max": "max"}, 600),
        ("0::/gone", {"memory.max": 500, "memory.current": 450}, 50),
        ("4:cpu:/x\n3:memory:/x", {"memory/x/memory.limit_in_bytes": 90, "memory/x/memory.usage_in_bytes": 100}, 0),
        ("3:memory:/", {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 1}, 2048),
        ("0::/", {}, 2048),
        ("0::/", {"memory.max": 900, "memory.current": 900, "memory.stat": "anon 1\ninactive_file 800"}, 800),
    ],
)
def test_memory_left_is_that_of_the_container(own: str, files: dict[str, object], left: int, tmp_path: Path) -> None:
    told = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2 kB", "proc/self/cgroup": own}
    told |= {f"sys/fs/cgroup/{name}": str(value) for name, value in files.items()}
    for name, text in told.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == left
