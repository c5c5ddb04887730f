"""The router room: which worker gets a request, by KV overlap and load. ``Router`` is the door."""

from kvrelay.router.base import IndexState as IndexState
from kvrelay.router.base import ReplayRequester as ReplayRequester
from kvrelay.router.base import RouterStage as RouterStage
from kvrelay.router.base import RoutingDecision as RoutingDecision
from kvrelay.router.base import RoutingExplanation as RoutingExplanation
from kvrelay.router.base import RoutingRequest as RoutingRequest
from kvrelay.router.pair_router import PairDecision as PairDecision
from kvrelay.router.pair_router import PairRouter as PairRouter
from kvrelay.router.router import Router as Router
from kvrelay.router.runtime import RuntimeSettings as RuntimeSettings
