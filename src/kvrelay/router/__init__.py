"""The router room: which worker gets a request, by KV overlap and load. ``Router`` is the door."""

from kvrelay.router.base import (
    CandidateScore,
    IndexState,
    ReplayRequester,
    RouterStage,
    RoutingDecision,
    RoutingExplanation,
    RoutingRequest,
)
from kvrelay.router.pair_router import PairCandidate, PairDecision, PairRouter
from kvrelay.router.router import Router
from kvrelay.router.runtime import RuntimeSettings

__all__ = [
    "CandidateScore",
    "IndexState",
    "PairCandidate",
    "PairDecision",
    "PairRouter",
    "ReplayRequester",
    "Router",
    "RouterStage",
    "RoutingDecision",
    "RoutingExplanation",
    "RoutingRequest",
    "RuntimeSettings",
]
