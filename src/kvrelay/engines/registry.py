"""Maps an engine's name to its executor. Installed packages add names by the entry point group ``kvrelay.engines``.

An entry point loads to a builder: a function from WorkerConfig and HostMemory to an ``engine.step.Executor``. Nothing
heavy is imported before the chosen builder runs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from kvrelay.config import WorkerConfig
from kvrelay.dp.group import StepGroup
from kvrelay.errors import ConfigError
from kvrelay.executors.host_memory import ANYWHERE, HostMemory

if TYPE_CHECKING:
    from kvrelay.engine.contract import EngineHost
    from kvrelay.engine.step import Executor
    from kvrelay.engines.hosted.host import BackendHost

ENTRY_POINT_GROUP = "kvrelay.engines"

BUILT_IN = ("torch", "mock")

HOSTS = ("openai", "vllm")
"""Engines without an executor and without kvrelay's scheduler: they implement ``engine.contract`` themselves."""

OWN = (*BUILT_IN, *HOSTS)

Builder = Callable[[WorkerConfig, HostMemory], "Executor"]
"""Loads the model and allocates the KV pool. Raises CheckpointError, UnsupportedModelError or ConfigError."""


def engine_names() -> tuple[str, ...]:
    """Names of engines: the built-in ones first, then those of installed packages."""
    return (*OWN, *sorted(_installed().keys() - set(OWN)))


def build_host(
    name: str, settings: WorkerConfig, worker_id: str, memory: HostMemory = ANYWHERE, group: StepGroup | None = None
) -> EngineHost | None:
    """The engine called ``name`` if it is one of HOSTS, or else None: then ``build_executor`` builds its executor.
    Raises what its builder raises."""
    for param in ("lora_dir", "max_loras"):
        if getattr(settings.vllm, param) and name != "vllm":
            flag = param.replace("_", "-")
            raise ConfigError(f"engine {name} has no adapters: --{flag} needs --engine vllm", param=param)
    if name not in HOSTS:
        return None
    host: BackendHost = import_module(f"kvrelay.engines.{name}").from_settings(settings, worker_id, memory)
    if group is not None:
        host.enter(group)
    return host


def build_executor(name: str, settings: WorkerConfig, memory: HostMemory = ANYWHERE) -> Executor:
    """The executor called ``name``. Raises what its builder raises, and ConfigError for a name without a builder."""
    builder: Builder
    if name in BUILT_IN:
        builder = import_module(f"kvrelay.executors.{name}").from_settings
        return builder(settings, memory)
    if name in HOSTS:
        raise ConfigError(f"engine {name} schedules by itself: it has no executor", param="engine")
    entry = _installed().get(name)
    if entry is None:
        known = ", ".join(engine_names())
        raise ConfigError(f"there is no engine {name}; installed engines are {known}", param="engine")
    try:
        builder = entry.load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"engine {name} cannot be loaded from {entry.value}: {exc}", param="engine") from exc
    return builder(settings, memory)


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
