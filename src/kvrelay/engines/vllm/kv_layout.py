"""The KV of a model in vLLM as a layout of kvrelay's: which layers are of which region, and how large it is.

vLLM's configuration is known by attribute. Only the sizes of recurrent states are vLLM's own business: its model class
tells them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvrelay.core.layout import KV, KVLayout
from kvrelay.engines.connector.terms import latent_region, one_rank_layout, packed_region, state_region
from kvrelay.errors import ConfigError

MODEL_FREE_DRAFTERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculation without attention of their own, so without KV."""
WINDOW, STATE = "window", "state"
REGION_OF = {"sliding_attention": WINDOW, "conv": STATE, "mamba": STATE, "linear_attention": STATE}
"""By type of a layer in a model's configuration. All other types are attention without a window."""
ORDER = (KV, WINDOW, STATE)
KERNEL_BLOCK = 32
"""vLLM makes blocks of hybrid models a multiple of it on a CPU."""


def layers_by_region(config: Any) -> Mapping[str, tuple[int, ...]]:
    """The numbers of a model's layers, by the name of their region. Raises ConfigError if they are not known."""
    model = config.model_config
    text, num_layers = model.hf_text_config, model.get_total_num_hidden_layers()
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [KV] * num_layers
    found: dict[str, tuple[int, ...]] = {}
    for number, kind in enumerate(types[:num_layers]):
        name = REGION_OF.get(kind, KV)
        found[name] = (*found.get(name, ()), number)
    if model.is_hybrid and STATE not in found:
        raise ConfigError("kvrelay does not know which layers of this model are recurrent: use nixl")
    # Attention of one kind is the model's KV, with a window or without. States are last: they may have any size.
    return {KV: found[WINDOW]} if list(found) == [WINDOW] else {name: found[name] for name in ORDER if name in found}


def kv_layout(config: Any) -> KVLayout:
    """The whole model's KV in vLLM's blocks, over all ranks: latents by token, K and V packed as vLLM's attention packs
    them, so that a block is one entry per head; fp8 as bytes; what recurrent layers know at the end of a block.

    Raises ConfigError for KV that is not described so.
    """
    model, cache = config.model_config, config.cache_config
    if config.speculative_config is not None and config.speculative_config.method not in MODEL_FREE_DRAFTERS:
        raise ConfigError(
            f"kvrelay's connector does not copy the KV of a drafter ({config.speculative_config.method}): use nixl",
            param="vllm_connector",
        )
    own = str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", own) and not cache.cache_dtype.startswith("fp8"):
        raise ConfigError(
            f"kvrelay's connector copies KV of the model's own type and fp8, not {cache.cache_dtype}: use nixl",
            param="vllm_connector",
        )
    dtype, size = "uint8" if cache.cache_dtype.startswith("fp8") else own, model.get_head_size()
    regions, layers = [], layers_by_region(config)
    for name, some in layers.items():
        if name == STATE:
            regions.append(state_region(len(some), state_bytes(config)))
        elif model.use_mla:
            regions.append(latent_region(len(some), size, dtype))
        else:
            window = model.get_sliding_window() or 0 if name == WINDOW or WINDOW not in layers else 0
            heads = model.get_total_num_kv_heads()
            regions.append(packed_region(len(some), heads, cache.block_size, size, dtype, window, name))
    return one_rank_layout(cache.block_size, *regions)


def state_bytes(config: Any) -> int:
    """What one recurrent layer knows, over all ranks. Raises ConfigError for a model with states of several kinds."""
    model = config.model_config
    known, _ = model.registry.resolve_model_cls(model.architecture, model_config=model)
    if not hasattr(known, "get_mamba_state_shape_from_config"):
        raise ConfigError(f"kvrelay does not know the recurrent states of {model.architecture}: use nixl")
    shapes, dtypes = known.get_mamba_state_shape_from_config(config), known.get_mamba_state_dtype_from_config(config)
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    return int(sum(sizes) * config.parallel_config.tensor_parallel_size)


def require_states_at_block_ends(config: Any, layout: KVLayout) -> None:
    """Raise ConfigError unless kvrelay's connector can copy the model's states, if it has any."""
    if not layout.has_states:
        return
    if config.cache_config.mamba_cache_mode != "align":
        raise ConfigError(
            "kvrelay's connector copies recurrent states at the ends of blocks, where vLLM keeps them for its prefix "
            "cache: leave out --no-enable-prefix-caching, or use nixl",
            param="enable_prefix_caching",
        )
    if config.parallel_config.world_size > 1:
        raise ConfigError("kvrelay's connector copies recurrent states of one rank only: use nixl", param="tp")
    # vLLM makes blocks larger until a state fits into one of attention.
    cells = {region.name: cut.cell_bytes(layout.block_size) for cut in layout.regions for region in [cut.region]}
    needed = cells[STATE]
    attention = max(cells[region.name] * region.num_heads for region in layout.model if region.entry_tokens)
    if needed > attention:
        tokens = KERNEL_BLOCK * -(-needed * layout.block_size // (attention * KERNEL_BLOCK))
        raise ConfigError(
            f"a recurrent state of this model has {needed} bytes, so vLLM's blocks must have {tokens} tokens or more: "
            f"set --block-size {tokens}",
            param="block_size",
        )
