"""Memory for a KV pool that other processes of this host can map.

It owns an anonymous file (memfd): it has no name in any directory, so that nothing is left over when the process is
killed, and its pages go with the last process that maps it. Its size is sealed, so no peer can cut it off under us.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets

from kvrelay.core.layout import MemoryRegion
from kvrelay.errors import ConfigError, FatalError

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class SharedPoolMemory:
    """Allocates one pool. Give ``allocate`` to the executor and this object to the transport."""

    def __init__(self) -> None:
        self.name = f"kvrelay-{secrets.token_hex(8)}"
        """By which a peer knows that it has opened this file and no other."""
        self.fd = -1
        self.num_bytes = 0
        self._address = 0

    def __repr__(self) -> str:
        return f"SharedPoolMemory({self.name}, {self.num_bytes} bytes)"

    def reserve(self) -> int:
        """The file, still empty, for processes of the same engine that are to inherit it before ``allocate``.

        Raises ConfigError if the kernel has none.
        """
        if self.fd < 0:
            try:
                self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            except (OSError, AttributeError) as exc:
                raise _no_memory(0, exc) from exc
        return self.fd

    def allocate(self, num_bytes: int) -> mmap.mmap:
        """Zeroed memory, not resident before it is touched. Once only. Raises ConfigError if there is none."""
        if self.num_bytes:
            raise FatalError("the shared KV pool is allocated already")
        fd = self.reserve()
        try:
            os.ftruncate(fd, num_bytes)
            seals = [getattr(fcntl, seal) for seal in _SEALS]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals[0] | seals[1] | seals[2])
            memory = mmap.mmap(fd, num_bytes)
        except (OSError, ValueError, OverflowError) as exc:
            self.close()
            raise _no_memory(num_bytes, exc) from exc
        self.num_bytes, self._address = num_bytes, address_of(memory)
        return memory

    def adopt(self, name: str, fd: int, region: MemoryRegion) -> None:
        """Be the memory ``name`` that another process of this engine has allocated: ``region`` is this process's
        mapping of it all, ``fd`` the file."""
        self.name, self.fd, self.num_bytes, self._address = name, fd, region.num_bytes, region.address

    def offset_of(self, region: MemoryRegion) -> int:
        """Where ``region`` begins in the file. Raises FatalError if it does not lie within."""
        offset = region.address - self._address
        if self.fd < 0 or region.device != "cpu" or not 0 <= offset <= self.num_bytes - region.num_bytes:
            raise FatalError("transport shm: this engine did not allocate its KV pool in shared memory")
        return offset

    def close(self) -> None:
        """Let no one else map it. What is mapped stays, here and elsewhere. Idempotent."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def address_of(memory: mmap.mmap) -> int:
    """Of its first byte. Holds no reference to ``memory``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _no_memory(num_bytes: int, exc: Exception) -> ConfigError:
    return ConfigError(
        f"cannot allocate {num_bytes} bytes of shared memory for the KV pool ({exc}); use --transport nixl",
        param="transport",
    )
