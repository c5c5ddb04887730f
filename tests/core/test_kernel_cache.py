"""Where compiled kernels are kept: by content, shared by all copies of the same sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.core.kernel_cache import MAX_KEPT, PREFIX

MODULE = """
import sys
from pathlib import Path
from kvrelay.core.kernel_cache import place_kernel_cache
place_kernel_cache(Path(__file__).parent)
from numba import njit
from factor import FACTOR

@njit(cache=True)
def times(x):
    return FACTOR * x

print(times(21), sum(times.stats.cache_hits.values()), times.stats.cache_path or "memory")
"""


def package(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "factor.py").write_text("FACTOR = 2\n")
    (directory / "module.py").write_text(MODULE)
    return directory / "module.py"


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """Beside it nothing can be made: a file has the name of the directory, which also root cannot replace."""
    module = package(tmp_path / "package")
    (tmp_path / "package/__pycache__").write_text("")
    return module


def start(module: Path, **environment: str) -> subprocess.Popen[str]:
    """No HOME but what is given, and no user in passwd."""
    ours = {"PYTHONPATH": ":".join(sys.path), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(module)], env=ours | environment, stdout=pipe, stderr=pipe, text=True)


def said_by(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it prints, and its warnings."""
    said, warned = process.communicate()
    assert process.returncode == 0, warned
    return said.strip(), warned


def run(module: Path, **environment: str) -> tuple[str, str]:
    return said_by(start(module, **environment))


def test_the_users_cache_then_the_temporary_directory_then_memory(module: Path, tmp_path: Path) -> None:
    nowhere, cache, temporary = str(module), tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    given = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    said, warned = run(module, **given)
    assert said.startswith(f"42 0 {cache}/kvrelay/{PREFIX}")
    assert not warned
    said, warned = run(module, **given | {"XDG_CACHE_HOME": nowhere})
    assert said.startswith(f"42 0 {temporary}/kvrelay-")
    assert not warned
    (own,) = temporary.iterdir()
    own.chmod(0o777)  # as if somebody else had made it: Numba unpickles what it finds
    said, warned = run(module, **given | {"XDG_CACHE_HOME": nowhere})
    assert said == "42 0 memory"
    assert "set NUMBA_CACHE_DIR" in warned
    said, _ = run(module, **given | {"NUMBA_CACHE_DIR": str(tmp_path / "chosen")})
    assert said.startswith(f"42 0 {tmp_path}/chosen/{PREFIX}")


def test_beside_the_package_if_the_users_cache_is_not_writable(tmp_path: Path) -> None:
    module = package(tmp_path / "package")
    said, warned = run(module, XDG_CACHE_HOME=str(module))
    assert said.startswith(f"42 0 {tmp_path}/package/__pycache__/{PREFIX}")
    assert not warned


def test_a_second_copy_compiles_nothing_but_what_differs(tmp_path: Path) -> None:
    """Of the same sources, elsewhere and with other times. Numba itself looks only at the file of the kernel, not at
    that of a constant."""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first, second = package(tmp_path / "first"), package(tmp_path / "elsewhere/second")
    os.utime(second, (1, 1))
    said, _ = run(first, **environment)
    where = said.removeprefix("42 0 ")
    assert run(second, **environment) == (f"42 1 {where}", "")
    status = (second.parent / "factor.py").stat()
    (second.parent / "factor.py").write_text("FACTOR = 3\n")
    os.utime(second.parent / "factor.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(second, **environment)[0].startswith("63 0 ")


@pytest.mark.matrix
def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    starting = [start(package(tmp_path / name), **environment) for name in ("a", "b")]
    assert {said_by(process)[0].split()[0] for process in starting} == {"42"}


def test_the_oldest_go(tmp_path: Path) -> None:
    base = tmp_path / "cache/kvrelay"
    for number in range(MAX_KEPT + 3):
        (base / f"{PREFIX}{number}").mkdir(parents=True)
        (base / f"{PREFIX}{number}/kernel.nbc").write_bytes(b"old")
        os.utime(base / f"{PREFIX}{number}", (number, number))
    (base / "gguf").mkdir()
    os.utime(base / "gguf", (0, 0))
    said, _ = run(package(tmp_path / "package"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    newest = {f"{PREFIX}{number}" for number in range(4, MAX_KEPT + 3)}
    assert {path.name for path in base.iterdir()} == {*newest, Path(said.split()[2]).name, "gguf"}
