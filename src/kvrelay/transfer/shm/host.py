"""Are two processes on one host, so that one can map the other's memory?"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Host(msgspec.Struct, frozen=True):
    """Equal for two processes if each can open the other's descriptors under /proc.

    ``boot_id`` changes at every start of a kernel, so cloned machines that share a machine id differ.
    ``pid_namespace`` is an inode: containers with namespaces of their own do not see each other's processes. A process
    of another ``uid`` may not open them.
    """

    machine_id: str
    boot_id: str
    pid_namespace: int
    uid: int


def this_host(root: Path = Path("/")) -> Host | None:
    """Of this process. None if the kernel does not tell: then no peer counts as being on this host."""
    try:
        boot_id = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.stat(root / "proc/self/ns/pid").st_ino
    except OSError:
        return None
    try:
        machine_id = (root / "etc/machine-id").read_text().strip()
    except OSError:
        machine_id = ""  # containers often have none
    return Host(machine_id, boot_id, pid_namespace, os.geteuid()) if boot_id else None
