"""Seals on published frames."""

from __future__ import annotations

import pytest

from kvrelay.core.sealing import SEAL_BYTES, new_secret, seal, unseal
from kvrelay.errors import ProtocolError

SECRET = new_secret()


@pytest.mark.parametrize("frame", [b"", b"x", bytes(range(256)) * 100])
def test_a_sealed_frame_comes_back(frame: bytes) -> None:
    sealed = seal(SECRET, "load.w", frame)
    assert len(sealed) == len(frame) + SEAL_BYTES
    assert unseal(SECRET, "load.w", sealed) == frame
    assert seal(b"", "load.w", frame) == unseal(b"", "load.w", frame) == frame


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"frame", id="no seal"),
        pytest.param(b"\0" * SEAL_BYTES + b"frame", id="zeros for a seal"),
        pytest.param(seal(new_secret(), "load.w", b"frame"), id="another secret"),
        pytest.param(seal(SECRET, "load.other", b"frame"), id="another subject"),
        pytest.param(seal(SECRET, "load.w", b"frame")[:-1], id="cut short"),
        pytest.param(seal(SECRET, "load.w", b"frame") + b"s", id="longer"),
        pytest.param(seal(SECRET, "load.wfr", b"ame"), id="a byte moved into the subject"),
    ],
)
def test_a_frame_with_a_wrong_seal_is_refused(forged: bytes) -> None:
    with pytest.raises(ProtocolError):
        unseal(SECRET, "load.w", forged)
