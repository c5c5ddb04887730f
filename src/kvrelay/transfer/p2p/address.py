"""Where transport p2p listens, and whom it lets in: a value, known to all transports' builders."""

from __future__ import annotations

import msgspec

from kvrelay.core.zmq_keys import CurveKeys


class P2pAddress(msgspec.Struct, frozen=True):
    """The host of the control port, and its keys; None: open. ``is_guarded`` False: every peer may touch the whole
    pool."""

    host: str = "127.0.0.1"
    keys: CurveKeys | None = None
    is_guarded: bool = True


LOOPBACK = P2pAddress()
UNGUARDED = P2pAddress(is_guarded=False)
"""For measurements without hand-offs."""
