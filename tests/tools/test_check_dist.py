"""The metadata declares what the source imports, in tested versions; the check of a wheel finds missing files."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
REQUIRED = [Requirement(text) for text in PROJECT["dependencies"]]
OPTIONAL = [Requirement(text) for extra in PROJECT["optional-dependencies"].values() for text in extra]
NOT_INSTALLED = {"vllm": ["vllm"]}


@pytest.fixture
def check_dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_dist", ROOT / "tools" / "check_dist.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_has_a_lower_bound_and_the_tested_version_lies_within() -> None:
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    for requirement in REQUIRED:
        assert any(clause.operator in (">=", "==") for clause in requirement.specifier), requirement
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_what_the_source_imports_is_declared() -> None:
    providers = NOT_INSTALLED | metadata.packages_distributions()
    declared = {canonicalize_name(requirement.name) for requirement in (*REQUIRED, *OPTIONAL)}
    undeclared = {
        f"{file.relative_to(ROOT)}: {top}"
        for file in (ROOT / "src").rglob("*.py")
        for top in imported(file) - set(sys.stdlib_module_names) - {"kvrelay"}
        if not {canonicalize_name(name) for name in providers.get(top, [])} & declared
    }
    assert not undeclared


def test_a_wheel_has_the_package_and_nothing_else(check_dist: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "kvrelay-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "kvrelay/bench/compare.py",
            "kvrelay-0.1.0.dist-info/METADATA",
            "benchmarks/burst.py",
            "kvrelay/data/__pycache__/prose.cpython-311.pyc",
            "tests/x.py",
        ):
            archive.writestr(name, "")
    found = ["benchmarks/burst.py", "kvrelay/data/__pycache__/prose.cpython-311.pyc", "tests/x.py"]
    assert check_dist.foreign_files(wheel) == found


def imported(file: Path) -> set[str]:
    """The top-level names of the modules that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return {name.split(".")[0] for name in names}


def test_a_wheel_without_its_data_is_noticed(check_dist: ModuleType, tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line.removeprefix("src/") for line in tracked.split()]
    left_out = {"kvrelay/py.typed", "kvrelay/data/llama-kvrecall/model.safetensors"}
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
        for name in set(names) - left_out:
            archive.writestr(name, "")
    assert set(check_dist.missing_files(tmp_path / "made.whl")) == left_out


def test_only_what_a_wheel_asks_for_is_linked(check_dist: ModuleType) -> None:
    found = {canonicalize_name(item.metadata["Name"]) for item in check_dist.needed([Requirement("rich")])}
    assert found == {"rich", "markdown-it-py", "mdurl", "pygments"}
