"""Which way the bytes took: counters of the kernel and of UCX, before and after, and what they say together.

Settings say what should carry the bytes. These say what did: octets of network interfaces, octets of RDMA ports, and
the table in which UCX counts its operations by transport (``UCX_PROTO_INFO=used``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from kvrelay.certify.findings import Verdict

_RDMA_UNIT = 4
"""``port_xmit_data`` counts words of 4 bytes."""
_SHARE = 0.5
"""Of the moved bytes: a way that carried so many has carried them. Counters see other traffic, too."""


class Way(StrEnum):
    """What carried the bytes."""

    MEMORY = "memory"
    """Within the host, past its network: shared memory, cross-memory attach, cuda_ipc."""
    TCP = "TCP"
    RDMA = "RDMA"


class Octets(msgspec.Struct, frozen=True):
    """Sent bytes so far, by network interface and by RDMA port."""

    interfaces: dict[str, int]
    rdma: dict[str, int]

    def since(self, before: Octets) -> Octets:
        return Octets(_grown(before.interfaces, self.interfaces), _grown(before.rdma, self.rdma))


def read_octets(root: Path = Path("/")) -> Octets:
    """Of this machine; what the kernel does not show is left out."""
    interfaces = {}
    for path in (root / "sys/class/net").glob("*/statistics/tx_bytes"):
        interfaces[path.parts[-3]] = _number(path)
    rdma = {}
    for path in (root / "sys/class/infiniband").glob("*/ports/*/counters/port_xmit_data"):
        rdma[f"{path.parts[-5]}:{path.parts[-3]}"] = _number(path) * _RDMA_UNIT
    return Octets(interfaces, rdma)


_UCX_ROW = re.compile(r"\|\s+(\d+) \|\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|")


def read_ucx(log: str) -> dict[str, int]:
    """Operations that moved memory, by the transports that UCX says it used for them, e.g. {"cma/memory": 128}."""
    used: dict[str, int] = {}
    is_memory = False
    for line in log.splitlines():
        if "remote memory" in line:
            is_memory = True
        elif "active message" in line or "tagged" in line:
            is_memory = False
        elif is_memory and (row := _UCX_ROW.search(line)) and int(row[1]):
            used[row[4]] = used.get(row[4], 0) + int(row[1])
    return used


class Evidence(msgspec.Struct, frozen=True):
    """What was moved, and what counted. ``ucx`` is empty if UCX did not move it or does not say."""

    num_bytes: int
    grown: Octets
    ucx: dict[str, int] = {}

    @property
    def way(self) -> Way:
        if sum(self.grown.rdma.values()) >= _SHARE * self.num_bytes:
            return Way.RDMA
        if sum(self.grown.interfaces.values()) >= _SHARE * self.num_bytes:
            return Way.TCP
        return Way.MEMORY

    @property
    def factor(self) -> float:
        """Octets that the network counted for each byte."""
        return (sum(self.grown.rdma.values()) or sum(self.grown.interfaces.values())) / self.num_bytes

    @property
    def shown(self) -> str:
        """The counters that moved, as text."""
        both = {**self.grown.interfaces, **self.grown.rdma}
        counted = [f"{name} {grown / 2**20:.1f} MiB" for name, grown in sorted(both.items()) if grown >= 2**20]
        said = [f"UCX {name} {count} operations" for name, count in sorted(self.ucx.items())]
        return ", ".join([*counted, *said]) or "no counter of the network moved"


def judge_way(
    evidence: Evidence, *, is_same_host: bool, has_rdma: bool, transport: str, is_alone: bool = True
) -> tuple[Verdict, str]:
    """Whether the bytes took the best way that this machine has. ``is_alone``: False if others count on the same
    interfaces, such as clients, and the collectives of an engine's ranks."""
    way, moved = evidence.way, f"{evidence.num_bytes / 2**20:.0f} MiB went by {evidence.way}: {evidence.shown}"
    said_tcp = sum(count for name, count in evidence.ucx.items() if "tcp" in name)
    better = "memory within the host" if is_same_host else "RDMA" if has_rdma else ""
    if way is Way.TCP and transport == "p2p":
        hint = f"; this machine has {better}, which nixl and shm use" if better else ""
        return Verdict.WARN if better else Verdict.PASS, f"{moved}; gloo on CPUs has only TCP{hint}"
    if way is Way.TCP and not said_tcp and not is_alone and not evidence.ucx:
        return Verdict.WARN, f"{moved}, other traffic among them; the row without an engine is exact"
    if way is Way.TCP and evidence.ucx and not said_tcp:
        return Verdict.WARN, f"{moved}; UCX used no TCP, so the interfaces have counted other traffic"
    if way is Way.TCP and better:
        return Verdict.FAIL, f"{moved}; this machine has {better}: see UCX_TLS, --ucx-tls and --ucx-net-devices"
    if way is Way.RDMA and is_same_host:
        return Verdict.WARN, f"{moved}; within a host memory (cuda_ipc, cma) is faster: see UCX_TLS"
    if way is Way.MEMORY and not is_same_host:
        return Verdict.FAIL, f"{moved}, though the two ends are on different hosts: the bytes cannot have gone so"
    if way is not Way.MEMORY and evidence.factor > 1.5:
        return Verdict.FAIL, f"{moved}; {evidence.factor:.1f} octets for each byte: sent more than once"
    if way is not Way.TCP and said_tcp > _SHARE * sum(evidence.ucx.values()):
        return Verdict.WARN, f"{moved}; UCX says TCP, which no interface here has counted"
    return Verdict.PASS, moved


def judge_operations(ucx: Mapping[str, int]) -> tuple[Verdict, str]:
    """Within a host, by UCX's own counts alone: an engine's connector moved bytes that nobody counts."""
    said = ", ".join(f"{name} {count}" for name, count in sorted(ucx.items()))
    if not ucx:
        return Verdict.SKIP, "the engine's own connector moved the KV: neither it nor UCX says how much, or how"
    if sum(count for name, count in ucx.items() if "tcp" in name) > _SHARE * sum(ucx.values()):
        return Verdict.FAIL, f"UCX moved memory by TCP within a host: {said} operations; see UCX_TLS"
    return Verdict.PASS, f"UCX's own counts of operations: {said}; their bytes are the engine's and not counted"


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in after.items() if value > before.get(name, value)}


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
