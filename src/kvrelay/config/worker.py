"""Everything that one worker is started with, on any way: ``serve``, ``worker``, a rank of a group, or embedded."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

from kvrelay.config.addresses import bare_host
from kvrelay.config.settings import (
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    GroupConfig,
    MetricsConfig,
    MockConfig,
    RunnerConfig,
    Settings,
    TiersConfig,
    TransferConfig,
    UpstreamConfig,
    VllmConfig,
)
from kvrelay.errors import ConfigError

MAX_NAME_CHARS = 1024


class WorkerRole(enum.StrEnum):
    """What a worker does now. A role is state: it can change without reloading weights.

    A ``decode`` worker takes requests and may hand off their prefills; a ``prefill`` worker pulls prefills from the
    queue; a worker that does ``both`` takes requests and prefills them itself unless there are prefill workers to help
    (also called aggregated).
    """

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def takes_requests(self) -> bool:
        """Whether a frontend may send requests here (decode-first order)."""
        return self is not WorkerRole.PREFILL

    @property
    def pulls_prefills(self) -> bool:
        return self is WorkerRole.PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """``model`` is the name that clients use, ``model_path`` the checkpoint's directory; ``role`` is the first.
    Frontends and peers reach the worker at ``host``; ``port`` is that of its request plane (0: a free one)."""

    model_path: Path
    model: str = ""
    role: WorkerRole = WorkerRole.BOTH
    engine_kind: str = "torch"
    host: str = "127.0.0.1"
    port: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    mock: MockConfig = field(default_factory=MockConfig)
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    record_steps: str = ""
    """File for everything that the engine is told and schedules; empty: none (``engine.recording``)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", bare_host(self.host))
        # What no request could name, or JSON cannot write: a byte of a path that is not UTF-8 is a surrogate here.
        if len(self.model) > MAX_NAME_CHARS or any(char < " " or "\ud800" <= char <= "\udfff" for char in self.model):
            message = f"the model's name has at most {MAX_NAME_CHARS} characters of Unicode, none of them control"
            raise ConfigError(f"{message} characters: give another name with --served-model-name", param="model")

    @property
    def exchanges_kv(self) -> bool:
        """Whether prefill and decode are apart, or may be later."""
        return self.role is not WorkerRole.BOTH or self.vllm.vllm_connector != "auto"

    @property
    def holding_bytes(self) -> int:
        """Of the engine's holding area, if the engine is one of ours. A recording does not tell what is held, and ranks
        that move their own KV reach their own blocks only."""
        is_reached = not (self.computes_in_ranks and self.transfer.kv_transfer_per_rank)
        return self.transfer.kv_buffer_size if is_reached and not self.record_steps else 0

    @property
    def spill_bytes(self) -> int:
        """Of host memory for what a holding area on another device has no room for."""
        return self.transfer.p2p_pool_bytes if self.holding_bytes else 0

    @property
    def computes_in_ranks(self) -> bool:
        """Whether processes of its own compute the model, instead of the worker's."""
        return self.runner.num_ranks > 1 or self.group.ep

    @property
    def num_kv_ports(self) -> int:
        """Of one engine with transport p2p, from ``kv_port`` on: ranks that move their own KV listen, too
        (``transfer/rank_map.py``)."""
        return 2 * self.runner.num_ranks if self.computes_in_ranks else 1


WORKER_SECTIONS: dict[str, type[Settings]] = {
    name: hint for name, hint in get_type_hints(WorkerConfig).items() if issubclass(hint, Settings)
}
"""The sections of a WorkerConfig, by name."""
