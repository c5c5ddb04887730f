"""Settings: one frozen dataclass per room, composed into a process's configuration."""

from kvrelay.config.loading import load_settings as load_settings
from kvrelay.config.settings import ControlConfig as ControlConfig
from kvrelay.config.settings import DisaggConfig as DisaggConfig
from kvrelay.config.settings import EngineConfig as EngineConfig
from kvrelay.config.settings import FrontendConfig as FrontendConfig
from kvrelay.config.settings import GroupConfig as GroupConfig
from kvrelay.config.settings import KeyLimits as KeyLimits
from kvrelay.config.settings import MetricsConfig as MetricsConfig
from kvrelay.config.settings import MockConfig as MockConfig
from kvrelay.config.settings import RouterConfig as RouterConfig
from kvrelay.config.settings import RunnerConfig as RunnerConfig
from kvrelay.config.settings import TiersConfig as TiersConfig
from kvrelay.config.settings import TransferConfig as TransferConfig
from kvrelay.config.settings import UpstreamConfig as UpstreamConfig
from kvrelay.config.settings import VllmConfig as VllmConfig
from kvrelay.config.worker import WorkerConfig as WorkerConfig
from kvrelay.config.worker import WorkerRole as WorkerRole
