"""Which way the bytes took, from files as the kernel and UCX write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.certify.counters import Evidence, Octets, Way, judge_operations, judge_way, read_octets, read_ucx
from kvrelay.certify.findings import Verdict

MIB = 2**20
UCX_LOG = """
[1795787198.030325] [vm:9339 :0]   | x intra-node cfg#1                                   |
[1795787198.030325] [vm:9339 :0]   | active message by ucp_am_send*(egr) from host memory |
[1795787198.030325] [vm:9339 :0]   | Count |   Range    |    Description     |   Config   |
[1795787198.030325] [vm:9339 :0]   |     4 |   1..16515 | zero-copy          | tcp/lo     |
[1795787198.030366] [vm:9339 :0]   | remote memory write by ucp_put*(multi) from host memory to host |
[1795787198.030366] [vm:9339 :0]   | Count | Range  | Description |              Config              |
[1795787198.030366] [vm:9339 :0]   |   128 | 0..inf | zero-copy   | {config:32} |
"""


def test_octets_are_those_of_the_kernel(tmp_path: Path) -> None:
    for path, text in {
        "sys/class/net/eth0/statistics/tx_bytes": "1234\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "100\n",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    # Ports count words of four bytes.
    assert read_octets(tmp_path) == Octets({"eth0": 1234}, {"mlx5_0:1": 400})


def test_ucx_tells_what_moved_memory_not_what_carried_messages() -> None:
    assert read_ucx(UCX_LOG.format(config="cma/memory")) == {"cma/memory": 128}


@pytest.mark.parametrize(
    ("interfaces", "rdma", "ucx", "is_same_host", "has_rdma", "transport", "way", "verdict"),
    [
        ({}, {}, {"cma/memory": 9}, True, False, "nixl", Way.MEMORY, Verdict.PASS),
        ({"lo": 100 * MIB}, {}, {"tcp/lo": 9}, True, False, "nixl", Way.TCP, Verdict.FAIL),
        ({"lo": 100 * MIB}, {}, {}, True, False, "shm", Way.TCP, Verdict.FAIL),
        ({"lo": 100 * MIB}, {}, {"cma/memory": 9}, True, False, "nixl", Way.TCP, Verdict.WARN),
        ({"lo": 100 * MIB}, {}, {}, True, False, "p2p", Way.TCP, Verdict.WARN),
        ({"eth0": 100 * MIB}, {}, {}, False, True, "nixl", Way.TCP, Verdict.FAIL),
        ({"eth0": 100 * MIB}, {}, {}, False, False, "nixl", Way.TCP, Verdict.PASS),
        ({"eth0": 2 * MIB}, {"mlx5_0:1": 100 * MIB}, {}, False, True, "nixl", Way.RDMA, Verdict.PASS),
        ({}, {"mlx5_0:1": 100 * MIB}, {}, True, True, "nixl", Way.RDMA, Verdict.WARN),
        ({}, {"mlx5_0:1": 210 * MIB}, {}, False, True, "nixl", Way.RDMA, Verdict.FAIL),
        ({}, {}, {}, False, True, "nixl", Way.MEMORY, Verdict.FAIL),
    ],
    ids=[
        "cross-memory",
        "TCP within a host",
        "shm by TCP",
        "other traffic",
        "gloo",
        "TCP beside RDMA",
        "only TCP",
        "RDMA",
        "RDMA within a host",
        "sent twice",
        "impossible",
    ],
)
def test_a_way_is_judged_by_what_the_machine_has(
    interfaces: dict[str, int],
    rdma: dict[str, int],
    ucx: dict[str, int],
    is_same_host: bool,
    has_rdma: bool,
    transport: str,
    way: Way,
    verdict: Verdict,
) -> None:
    evidence = Evidence(100 * MIB, Octets(interfaces, rdma), ucx)
    assert evidence.way is way
    judged, reason = judge_way(evidence, is_same_host=is_same_host, has_rdma=has_rdma, transport=transport)
    assert judged is verdict, reason


def test_ucxs_counts_alone_say_tcp() -> None:
    assert judge_operations({"tcp/lo": 90, "cma/memory": 10})[0] is Verdict.FAIL
    assert judge_operations({"tcp/lo": 10, "cma/memory": 90})[0] is Verdict.PASS
    assert judge_operations({})[0] is Verdict.SKIP


def test_collectives_of_ranks_are_not_taken_for_kv() -> None:
    evidence = Evidence(100 * MIB, Octets({"lo": 300 * MIB}, {}))
    verdict, _ = judge_way(evidence, is_same_host=True, has_rdma=False, transport="shm", is_alone=False)
    assert verdict is Verdict.WARN
