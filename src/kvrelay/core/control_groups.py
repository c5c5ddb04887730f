"""Linux's control groups (cgroups) that hold this process, of version 1 and 2, in a container or not, and the memory
that they leave."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvrelay.config.byte_sizes import shown_bytes
from kvrelay.errors import ConfigError


def group_directories(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The directories of the groups that hold this process and have a limit of ``controller`` ("memory", "cpu"), from
    the innermost outwards; True for version 1, which names its files differently.

    In a container the path of a group may be the host's, which is not there: the mount itself is the container's group
    then. So a directory, or its file, may be missing.
    """
    mount = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from ((place, False) for place in _outwards(mount, path))
            elif controller in controllers.split(","):
                yield from ((place, True) for place in _outwards(mount / controller, path))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that is left: of the machine and of every control group that holds this process, the least."""
    left = [sys.maxsize]
    with suppress(OSError):  # not Linux
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
    for place, is_v1 in group_directories("memory", root):
        limit, used = ("limit_in_bytes", "usage_in_bytes") if is_v1 else ("max", "current")
        # No limit: the file is absent, or says "max".
        with suppress(OSError, ValueError):
            most, taken = (int((place / f"memory.{name}").read_text()) for name in (limit, used))
            left.append(max(most - taken + _old_file_pages(place), 0))
    return min(left)


def map_memory(num_bytes: int, param: str, what: str) -> mmap.mmap:
    """Zeroed, and not resident before it is touched. Raises ConfigError if the kernel refuses it for ``what``, whose
    size the setting ``param`` gives."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as exc:
        raise ConfigError(
            f"{param}: the host cannot map {shown_bytes(num_bytes)} for {what} ({exc}): ask for less", param=param
        ) from exc


def require_memory(num_bytes: int, param: str, what: str) -> None:
    """Raises ConfigError if less is left than ``what`` needs, which the setting ``param`` asks for. Pages are taken as
    they are first used, which is too late."""
    available = available_bytes()
    if num_bytes > available:
        raise ConfigError(
            f"{param}: {what} of {shown_bytes(num_bytes)} was asked for, and the host has {shown_bytes(available)} of "
            "memory left: ask for less",
            param=param,
        )


def _old_file_pages(group: Path) -> int:
    """Bytes of files that the kernel gives up before it refuses memory; they count as used."""
    with suppress(OSError):
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


def _outwards(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.strip("/")
    for place in (group, *group.parents):
        yield place
        if place == mount:
            return
