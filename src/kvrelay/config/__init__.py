"""Settings: one frozen dataclass per room, composed into a process's configuration."""

from kvrelay.config.loading import load_settings
from kvrelay.config.settings import (
    NO_STOCK_STAGING,
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    FrontendConfig,
    GroupConfig,
    KeyLimits,
    MetricsConfig,
    MockConfig,
    RouterConfig,
    RunnerConfig,
    TransferConfig,
    UpstreamConfig,
    VllmConfig,
)
from kvrelay.config.worker import WorkerConfig, WorkerRole

__all__ = [
    "NO_STOCK_STAGING",
    "ControlConfig",
    "DisaggConfig",
    "EngineConfig",
    "FrontendConfig",
    "GroupConfig",
    "KeyLimits",
    "MetricsConfig",
    "MockConfig",
    "RouterConfig",
    "RunnerConfig",
    "TransferConfig",
    "UpstreamConfig",
    "VllmConfig",
    "WorkerConfig",
    "WorkerRole",
    "load_settings",
]
