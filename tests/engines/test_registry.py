from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvrelay.config import EngineConfig, WorkerConfig
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines import registry
from kvrelay.engines.registry import build_executor, engine_names
from kvrelay.errors import ConfigError
from kvrelay.executors.host_memory import HostMemory
from kvrelay.executors.mock import MockExecutor


def settings(path: Path | None = None) -> WorkerConfig:
    engine = EngineConfig(num_blocks=8, max_model_len=64)
    return WorkerConfig(model_path=path or bundled_checkpoint_path(), engine=engine)


def other_engine(given: WorkerConfig, memory: HostMemory) -> MockExecutor:
    return MockExecutor(given.engine, given.mock, vocab_size=7)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("other", f"{__name__}:other_engine", registry.ENTRY_POINT_GROUP),
        EntryPoint("absent", "no_such_package:build", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    # The loader imports by name; pytest's import mode gives this module one that only this process knows.
    monkeypatch.setattr(EntryPoint, "load", lambda self: other_engine if self.name == "other" else _fail())


def _fail() -> None:
    raise ImportError("No module named 'no_such_package'")


def test_the_mock_takes_its_vocabulary_from_the_checkpoint() -> None:
    executor = build_executor("mock", settings())
    assert isinstance(executor, MockExecutor)
    assert executor.vocab_size > 256


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_an_engine() -> None:
    assert engine_names() == ("torch", "mock", "openai", "vllm", "absent", "other")
    assert build_executor("other", settings()).vocab_size == 7


@pytest.mark.usefixtures("installed")
def test_an_engine_that_cannot_be_imported_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="engine absent cannot be loaded from no_such_package:build"):
        build_executor("absent", settings())


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="there is no engine tensorflow; installed engines are torch, mock"):
        build_executor("tensorflow", settings())
