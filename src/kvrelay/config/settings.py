"""The settings of every room: frozen dataclasses whose field metadata is the command line's help.

Field names are flag names (``max_num_seqs`` is ``--max-num-seqs``) and keys of the YAML file, under the section that
the dataclass's ``section`` names. Values are checked at construction: an invalid one raises ConfigError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from kvrelay.config.addresses import bare_host
from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.config.otlp import collector_of
from kvrelay.errors import ConfigError

DEFAULT_ITL_MS = 25.0
"""Objective between tokens where nobody has set one."""


def setting(default: object, help_text: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its help text and, for numbers, its permitted range."""
    return field(default=default, metadata={"help": help_text, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class Settings:
    """Base of the rooms' settings: checks the declared ranges of the fields."""

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
                bound = f"at least {low:.15g}" if high is None else f"between {low:.15g} and {high:.15g}"
                raise ConfigError(f"{item.name} must be {bound}, got {value:.15g}", param=item.name)


@dataclass(frozen=True, slots=True)
class EngineConfig(Settings):
    """Scheduling and the block pool."""

    section: ClassVar[str] = "engine"

    max_num_seqs: int = setting(256, "Maximum sequences that run at once.", low=1, high=65536)
    max_num_batched_tokens: int = setting(2048, "Token budget of one step (chunked prefill).", low=16)
    max_num_waiting: int = setting(1024, "Maximum waiting requests; further ones get 429.", low=0)
    priority_ageing_s: float = setting(10.0, "Seconds of waiting that count as one priority; 0: no ageing.", low=0)
    kv_watermark: float = setting(16.0, "KV demand, in KV pools, above which requests get 429; 0: no limit.", low=0)
    block_size: int = setting(16, "Tokens per KV block.", low=1, high=1024)
    num_blocks: int = setting(0, "Blocks in the KV pool; 0: from kv_cache_memory.", low=0)
    kv_cache_memory: str = setting("auto", "Size of the KV pool, e.g. 4GiB; auto: a share of free memory.")
    max_model_len: int = setting(
        0, "Maximum tokens of prompt plus answer; 0: the checkpoint's limit, or what the KV pool holds.", low=0
    )
    step_timeout_s: float = setting(
        300.0, "Seconds in one step after which a worker counts as hung and exits; 0: never.", low=0
    )
    enable_prefix_caching: bool = setting(True, "Reuse of the KV of equal prefixes.")
    kv_retention: Literal["value", "recency"] = setting(
        "value",
        "Evicted first; value: blocks worth least, by when their session should be back; recency: least recently used.",
    )


@dataclass(frozen=True, slots=True)
class RunnerConfig(Settings):
    """The device and how the model runs on it."""

    section: ClassVar[str] = "runner"

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "Type of weights and KV.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model runs.")
    attention_backend: Literal["auto", "cpu", "torch"] = setting("auto", "Attention implementation.")
    num_threads: int = setting(
        0,
        "Compute threads of a worker, all ranks together; 0: one per usable core (affinity, CPU quota).",
        low=0,
        high=1024,
    )
    tp: int = setting(1, "Tensor-parallel ranks, which share each layer.", low=1, high=64)
    pp: int = setting(1, "Pipeline stages, each with a run of layers.", low=1, high=64)
    rank_timeout_s: float = setting(
        3.0, "Seconds without a finished layer or a sign of life after which ranks count as hung.", low=0.2
    )
    yield_while_starting: bool = setting(False, "Loading and compiling at lower CPU priority; restarts by serve do so.")
    prefill_niceness: int = setting(
        5,
        "CPU niceness added to a prefill worker's computing thread, so that others on its cores go first; only "
        "with one compute thread on CPUs, and where CAP_SYS_NICE or RLIMIT_NICE can undo it; 0: none.",
        low=0,
        high=19,
    )
    enforce_eager: bool = setting(False, "vllm: no compilation, no CUDA graphs.")
    seed: int = setting(0, "Seed from which requests without a seed draw theirs.")

    @property
    def num_ranks(self) -> int:
        """Processes that compute one model."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class GroupConfig(Settings):
    """Data-parallel ranks of a worker group, and expert parallelism."""

    section: ClassVar[str] = "group"

    dp: int = setting(1, "Data-parallel ranks: engines with requests and KV of their own.", low=1, high=64)
    ep: bool = setting(False, "Expert parallelism: each expert whole on one of the dp * tp ranks.")
    dp_lookahead: int = setting(
        24,
        "With ep: steps that idle ranks are told to run ahead; more: fewer messages, more dummy steps.",
        low=0,
        high=10_000,
    )
    dp_rank: int = setting(-1, "This engine's data-parallel rank; -1: all ranks start on this host.", low=-1, high=63)
    dp_address: str = setting(
        "", "With dp_rank: HOST:PORT of rank 0, or an empty directory if all ranks are on one host."
    )

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.dp_rank >= self.dp:
            raise ConfigError(f"dp_rank {self.dp_rank} must be below dp {self.dp}: ranks count from 0", param="dp_rank")
        if self.dp_rank >= 0 and not self.dp_address:
            raise ConfigError(f"dp_rank {self.dp_rank} needs dp_address, where the ranks meet", param="dp_address")
        if self.dp_address and self.dp_rank < 0:
            raise ConfigError("dp_address is for single ranks: give dp_rank, too", param="dp_rank")

    @property
    def rank(self) -> int:
        """Of this engine; 0 without a group."""
        return max(0, self.dp_rank)

    @property
    def is_whole(self) -> bool:
        """Whether it stands for all ranks of a group, a process each."""
        return self.dp > 1 and self.dp_rank < 0


@dataclass(frozen=True, slots=True)
class TransferConfig(Settings):
    """The KV data plane."""

    section: ClassVar[str] = "transfer"

    transport: Literal["nixl", "shm", "p2p", "auto", "loopback"] = setting(
        "nixl",
        "Transport of KV; shm: shared memory, one host; p2p: process groups of torch (gloo, NCCL); auto: shm "
        "within a host, else nixl, if all workers have auto; loopback: within one process, for tests.",
    )
    ucx_tls: str = setting(
        "auto",
        "UCX transports, e.g. ib,cma,self,tcp for RDMA; auto: cross-memory attach and TCP for host memory, UCX's "
        "choice for GPUs.",
    )
    ucx_net_devices: str = setting(
        "auto", "Network devices of UCX, e.g. eth0 or mlx5_0:1; auto: all, or loopback for a worker on loopback."
    )
    transfer_timeout_s: float = setting(30.0, "Seconds until a read or write fails.", low=0.01)
    poll_interval_s: float = setting(
        0.0005, "Seconds between polls while a hand-off is open (RDMA, ranks).", low=0.00005, high=0.1
    )
    kv_checksums: bool = setting(False, "Checksums of handed-off blocks; damaged ones are recomputed.")
    send_type: Literal["PUT", "PUT_ASYNC", "GET"] = setting(
        "PUT_ASYNC",
        "PUT, PUT_ASYNC: the prefill worker writes (p2p: PUT waits until it has landed); GET: it keeps the KV "
        "until the decode worker has read it.",
    )
    fetch_prefixes: bool = setting(
        True, "Prefixes read from other workers where that beats computing them; ours are lent."
    )
    kv_transfer_per_rank: bool = setting(
        False, "With --tp or --pp on CPUs each rank moves its own KV, as always on CUDA."
    )
    kv_buffer_size: int = setting(
        64 * 1024 * 1024,
        "Bytes after the KV pool for KV that comes before the pool has room, at most four pools; p2p: also of the "
        "message buffer.",
        low=0,
    )
    p2p_pool_bytes: int = setting(
        256 * 1024 * 1024,
        "Host memory for what exceeds kv_buffer_size; p2p: messages; pools on a GPU: KV that waits.",
        low=0,
    )
    p2p_room_wait_s: float = setting(2.0, "p2p: seconds that a PUT waits for room before its KV is recomputed.", low=0)
    p2p_max_connections: int = setting(64, "p2p: maximum communicators.", low=1, high=4096)
    p2p_idle_s: float = setting(60.0, "p2p: seconds after which an idle communicator is closed.", low=0.1)
    kv_port: int = setting(
        0,
        "p2p: control port, with --tp or --pp the first of two for each rank; 0: free ones. serve: counts up from "
        "the first worker's.",
        low=0,
        high=65535,
    )

    def at_port(self, offset: int) -> Self:
        """For another process of the same worker: ports count up from the worker's own."""
        return replace(self, kv_port=self.kv_port and self.kv_port + offset)

    @property
    def is_pull(self) -> bool:
        """Whether a decode worker reads the KV. With p2p the prefill worker offers it and is asked: a write, for us."""
        return self.send_type == "GET" and self.transport != "p2p"


@dataclass(frozen=True, slots=True)
class TiersConfig(Settings):
    """KV beyond the pool: what the pool evicts is kept, and read back on a hit."""

    section: ClassVar[str] = "tiers"

    host_kv_cache: str = setting(
        "0", "Host memory for evicted KV, e.g. 4GiB, shared by the host's workers of this model; 0: none."
    )
    host_kv_linger_s: float = setting(60.0, "Seconds that this memory outlives the last worker.", low=0, high=86400)
    disk_kv_cache: str = setting("", "Directory and size for evicted KV, e.g. /var/cache/kv,100GiB; empty: none.")
    disk_kv_max_age_s: float = setting(7 * 86400.0, "Seconds after which unused KV on disk is removed.", low=1)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        _ = self.host_bytes, self.disk

    @property
    def host_bytes(self) -> int:
        return parse_bytes(self.host_kv_cache, "host_kv_cache")

    @property
    def disk(self) -> tuple[Path, int] | None:
        """Directory and bytes. None: no disk tier."""
        if not self.disk_kv_cache:
            return None
        directory, comma, size = self.disk_kv_cache.rpartition(",")
        if not comma or not directory:
            raise ConfigError(
                f"disk_kv_cache must be DIRECTORY,SIZE, e.g. /var/cache/kv,100GiB, got {self.disk_kv_cache}",
                param="disk_kv_cache",
            )
        return Path(directory).expanduser().absolute(), parse_bytes(size, "disk_kv_cache")

    @property
    def is_on(self) -> bool:
        return self.host_bytes > 0 or self.disk is not None


@dataclass(frozen=True, slots=True)
class ControlConfig(Settings):
    """The control plane: discovery, prefill queue, events."""

    section: ClassVar[str] = "control"

    control: str = setting("", "Control server, e.g. nats://HOST:4222; empty: serve starts one on loopback.")
    discovery: str = setting("", "Discovery, e.g. etcd://HOST:2379; empty: on the control server.")
    namespace: str = setting("default", "Namespace; clusters in different ones share a server unseen.")
    lease_ttl_s: float = setting(10.0, "Seconds of silence after which a process counts as gone.", low=0.5, high=3600)
    connect_timeout_s: float = setting(5.0, "Seconds that a start waits for the control server.", low=0.1)
    control_replicas: int = setting(
        0, "NATS servers that keep leases and queue; 0: three if the cluster has them, else one.", low=0, high=5
    )
    request_plane_security: Literal["curve", "none"] = setting(
        "curve", "Encryption and keys between frontends, workers and operators; none: with --insecure only."
    )
    insecure: bool = setting(False, "Permission to be reachable without authentication.")


@dataclass(frozen=True, slots=True)
class DisaggConfig(Settings):
    """Whether a prefill runs remotely or locally. The policy and the two thresholds can be changed at run time."""

    section: ClassVar[str] = "disagg"

    disagg_policy: Literal["auto", "cost", "threshold", "always"] = setting(
        "auto",
        "Where prefills run; cost: the cheaper place; threshold: by the two thresholds; always: remote; auto: "
        "cost, with engines that tell no costs threshold.",
    )
    slo_ttft_ms: float = setting(500.0, "Objective for the first token.", low=1)
    slo_itl_ms: float = setting(
        0.0, f"Objective between tokens of an answer; 0: {DEFAULT_ITL_MS:g} ms, more while most are late.", low=0
    )
    early_reject: bool = setting(False, "cost: 429 for a request that can no longer meet its first-token objective.")
    max_local_prefill_length: int = setting(256, "threshold: longest local prefill, in tokens; 0: none.", low=0)
    max_prefill_queue_size: int = setting(16, "threshold: queue length from which prefills run locally.", low=0)
    remote_prefill_timeout_s: float = setting(30.0, "Seconds after which an unclaimed prefill is taken back.", low=0.05)
    max_handoff_attempts: int = setting(2, "Claims of one hand-off before its prefill runs locally.", low=1)

    @property
    def itl_ms(self) -> float:
        """The objective between tokens that counts."""
        return self.slo_itl_ms or DEFAULT_ITL_MS


@dataclass(frozen=True, slots=True)
class RouterConfig(Settings):
    """The choice of the worker for a request."""

    section: ClassVar[str] = "router"

    router: Literal["kv", "kv-weights", "dynamo-v0", "round-robin", "random", "least-loaded", "power-of-two"] = setting(
        "kv", "Routing policy."
    )
    overlap_weight: float = setting(1.0, "kv, kv-weights: credit per token of prefix overlap.", low=0, high=1e6)
    decode_weight: float = setting(
        0.1, "kv-weights: cost per context token in flight, in prefill tokens.", low=0, high=1e6
    )
    temperature: float = setting(
        0.0, "kv, kv-weights: softmax temperature; 0: always the best worker.", low=0, high=1e6
    )
    router_seed: int = setting(0, "Seed of random draws and ties.")
    kv_events: bool = setting(True, "Prefixes from the workers' events; false: guessed from placements.")
    stall_after_s: float = setting(
        3.0, "Seconds in one step after which a worker is avoided, unless all others are too; 0: never.", low=0
    )
    approximate_ttl_s: float = setting(120.0, "Without events: seconds that a placement counts as cached.", low=0.1)


@dataclass(frozen=True, slots=True)
class FrontendConfig(Settings):
    """The HTTP service."""

    section: ClassVar[str] = "frontend"

    host: str = setting("127.0.0.1", "Address to listen on.")
    order: Literal["auto", "decode-first", "prefill-first"] = setting(
        "auto",
        "Which worker gets a request first; prefill-first: a pair that the frontend chooses; auto: the cheaper order.",
    )
    port: int = setting(8000, "Port to listen on; 0: a free one.", low=0, high=65535)
    api_key: str = setting("", "Key that clients must send as a bearer token; empty: none.")
    api_keys_file: str = setting("", "File of hashed API keys, one a line; see kvrelay api-key.")
    requests_per_minute: int = setting(0, "An API key's maximum requests per minute (429); 0: no limit.", low=0)
    tokens_per_minute: int = setting(
        0, "An API key's maximum prompt and answer tokens per minute (429); 0: no limit.", low=0
    )
    requests_at_once: int = setting(
        0, "An API key's maximum sequences in flight, each choice one (429); 0: no limit.", low=0
    )
    share_prefix_cache: bool = setting(
        False, "One prefix cache for all API keys, so each can find out others' prompts; false: one per key."
    )
    tls_cert: str = setting("", "Certificate chain (PEM) for HTTPS; empty: HTTP.")
    tls_key: str = setting("", "Private key (PEM) of the certificate.")
    max_body_bytes: int = setting(16 * 1024 * 1024, "Largest request body.", low=1024)
    max_buffered_bytes: int = setting(
        256 * 1024 * 1024, "Maximum request bytes held at once; above it the largest upload gets 503.", low=1024
    )
    max_waiting_requests: int = setting(4096, "Maximum requests in flight; further ones get 429.", low=1)
    max_n: int = setting(128, "Largest n of a request.", low=1)
    max_prompts: int = setting(1024, "Maximum prompts in one completions request.", low=1)
    request_timeout_s: float = setting(0.0, "Default deadline of a request in seconds; 0: none.", low=0)
    cold_start_wait_s: float = setting(
        60.0, "Seconds that a request waits for a first worker that a planner can start (else 503); 0: none.", low=0
    )
    migration_limit: int = setting(3, "How often a request may move to another worker.", low=0)
    on_unknown_field: Literal["refuse", "warn", "ignore"] = setting(
        "warn", "Treatment of unknown request fields; warn: logged once each."
    )
    allowed_origins: str = setting("", "Origins whose web pages may ask (CORS), comma-separated; *: all; empty: none.")
    access_log: Literal["off", "text", "json"] = setting("off", "One line per request; json: an object each.")
    access_log_file: str = setting("", "File of the access log; empty: stdout.")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "qwen3"] = setting(
        "auto", "Format of function calls; auto: by the chat template."
    )
    reasoning_parser: Literal["none", "deepseek_r1", "qwen3"] = setting(
        "none", "Format of the reasoning, returned as reasoning and reasoning_content; none: it stays in the content."
    )
    shutdown_timeout_s: float = setting(30.0, "Seconds for open requests after SIGTERM.", low=0)
    otlp_endpoint: str = setting(
        "",
        "Collector of traces: grpc://HOST:4317 or http://HOST:4318/v1/traces; empty: OTEL_EXPORTER_OTLP_ENDPOINT, "
        "if set.",
    )

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        collector_of(self.otlp_endpoint, {})
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("only one of tls_cert and tls_key is set: give both or none", param="tls_cert")
        object.__setattr__(self, "host", bare_host(self.host))

    @property
    def logs_to_stdout(self) -> bool:
        """Whether stdout has the lines of the access log, and should have no others."""
        return self.access_log != "off" and not self.access_log_file


