"""Builds the router of one model from its settings."""

from __future__ import annotations

from kvrelay.config import RouterConfig
from kvrelay.core.clock import Clock
from kvrelay.errors import ConfigError
from kvrelay.router.base import ReplayRequester
from kvrelay.router.router import PolicyRouter, RouterStage


def build_router(
    config: RouterConfig,
    block_size: int,
    clock: Clock,
    stage: RouterStage = RouterStage.REQUEST,
    request_replay: ReplayRequester | None = None,
) -> PolicyRouter:
    """The router that ``config.router`` names, for workers whose KV blocks have ``block_size`` tokens.

    ``request_replay`` is how it asks a worker for events that it missed; without it the policies that look at
    prefixes learn what happens from now on. Raises ConfigError for a block size that cannot be.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}", param="block_size")
    return PolicyRouter(config, block_size, clock, stage, request_replay)
