"""From keyword arguments to the settings of every room that an embedded cluster uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from kvrelay.config import DisaggConfig, EngineConfig, MockConfig, RouterConfig, RunnerConfig, load_settings
from kvrelay.config.loading import nearest
from kvrelay.config.settings import Settings
from kvrelay.errors import ConfigError
from kvrelay.launch.models import resolve_model
from kvrelay.llm.embedded import EmbeddedSettings, available_threads

SETTINGS: tuple[type[Settings], ...] = (EngineConfig, RunnerConfig, DisaggConfig, RouterConfig, MockConfig)

S = TypeVar("S", bound=Settings)


def embedded_settings(
    model: str | Path | None, prefill: int, decode: int, engine: str, settings: Mapping[str, object]
) -> EmbeddedSettings:
    """Raises ConfigError and CheckpointError. Without ``num_threads`` the engines share the cores evenly."""
    if prefill < 0:
        raise ConfigError(f"prefill must be at least 0, got {prefill}", param="prefill")
    if decode < 1:
        raise ConfigError(f"decode must be at least 1, got {decode}", param="decode")
    known = {item.name for cls in SETTINGS for item in dataclasses.fields(cls)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"unknown setting {name}{nearest(name, known)}", param=name)

    def build(cls: type[S]) -> S:
        return load_settings(cls, flags=settings)

    # Nobody waits for the next token of a batch. By cost, steps would be kept short for the answers that run.
    settings = {"disagg_policy": "threshold", **settings}
    runner = build(RunnerConfig)
    if runner.num_threads == 0:
        runner = dataclasses.replace(runner, num_threads=available_threads(prefill + decode))
    return EmbeddedSettings(
        model_path=resolve_model(str(model) if model is not None else None),
        prefill=prefill,
        decode=decode,
        engine_kind=engine,
        engine=build(EngineConfig),
        runner=runner,
        disagg=build(DisaggConfig),
        router=build(RouterConfig),
        mock=build(MockConfig),
    )
