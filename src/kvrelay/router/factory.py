"""Builds the router of one model from its settings."""

from __future__ import annotations

from kvrelay.config import RouterConfig
from kvrelay.core.clock import Clock
from kvrelay.errors import ConfigError
from kvrelay.router.router import PolicyRouter, RouterStage


def build_router(
    config: RouterConfig, block_size: int, clock: Clock, stage: RouterStage = RouterStage.REQUEST
) -> PolicyRouter:
    """The router that ``config.router`` names, for workers whose KV blocks have ``block_size`` tokens.

    Raises ConfigError for a block size that cannot be.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}", param="block_size")
    if config.router in ("kv", "dynamo-v0"):
        raise ConfigError(f"router {config.router} needs an index of prefixes, which is not built in", param="router")
    return PolicyRouter(config, block_size, clock, stage)
