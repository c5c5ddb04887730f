"""The mock executor is tested below the same small engines as the engine itself."""

from tests.engine.conftest import make_engine

__all__ = ["make_engine"]
