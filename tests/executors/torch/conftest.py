"""Checkpoints and executors for the torch executor's tests; ``tests.executors.harness`` drives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.executors.harness import Harness, random_prompts

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.engine.step import Executor
from kvrelay.executors.torch import build_executor


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny float32 checkpoint of an architecture, made once."""
    made: dict[str, Path] = {}

    def make(arch: str) -> Path:
        from kvrelay.executors.torch.checkpoints import make_model

        if arch not in made:
            made[arch] = tmp_path_factory.mktemp("models") / arch
            make_model(made[arch], arch, "tiny", dtype="float32")
        return made[arch]

    return make


def build(model: Path, *, dtype: str = "float32", attention: str = "auto", **engine: int) -> Executor:
    settings = {"num_blocks": 256, "max_model_len": 512, "max_num_seqs": 8} | engine
    return build_executor(
        model, RunnerConfig(dtype=dtype, attention_backend=attention, device="cpu"), EngineConfig(**settings)
    )


@pytest.fixture(scope="session")
def executor_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Executor]:
    """A float32 executor of an architecture, built once. Tests release their slots."""
    built: dict[str, Executor] = {}

    def get(arch: str) -> Executor:
        if arch not in built:
            built[arch] = build(checkpoint_of(arch))
        return built[arch]

    return get


@pytest.fixture(scope="session", name="build")
def build_fixture() -> Callable[..., Executor]:
    return build


@pytest.fixture(scope="session")
def harness_of() -> type[Harness]:
    return Harness


@pytest.fixture(scope="session", name="random_prompts")
def random_prompts_fixture() -> Callable[..., list[list[int]]]:
    return random_prompts
