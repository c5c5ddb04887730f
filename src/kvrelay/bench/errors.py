"""What can go wrong while measuring, beside wrong input: each is one line for the command line to print."""

from __future__ import annotations

from kvrelay.errors import KvrelayError


class BenchError(KvrelayError):
    """A measurement could not be taken."""


class ServerDownError(BenchError):
    """Nothing answers at the server's address, or it went away."""


class BadResponseError(BenchError):
    """The server answered something that is not the API: no HTTP, an error status, or not JSON."""


class MissingPackageError(BenchError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package}: pip install 'kvrelay[bench]'")
        self.package = package
