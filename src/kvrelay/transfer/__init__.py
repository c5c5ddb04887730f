"""KV between machines: one-sided reads and writes between registered pools. The door of the room.

``base`` is the contract, ``pieces`` and ``layout_mapping`` the arithmetic, ``thread`` the interface for workers,
``build_transport`` the factory.
"""

from kvrelay.transfer.base import Notification, Transport
from kvrelay.transfer.factory import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.pieces import NO_PIECES, block_pieces
from kvrelay.transfer.stats import PeerTransferStats, TransferStats
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import Pieces, TransferOp

__all__ = [
    "NO_PIECES",
    "LayoutMapping",
    "Notification",
    "PeerTransferStats",
    "Pieces",
    "TransferOp",
    "TransferStats",
    "TransferThread",
    "Transport",
    "block_pieces",
    "build_transport",
    "pool_allocator",
    "shared_memory",
]
