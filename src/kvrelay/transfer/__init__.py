"""KV between machines: one-sided reads and writes between registered pools. The door of the room.

``base`` is the contract, ``plan`` and ``planner`` the arithmetic, ``thread`` the interface for workers,
``build_transport`` the factory.
"""

from kvrelay.transfer.base import Notification, Transport
from kvrelay.transfer.factory import build_transport, pool_allocator, shared_memory
from kvrelay.transfer.plan import EMPTY_PLAN, plan_blocks
from kvrelay.transfer.planner import TransferPlanner
from kvrelay.transfer.stats import PeerTransferStats, TransferStats
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import TransferOp, TransferPlan

__all__ = [
    "EMPTY_PLAN",
    "Notification",
    "PeerTransferStats",
    "TransferOp",
    "TransferPlan",
    "TransferPlanner",
    "TransferStats",
    "TransferThread",
    "Transport",
    "build_transport",
    "plan_blocks",
    "pool_allocator",
    "shared_memory",
]
