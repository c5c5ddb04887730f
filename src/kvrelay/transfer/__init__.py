"""KV between machines: one-sided reads and writes between registered pools. The door of the room.

``base`` is the contract, ``pieces`` and ``layout_mapping`` the arithmetic, ``thread`` the interface for workers,
``build_transport`` the factory.
"""

from kvrelay.transfer.factory import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.pieces import block_pieces
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import TransferOp

__all__ = ["TransferOp", "TransferThread", "block_pieces", "build_transport", "pool_allocator", "shared_memory"]
