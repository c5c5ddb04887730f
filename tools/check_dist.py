"""Checks the built distributions, and serves from the wheel as it would be installed elsewhere.

    python -m build && python tools/check_dist.py dist

1. The wheel has every file of the package that git tracks: modules, ``py.typed``, the bundled checkpoint; and nothing
   else of the repository, such as ``benchmarks`` and ``tests``.
2. The wheel is installed into a new virtual environment outside the checkout. To save gigabytes and minutes nothing is
   downloaded: the environment links those installed packages that the wheel's metadata asks for, directly or through
   another package, and no others. So an import of a package that is not declared fails, and so does pip if a version is
   out of bounds. Whether the index can deliver the packages, and their own installation, is not checked.
3. That environment runs ``kvrelay serve`` with one prefill and one decode worker and the bundled checkpoint, answers
   one completion, and ends with exit code 0 on SIGTERM.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300.0


def foreign_files(wheel: Path) -> list[str]:
    """Files of the wheel that are neither the package's nor its metadata, and bytecode."""
    ours = re.compile(r"kvrelay(-[^/]*\.dist-info)?/(?!.*__pycache__)")
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not ours.match(name)]


def missing_files(wheel: Path) -> list[str]:
    """Files of the package that git tracks and the wheel lacks."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    return [name for line in listed.splitlines() if (name := line.removeprefix("src/")) not in packed]


def requirements_of(wheel: Path) -> list[Requirement]:
    """What the wheel's own metadata asks for, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    found = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)]
    return [requirement for requirement in found if _applies(requirement, frozenset())]


def needed(requirements: list[Requirement]) -> Iterator[metadata.Distribution]:
    """The installed distributions that meet ``requirements``, and those that they need in turn."""
    seen: set[tuple[str, str]] = set()
    stack = list(requirements)
    while stack:
        requirement = stack.pop()
        key = (canonicalize_name(requirement.name), ",".join(sorted(requirement.extras)))
        if key in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(requirement.name)
        yield distribution
        for text in distribution.requires or []:
            below = Requirement(text)
            if _applies(below, frozenset(requirement.extras)):
                stack.append(below)


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""})


def link(distribution: metadata.Distribution, environment: Path, site: Path) -> None:
    """Make a distribution's packages, metadata and programs visible in ``environment``, at ``site``."""
    home = Path(str(distribution.locate_file("")))
    for top in {Path(file).parts[0] for file in distribution.files or []} - {".."}:
        if not (site / top).exists() and (home / top).exists():
            (site / top).symlink_to(home / top)
    for file in distribution.files or []:
        program = Path(str(distribution.locate_file(file))).resolve()
        beside = environment / "bin" / program.name
        if program.parent.name == "bin" and ".." in file.parts and not beside.exists():
            beside.symlink_to(program)


def make_environment(wheel: Path, environment: Path) -> None:
    """A virtual environment with the wheel and what it declares."""
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    for distribution in needed(requirements_of(wheel)):
        link(distribution, environment, site)
    pip = [environment / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", wheel]
    subprocess.run(pip, check=True, cwd=environment, env=_variables())


def serve_once(environment: Path) -> str:
    """Serve from the environment; gives the text of one completion. Raises RuntimeError."""
    command = [environment / "bin/kvrelay", "serve", "--prefill", "1", "--decode", "1", "--port", "0"]
    command += ["--disagg-policy", "always"]
    process = subprocess.Popen(command, cwd=environment, env=_variables(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.search(r"ready: (\S+) .* at (\S+)/v1 ", line)
        if ready is None:
            raise RuntimeError(f"serve did not become ready: {line!r}")
        body = json.dumps(
            {"model": ready[1], "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
        ).encode()
        request = urllib.request.Request(f"{ready[2]}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text = str(json.load(answer)["choices"][0]["text"])
        process.send_signal(signal.SIGTERM)
        if code := process.wait(TIMEOUT_S):
            raise RuntimeError(f"serve ended with exit code {code}")
        return text
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _variables() -> dict[str, str]:
    """The environment without what would let the checkout in."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def main(directory: Path) -> int:
    (wheel,) = directory.resolve().glob("*.whl")
    if missing := missing_files(wheel):
        print(f"the wheel lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    if foreign := foreign_files(wheel):
        print(f"the wheel has {', '.join(foreign)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvrelay-wheel-") as scratch:
        environment = Path(scratch) / "venv"
        make_environment(wheel, environment)
        found = [environment / "bin/python", "-c", "import kvrelay; print(kvrelay.__file__)"]
        place = subprocess.run(found, check=True, cwd=scratch, env=_variables(), capture_output=True, text=True).stdout
        if not place.startswith(scratch):
            print(f"kvrelay was imported from {place.strip()}, not from the wheel", file=sys.stderr)
            return 1
        print(f"served from {wheel.name}: {serve_once(environment)!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
