"""``kvrelay doctor`` on machines that are drawn by hand, with probes that crash, hang and lie."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.system.serving import kvrelay_here

from kvrelay.certify import doctor
from kvrelay.certify.doctor import diagnose, text_of
from kvrelay.certify.probes import Found, State


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


RDMA = {
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_0/device/numa_node": "0\n",
    "dev/infiniband/uverbs0": "",
}
GPU = {
    "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
    "sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
    "proc/driver/nvidia/gpus/0000:1b:00.0/information": "",
}


def states(root: Path) -> dict[str, State]:
    return {one.subject: one.state for one in diagnose(root, risky=()).found}


def test_a_machine_without_gpu_and_rdma_is_no_failure(tmp_path: Path) -> None:
    found = states(machine(tmp_path, {"dev/shm/x": ""}))
    assert (found["GPUs"], found["RDMA"]) == (State.NOTE, State.NOTE)
    assert State.FAIL not in found.values()


def test_half_a_driver_is_found(tmp_path: Path) -> None:
    found = states(machine(tmp_path, GPU | RDMA))
    assert found["GPU 0000:1b:00.0"] is State.FAIL  # no driver has it
    assert found["NVIDIA driver"] is State.FAIL
    assert found["GPUDirect RDMA"] is State.WARN
    assert found["NIC of GPU 0000:1b:00.0"] is State.WARN  # it is at another node
    assert found["RDMA port mlx5_0:1"] is State.OK


def test_a_port_that_is_down_and_missing_device_files_are_found(tmp_path: Path) -> None:
    files = {name: text for name, text in RDMA.items() if "uverbs" not in name}
    files["sys/class/infiniband/mlx5_0/ports/1/state"] = "1: DOWN\n"
    found = states(machine(tmp_path, files))
    assert found["RDMA port mlx5_0:1"] is State.WARN
    assert found["RDMA device files"] is State.FAIL


def test_a_probe_that_fails_or_hangs_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(root: Path) -> Iterator[Found]:
        yield Found("before", State.OK, "seen", "")
        raise OSError("half a driver")

    released = threading.Event()

    def hung(root: Path) -> Iterator[Found]:
        released.wait()
        yield Found("never", State.OK, "", "")

    def sound(root: Path) -> Iterator[Found]:
        yield Found("sound", State.OK, "seen", "")

    monkeypatch.setattr(doctor, "READ_LIMIT_S", 1.0)
    told = diagnose(tmp_path, {"broken": broken, "hung": hung, "sound": sound}, risky=())
    released.set()
    assert [one.subject for one in told.found] == ["before", "broken", "hung", "sound"]
    assert "half a driver" in told.found[1].is_
    assert "no answer within" in told.found[2].is_


def test_a_library_that_crashes_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, {"nixl_cu13/__init__.py": "import os\nos.abort()\n"})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(doctor.__file__).parents[2]}")
    (line,) = diagnose(tmp_path, {}, risky=("NIXL",)).found
    assert line.state is State.FAIL
    assert line.is_.startswith("killed by signal 6")


def test_a_library_that_hangs_is_a_line(tmp_path: Path) -> None:
    (line,) = diagnose(tmp_path, {}, risky=("NIXL",), limit_s=0.01).found
    assert (line.state, line.is_) == (State.FAIL, "no answer within 0.01 s")


def test_the_command_prints_json_and_has_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Found("NIXL", State.FAIL, "broken", "no transport", "mend it")
    monkeypatch.setattr(doctor, "diagnose", lambda: doctor.Diagnosis((bad,)))
    done = kvrelay_here("doctor", "--json")
    assert done.returncode == 1
    assert msgspec.json.decode(done.stdout)["found"][0]["subject"] == "NIXL"
    assert "NIXL: mend it" in text_of(doctor.Diagnosis((bad,)))
