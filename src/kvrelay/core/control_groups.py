"""Linux's control groups (cgroups) that hold this process, of version 1 and 2, in a container or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


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


def _outwards(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.strip("/")
    for place in (group, *group.parents):
        yield place
        if place == mount:
            return
