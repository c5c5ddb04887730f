"""The scripted server of the client's tests."""

from __future__ import annotations

from tests.bench.conftest import scripted

__all__ = ["scripted"]
