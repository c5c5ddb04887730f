"""The router room: which worker gets a request, by KV overlap and load.

``base`` is the contract; ``build_router`` is the door.
"""

from kvrelay.router.base import (
    CandidateScore,
    IndexState,
    ReplayRequester,
    Router,
    RoutingDecision,
    RoutingExplanation,
    RoutingRequest,
)
from kvrelay.router.factory import build_router
from kvrelay.router.router import PolicyRouter, RouterStage
from kvrelay.router.runtime import RuntimeSettings

__all__ = [
    "CandidateScore",
    "IndexState",
    "PolicyRouter",
    "ReplayRequester",
    "Router",
    "RouterStage",
    "RoutingDecision",
    "RoutingExplanation",
    "RoutingRequest",
    "RuntimeSettings",
    "build_router",
]
