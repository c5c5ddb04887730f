"""The settings of every room: frozen dataclasses whose field metadata is the command line's help.

Field names are flag names (``max_num_seqs`` is ``--max-num-seqs``) and keys of the YAML file, under the section that
the dataclass's ``section`` names. Values are checked at construction: what cannot be honoured is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from kvrelay.errors import ConfigError


def setting(default: object, help_text: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its help text and, for numbers, the range it is checked against."""
    return field(default=default, metadata={"help": help_text, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class Settings:
    """Base of the rooms' settings: checks the ranges that the fields declare."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            low, high = item.metadata.get("low"), item.metadata.get("high")
            value = getattr(self, item.name)
            if value is None or isinstance(value, str):
                continue
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{item.name} must be a finite number, got {value:g}", param=item.name)
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                bound = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
                raise ConfigError(f"{item.name} must be {bound}, got {value:g}", param=item.name)


@dataclass(frozen=True, slots=True)
class EngineConfig(Settings):
    """Scheduling and the block pool."""

    section: ClassVar[str] = "engine"

    max_num_seqs: int = setting(256, "Sequences that run at once.", low=1, high=65536)
    max_num_batched_tokens: int = setting(2048, "Token budget of one step (chunked prefill).", low=16)
    max_num_waiting: int = setting(1024, "Requests that may wait before new ones are refused (429).", low=0)
    kv_watermark: float = setting(
        16.0, "New requests get 429 when those in progress hold or wait for so many KV pools; 0: never.", low=0
    )
    block_size: int = setting(16, "Tokens per KV block.", low=1, high=1024)
    num_blocks: int = setting(0, "Blocks in the KV pool; 0: from kv_cache_memory.", low=0)
    kv_cache_memory: str = setting("auto", "Memory of the KV pool, e.g. 512MiB or 4GiB; auto: a share of what is free.")
    max_model_len: int = setting(0, "Longest prompt plus answer; 0: the checkpoint's own limit.", low=0)
    step_timeout_s: float = setting(
        300.0, "A worker whose engine is at one step for so long hangs, and ends itself; 0: never.", low=0
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV of equal prefixes.")


@dataclass(frozen=True, slots=True)
class RunnerConfig(Settings):
    """The device and how the model runs on it."""

    section: ClassVar[str] = "runner"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "Type of weights and KV.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model runs.")
    attention_backend: Literal["auto", "cpu", "torch", "flashinfer"] = setting("auto", "Attention implementation.")
    num_threads: int = setting(0, "Compute threads of this process; 0: the cores it may use.", low=0, high=1024)
    yield_while_starting: bool = setting(
        False, "Load and compile at lower CPU priority, beside workers that serve; serve restarts workers so."
    )
    enforce_eager: bool = setting(False, "CUDA: run decode without graphs.")
    seed: int = setting(0, "Seed from which requests without one draw theirs.")


@dataclass(frozen=True, slots=True)
class TransferConfig(Settings):
    """The KV data plane."""

    section: ClassVar[str] = "transfer"

    transport: Literal["nixl", "loopback"] = setting("nixl", "How KV moves (loopback: within one process, for tests).")
    ucx_tls: str = setting("auto", "UCX transports; auto: shared memory, cross-memory attach and TCP.")
    ucx_net_devices: str = setting(
        "auto", "Network devices of UCX, e.g. eth0 or mlx5_0:1; auto: all, or loopback alone for a worker on loopback."
    )
    transfer_timeout_s: float = setting(30.0, "Longest time that one read or write may take.", low=0.01)
    poll_interval_s: float = setting(0.0005, "Pause between polls while a hand-off is open.", low=0.00005, high=0.1)
    kv_checksums: bool = setting(False, "Checksum every block that is handed over; compute again what arrives damaged.")


@dataclass(frozen=True, slots=True)
class ControlConfig(Settings):
    """The control plane: discovery, prefill queue, events."""

    section: ClassVar[str] = "control"

    control: str = setting("", "Control server, e.g. nats://HOST:4222; empty: serve starts one on loopback.")
    discovery: str = setting("", "Discovery, e.g. etcd://HOST:2379; empty: on the control server.")
    namespace: str = setting("default", "Clusters with different namespaces on one server do not see each other.")
    lease_ttl_s: float = setting(10.0, "A process that is silent for so long is gone.", low=0.5, high=3600)
    connect_timeout_s: float = setting(5.0, "How long a start waits for the control server.", low=0.1)
    control_replicas: int = setting(
        0, "NATS servers that keep leases and queue; 0: three if the cluster has them, else one.", low=0, high=5
    )
    request_plane_security: Literal["curve", "none"] = setting(
        "curve", "Encryption and keys between frontends, workers and operators; none: with --insecure only."
    )
    insecure: bool = setting(False, "Allow to be reached without authentication.")


@dataclass(frozen=True, slots=True)
class DisaggConfig(Settings):
    """Remote or local prefill (mission, section 3). The first two can be changed at run time."""

    section: ClassVar[str] = "disagg"

    max_local_prefill_length: int = setting(256, "Prefills of up to so many tokens run locally; 0: none.", low=0)
    max_prefill_queue_size: int = setting(16, "A queue this long means: prefill locally.", low=0)
    remote_prefill_timeout_s: float = setting(30.0, "Unclaimed for so long, a prefill is taken back.", low=0.05)
    max_handoff_attempts: int = setting(2, "Claims of one hand-off before it is prefilled locally.", low=1)


@dataclass(frozen=True, slots=True)
class RouterConfig(Settings):
    """Which worker gets a request."""

    section: ClassVar[str] = "router"

    router: Literal["kv", "dynamo-v0", "round-robin", "random", "least-loaded", "power-of-two"] = setting(
        "kv", "Routing policy."
    )
    overlap_weight: float = setting(1.0, "kv: credit per token of prefix overlap.", low=0)
    decode_weight: float = setting(0.1, "kv: cost per token of context in flight, in prefill tokens.", low=0)
    temperature: float = setting(0.0, "kv: 0 takes the best, above it draws by softmax.", low=0)
    router_seed: int = setting(0, "Seed of random draws and ties.")
    kv_events: bool = setting(True, "Learn prefixes from the workers' events; false: guess them from placements.")
    stall_after_s: float = setting(
        3.0, "A worker at one step for so long gets requests only if all others are, too; 0: no difference.", low=0
    )
    approximate_ttl_s: float = setting(120.0, "Without events: how long a placement is thought to be cached.", low=0.1)


@dataclass(frozen=True, slots=True)
class FrontendConfig(Settings):
    """The HTTP service."""

    section: ClassVar[str] = "frontend"

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0: a free one.", low=0, high=65535)
    api_key: str = setting("", "Key that clients must send as a bearer token; empty: none.")
    api_keys_file: str = setting("", "File of hashed API keys, one a line; see kvrelay api-key.")
    requests_per_minute: int = setting(0, "Most requests of an API key per minute (429); 0: no limit.", low=0)
    tls_cert: str = setting("", "Certificate chain (PEM) for HTTPS; empty: HTTP.")
    tls_key: str = setting("", "Private key (PEM) of the certificate.")
    max_body_bytes: int = setting(16 * 1024 * 1024, "Largest request body.", low=1024)
    max_buffered_bytes: int = setting(
        256 * 1024 * 1024, "Request bytes held at once; beyond them the largest upload gets 503.", low=1024
    )
    max_waiting_requests: int = setting(4096, "Requests in flight before new ones get 429.", low=1)
    max_n: int = setting(128, "Largest n of a request.", low=1)
    max_prompts: int = setting(1024, "Most prompts in one completions request.", low=1)
    request_timeout_s: float = setting(0.0, "Default deadline of a request; 0: none.", low=0)
    migration_limit: int = setting(3, "How often a request is continued on another worker.", low=0)
    shutdown_timeout_s: float = setting(30.0, "How long open requests may take after SIGTERM.", low=0)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together: give both or none", param="tls_cert")


@dataclass(frozen=True, slots=True)
class KeyLimits(Settings):
    """What the requests of one API key may take, as its line in the keys file says. None: what all may."""

    requests_per_minute: int | None = setting(
        None, "Most requests per minute (429) instead of the frontend's; 0: no limit.", low=0
    )
    max_body_bytes: int | None = setting(None, "Largest request body (413), if below the frontend's own limit.", low=1)
    max_prompt_tokens: int | None = setting(None, "Most prompt tokens of a request, over all its prompts (413).", low=1)
    max_output_tokens: int | None = setting(
        None, "Most tokens that a request may ask for, over all its choices (413).", low=1
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig(Settings):
    """A worker's own HTTP port for monitoring: ``/metrics``, ``/health``, ``/live``."""

    section: ClassVar[str] = "metrics"

    metrics_port: int = setting(
        0,
        "Port of a worker's /metrics, /health and /live; 0: none. serve: the first of one per worker.",
        low=0,
        high=65535,
    )
    metrics_host: str = setting("127.0.0.1", "Address that it listens on.")
    metrics_keys_file: str = setting("", "File of hashed API keys that /metrics asks for; see kvrelay api-key.")


@dataclass(frozen=True, slots=True)
class MockConfig(Settings):
    """The timing model of the mock engine: base + per token (prefill), base + per sequence (decode)."""

    section: ClassVar[str] = "mock"

    prefill_base_s: float = setting(0.002, "Time of a step that prefills.", low=0)
    prefill_token_s: float = setting(0.00002, "Added per prefilled token.", low=0)
    decode_base_s: float = setting(0.004, "Time of a decode step.", low=0)
    decode_seq_s: float = setting(0.00005, "Added per decoding sequence.", low=0)
    hang_file: str = setting(
        "", "A step hangs while the file of this path, a dot and the worker's process id exists, to test what follows."
    )
    speedup_ratio: float = setting(1.0, "Divides all times; 0: no waiting at all.", low=0)