@dataclass(frozen=True, slots=True)
class KeyLimits(Settings):
    """The limits of one API key's requests, from its line in the keys file. None: the frontend's own limit."""

    requests_per_minute: int | None = setting(
        None, "Maximum requests per minute (429) instead of the frontend's; 0: no limit.", low=0
    )
    tokens_per_minute: int | None = setting(
        None, "Maximum prompt and answer tokens per minute (429) instead of the frontend's; 0: no limit.", low=0
    )
    requests_at_once: int | None = setting(
        None, "Maximum sequences in flight (429) instead of the frontend's; 0: no limit.", low=0
    )
    min_priority: int | None = setting(None, "Lowest priority number that a request may have (400).", low=-(2**31))
    max_priority: int | None = setting(None, "Highest priority number that a request may have (400).", low=-(2**31))
    max_body_bytes: int | None = setting(None, "Maximum request body (413), if below the frontend's limit.", low=1)
    max_prompt_tokens: int | None = setting(None, "Maximum prompt tokens of a request over all prompts (413).", low=1)
    max_output_tokens: int | None = setting(
        None, "Maximum tokens that a request may ask for, over all its choices (413).", low=1
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig(Settings):
    """Monitoring: a worker's own HTTP port for ``/metrics``, ``/health``, ``/live``, and marks of each request."""

    section: ClassVar[str] = "metrics"

    metrics_port: int = setting(
        0,
        "Port of a worker's /metrics, /health and /live; 0: none. serve: counts up from the first worker's.",
        low=0,
        high=65535,
    )
    metrics_host: str = setting("127.0.0.1", "Address of the monitoring port.")
    metrics_keys_file: str = setting("", "File of hashed API keys for /metrics and all of /debug; see kvrelay api-key.")
    vllm_metric_names: bool = setting(False, "Metrics also under vLLM's names (vllm:*).")
    request_marks: bool = setting(True, "Marks of each request's phases, for kvrelay waterfall and /debug/requests.")

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        object.__setattr__(self, "metrics_host", bare_host(self.metrics_host))


@dataclass(frozen=True, slots=True)
class MockConfig(Settings):
    """The timing model of the mock engine: base + per token (prefill), base + per sequence (decode)."""

    section: ClassVar[str] = "mock"

    prefill_base_s: float = setting(0.002, "Seconds of a step that prefills.", low=0)
    prefill_token_s: float = setting(0.00002, "Seconds added per prefilled token.", low=0)
    decode_base_s: float = setting(0.004, "Seconds of a decode step.", low=0)
    decode_seq_s: float = setting(0.00005, "Seconds added per decoding sequence.", low=0)
    hang_file: str = setting("", "For tests: a step hangs while the file PATH.PID exists (PID: the worker's).")
    speedup_ratio: float = setting(1.0, "Divisor of all times; 0: no waiting.", low=0)
    tail_tokens: int = setting(0, "Tokens before a prompt's end at which a prefill worker stops.", low=0)


@dataclass(frozen=True, slots=True)
class UpstreamConfig(Settings):
    """Engine openai: a server that computes in place of the worker."""

    section: ClassVar[str] = "upstream"

    upstream: str = setting("", "URL of the server, e.g. http://127.0.0.1:8001.")
    upstream_model: str = setting("", "The model's name there; none: its only one.")
    upstream_api_key_file: str = setting("", "File with the key for that server.")
    upstream_ca: str = setting("", "Certificate authority of that server (PEM); none: the system's.")
    upstream_kv_events: str = setting(
        "", "Where it publishes cache events (vLLM's --kv-events-config), e.g. tcp://127.0.0.1:5557."
    )
    upstream_kv_replay: str = setting("", "Where it tells missed cache events again.")
    upstream_kv_transfer: Literal["none", "vllm", "sglang"] = setting(
        "none", "KV exchange between servers, by vLLM's NixlConnector or SGLang's disaggregation modes."
    )
    upstream_bootstrap: str = setting(
        "", "HOST:PORT of an SGLang prefill server's bootstrap server; default: its own host, 8998."
    )
    upstream_timeout_s: float = setting(300.0, "Seconds without a token after which an answer counts as lost.", low=0.1)
    upstream_start_timeout_s: float = setting(600.0, "Seconds that a worker waits for that server at start.", low=0)


@dataclass(frozen=True, slots=True)
class VllmConfig(Settings):
    """Engine vllm: vLLM's own settings."""

    section: ClassVar[str] = "vllm"

    engine_args: str = setting(
        "", 'Further engine arguments of vLLM, a JSON object by field name, e.g. \'{"quantization": "fp8"}\'.'
    )
    vllm_connector: Literal["auto", "nixl", "kvrelay"] = setting(
        "auto",
        "What moves KV between workers: vLLM's NIXL connector, or kvrelay's transports; auto: nixl, and none with "
        "--role both, which then stays.",
    )
    lora_dir: str = setting(
        "", "Directory of adapters (LoRA): each folder with an adapter_config.json is a model of its name."
    )
    max_loras: int = setting(
        0,
        "Adapters in one step of vLLM; above 0 they can be loaded at run time; 0: at most 4, of lora_dir only.",
        low=0,
        high=1024,
    )
    max_cpu_loras: int = setting(
        0, "Adapters in a worker's host memory; 0: 32 with max_loras, else those of lora_dir.", low=0, high=1024
    )
    max_lora_rank: int = setting(
        0, "Largest rank of an adapter; 0: 16 with max_loras, else lora_dir's.", low=0, high=512
    )
    vllm_staging: str = setting("1GiB", "Host memory through which KV passes with kvrelay's connector, e.g. 4GiB.")
    vllm_step_costs: bool = setting(True, "vLLM's steps tell their costs; without, thresholds decide.")
    vllm_chunks_by_objective: bool = setting(
        True,
        "Prompts are cut so that running answers keep slo_itl_ms; without, a step takes all of max_num_batched_tokens.",
    )
    engine_cores: str = setting(
        "", "Without a GPU: cores of vLLM's compute threads, e.g. 0-3,8; none: num_threads of all. serve splits them."
    )
