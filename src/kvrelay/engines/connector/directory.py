"""A directory by which a plain ``vllm serve`` and the kvrelay worker in front of it find each other, in any order.

    engine.json, engine.lock    by vLLM's scheduler half: an EngineEntry; the lock is held while it lives
    pool.json, worker.lock      by the worker: the StagingPlace of its pool; the lock is held while it lives
    tickets-*                   by the worker: the pool's TicketTable

A request names a pool by a random number that is only in ``pool.json``. So it comes from the worker, and from its
present incarnation: after a restart ``pool.json`` names another. The directory belongs to the user of both processes
alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector.locks import is_locked, try_lock
from kvrelay.engines.connector.terms import VERSION, StagingPlace
from kvrelay.errors import UNREADABLE, ConfigError, InvalidInputError

CONFIG_KEY = "kvrelay_staging_dir"
"""The directory in vLLM's ``kv_connector_extra_config``."""
ENGINE, POOL, TICKETS = "engine.json", "pool.json", "tickets-"
ENGINE_LOCK, WORKER_LOCK = "engine.lock", "worker.lock"


class EngineEntry(msgspec.Struct, frozen=True):
    """A vLLM with kvrelay's connector. ``num_blocks``: of its own pool, in blocks of ``layout``."""

    fingerprint: str
    layout: KVLayout
    num_blocks: int
    max_model_len: int
    version: int = VERSION


Entry = TypeVar("Entry", EngineEntry, StagingPlace)


class _Versioned(msgspec.Struct):
    version: int


class StagingDirectory:
    """Makes the directory if it is not there. Raises ConfigError if others than this user may use it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except OSError as exc:
            raise ConfigError(f"the staging directory {path} cannot be used: {exc.strerror}") from exc
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"the staging directory {path} must belong to the user of vLLM and of the worker, and to no one else: "
                f"chown it to user {os.geteuid()}, and chmod 700"
            )

    @classmethod
    def configured(cls, extra_config: Mapping[str, Any]) -> StagingDirectory:
        """That of vLLM's ``kv_connector_extra_config``. Raises ConfigError."""
        path = extra_config.get(CONFIG_KEY)
        if not isinstance(path, str) or not path:
            raise ConfigError(f'kv_connector_extra_config needs "{CONFIG_KEY}", the worker\'s --upstream-staging')
        return cls(path)

    def hold(self, name: str, holder: str) -> int:
        """The open file that keeps this lock until it is closed. Raises ConfigError if another process has it."""
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(fd):
            os.close(fd)
            raise ConfigError(f"another {holder} uses the staging directory {self.path}: give each a directory")
        return fd

    def is_held(self, name: str) -> bool:
        try:
            fd = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return is_locked(fd)
        finally:
            os.close(fd)

    def write(self, name: str, entry: EngineEntry | StagingPlace) -> None:
        """Readers see the old file or the new one. Raises ConfigError."""
        draft = self.path / f"{name}.{secrets.token_hex(4)}"
        try:
            draft.write_bytes(msgspec.json.encode(entry))
            draft.replace(self.path / name)
        except OSError as exc:
            raise ConfigError(f"cannot write {self.path / name}: {exc.strerror}") from exc

    def read(self, name: str, kind: type[Entry]) -> Entry | None:
        """None if it is not there. Raises InvalidInputError if another version of kvrelay has written it."""
        try:
            written = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise InvalidInputError(f"cannot read {self.path / name}: {exc.strerror}") from exc
        try:
            version = msgspec.json.decode(written, type=_Versioned).version
            if version != VERSION:
                raise InvalidInputError(
                    f"{self.path / name} is of version {version}, this is {VERSION}: the worker and vLLM need the same "
                    "kvrelay"
                )
            return msgspec.json.decode(written, type=kind)
        except UNREADABLE as exc:
            raise InvalidInputError(f"{self.path / name} cannot be read: {exc}") from exc


class DirectoryPools:
    """Pools as a connector with this ``entry`` sees them: that of the present worker, if it is made for this vLLM."""

    def __init__(self, directory: StagingDirectory, entry: EngineEntry) -> None:
        self._directory = directory
        self._entry = entry
        self._place: StagingPlace | None = None

    def place(self, pool: str) -> StagingPlace:
        if self._place is None or self._place.pool != pool:
            self._place = self._directory.read(POOL, StagingPlace)
        if not pool or self._place is None or self._place.pool != pool:
            raise InvalidInputError("its staging pool is not that of the present worker, which may have been restarted")
        if (self._place.fingerprint, self._place.layout) != (self._entry.fingerprint, self._entry.layout):
            raise InvalidInputError(
                f"its staging pool is made for {self._place.fingerprint}, and this is {self._entry.fingerprint}"
            )
        return self._place
