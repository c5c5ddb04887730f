"""Where Numba keeps compiled kernels: in a directory for each content of their sources.

    NUMBA_CACHE_DIR ──> the user's cache directory ──> beside the package ──> the temporary one ──> memory

Numba by itself keeps them for each path of the package, so that each clone and each installation would compile anew,
and looks only at a kernel's own file, not at those of the kernels that it has inlined. In memory kernels last as long
as the process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvrelay.config.loading import cache_directory, own_temporary_directory
from kvrelay.errors import ConfigError

_log = logging.getLogger(__name__)

PREFIX = "kvrelay-kernels-"
MAX_KEPT = 16
"""Directories of compiled kernels, by last use: of versions of kvrelay and Numba, and of CPUs that share a home."""


class _Kernels:
    """What Numba calls a cache locator, for the kernels of the files ``sources``; it leaves others to Numba's own."""

    def __init__(self, directory: Path, sources: frozenset[Path], line: int = 0) -> None:
        self._directory, self._sources, self._line = directory, sources, line

    def from_function(self, function: Callable[..., object], file: str) -> _Kernels | None:
        if Path(file).resolve() not in self._sources:
            return None
        return _Kernels(self._directory, self._sources, function.__code__.co_firstlineno)

    def ensure_cache_path(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._directory)

    def get_source_stamp(self) -> str:
        return self._directory.name

    def get_disambiguator(self) -> str:
        return str(self._line)


def place_kernel_cache(*sources: Path) -> None:
    """To be called before the first kernel of these files, or of the files in these directories, is defined. They
    import kernels only from each other."""
    from numba import config
    from numba.core.caching import CacheImpl
    from numba.core.dispatcher import Dispatcher

    paths = [path for source in sources for path in (sorted(source.glob("*.py")) if source.is_dir() else (source,))]
    name = PREFIX + _digest(paths)
    beside = sources[0] / "__pycache__" if sources[0].is_dir() else sources[0].parent / "__pycache__"
    places: list[Callable[[], Path]] = [cache_directory, lambda: beside, own_temporary_directory]
    if config.CACHE_DIR:
        places.insert(0, lambda: Path(config.CACHE_DIR))
    for place in places:
        with suppress(ConfigError, OSError):
            directory = place() / name
            if is_writable(directory):
                os.utime(directory)
                CacheImpl._locator_classes.insert(0, _Kernels(directory, frozenset(path.resolve() for path in paths)))
                forget_oldest(directory.parent)
                return
    _log.warning("no directory for compiled kernels is writable, so each start compiles them: set NUMBA_CACHE_DIR")
    # Numba has no other way to ignore ``cache=True``.
    Dispatcher.enable_caching = lambda _: None  # type: ignore[method-assign, assignment]


def is_writable(directory: Path) -> bool:
    """Whether we can make files there. The directory is made if need be."""
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        return True
    return False


def forget_oldest(base: Path) -> None:
    """Remove all but the MAX_KEPT last used directories of kernels. A process that still uses one makes it again."""
    with suppress(OSError):  # another process removes them, too
        by_use = sorted(base.glob(f"{PREFIX}*"), key=lambda each: each.stat().st_mtime)
        for directory in by_use[:-MAX_KEPT]:
            shutil.rmtree(directory, ignore_errors=True)


def _digest(paths: Sequence[Path]) -> str:
    """Of all that decides what the compiler makes of these files."""
    import llvmlite  # type: ignore[import-untyped]
    import numba
    from llvmlite import binding

    compiler = (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
    )
    digest = hashlib.sha256(repr(compiler).encode())
    for path in paths:
        digest.update(b"%d %s " % (path.stat().st_size, path.name.encode()) + path.read_bytes())
    return digest.hexdigest()[:32]
