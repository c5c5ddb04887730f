"""Errors of measuring, besides wrong input. The command line prints each as one line."""

from __future__ import annotations

from kvrelay.errors import KvrelayError


class BenchError(KvrelayError):
    """A measurement could not be taken."""


class ServerDownError(BenchError):
    """No server answers at the address, or the server went away."""


class BadResponseError(BenchError):
    """The server's answer is not the API's: not HTTP, an error status, or not JSON."""


class MissingPackageError(BenchError):
    """The command needs an optional package."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package}: pip install 'kvrelay[bench]'")
