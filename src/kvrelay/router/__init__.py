"""The router room: which worker gets a request, by KV overlap and load.

``base`` is the contract; ``build_router`` is the door.
"""

from kvrelay.router.base import CandidateScore, ReplayRequester, Router, RoutingDecision, RoutingRequest
from kvrelay.router.factory import build_router
from kvrelay.router.router import PolicyRouter, RouterStage

__all__ = [
    "CandidateScore",
    "PolicyRouter",
    "ReplayRequester",
    "Router",
    "RouterStage",
    "RoutingDecision",
    "RoutingRequest",
    "build_router",
]
