"""Engines small enough to run out of everything, on a clock that is moved by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.core.clock import ManualClock
from kvrelay.engine.core import EngineCore
from kvrelay.executors.mock import MockExecutor

VOCAB_SIZE = 500
EOS = (2,)


def build_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_num_waiting: int = 1000,
    kv_watermark: float = 0,
    max_model_len: int = 0,
    enable_prefix_caching: bool = True,
    exclusive_prefill: bool = False,
    worker_id: str = "d",
    clock: ManualClock | None = None,
    num_holding_blocks: int = 0,
    num_spill_blocks: int = 0,
    kv_retention: Literal["value", "recency"] = "value",
) -> EngineCore:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_waiting=max_num_waiting,
        kv_watermark=kv_watermark,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        kv_retention=kv_retention,
    )
    executor = MockExecutor(
        config,
        MockConfig(speedup_ratio=0),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS,
        max_model_len=4096,
        holding_bytes=num_holding_blocks * 8 * block_size,
        spill_bytes=num_spill_blocks * 8 * block_size,
    )
    engine = EngineCore(executor, config, clock or ManualClock(), worker_id=worker_id)
    engine.set_exclusive_prefill(exclusive_prefill)
    return engine


@pytest.fixture
def make_engine() -> Callable[..., EngineCore]:
    """Builds an engine over the mock executor; keyword arguments as in ``build_engine``."""
    return build_engine
