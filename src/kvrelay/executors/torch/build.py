"""Composition of a runner: checkpoint, device, memory and kernels put together by configuration.

Owns the choice of dtype, device and threads, and refuses settings that it cannot honour.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.core.cores import compute_threads, describe_cores, usable_cores
from kvrelay.core.layout import KVLayout, paged_kv
from kvrelay.engine.holding import num_holding_blocks
from kvrelay.errors import ConfigError
from kvrelay.executors.grammars import GrammarCompiler, GrammarMasks
from kvrelay.executors.host_memory import require_host_memory
from kvrelay.executors.torch.attention.base import Attention, AttentionSpec
from kvrelay.executors.torch.config import ModelConfig, ModelFacts, load_model_config
from kvrelay.executors.torch.kernels.base import Kernels
from kvrelay.executors.torch.kv_pool import KvPool, auto_pool_bytes, decide_num_blocks
from kvrelay.executors.torch.model_runner import WARM_UP_TOKENS, ModelRunner
from kvrelay.executors.torch.models.loading import LoadedModel, load_model
from kvrelay.executors.torch.parallel.following import FollowingRunner
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.executors.torch.rope import rope_table
from kvrelay.executors.torch.shards import weights_fingerprint
from kvrelay.executors.torch.slots import SlotStates
from kvrelay.executors.torch.weights import Checkpoint

if TYPE_CHECKING:
    from kvrelay.executors.torch.parallel.shard import RankShard

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model_runner(
    model_dir: Path,
    runner: RunnerConfig,
    engine: EngineConfig,
    shard: RankShard | None = None,
    allocate: Callable[[int], mmap.mmap] | None = None,
    holding_bytes: int = 0,
    spill_bytes: int = 0,
) -> ModelRunner:
    """Load the checkpoint and allocate the pool; with ``shard`` only the part of one rank.

    ``runner.num_threads`` counts the threads of this process. Raises CheckpointError, UnsupportedModelError,
    ConfigError.
    """
    config = load_model_config(model_dir, warns=shard is None)
    rank = ParallelRank() if shard is None else shard.rank
    device = _device(runner.device)
    dtype_name = _dtype(runner.dtype, config.dtype, device)
    dtype = _DTYPES[dtype_name]
    max_model_len = _max_model_len(engine.max_model_len, config.max_position)
    num_threads = compute_threads(runner.num_threads)
    if device.type == "cpu":
        _tell_threads(num_threads)
    backend = _backend(choose_backend(runner.attention_backend, device), dtype, num_threads)
    if device.type == "cpu":
        # After Numba's threads were set up, which sets the number for all users of OpenMP on this thread.
        torch.set_num_threads(num_threads)
    facts = ModelFacts(
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        weights_fingerprint=weights_fingerprint(model_dir),
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )
    layout = _layout(config, rank, engine.block_size, dtype_name)
    groups, experts = (None, None) if shard is None else shard.join(device)
    with Checkpoint(model_dir, dtype) as checkpoint, torch.inference_mode():
        model = load_model(config, checkpoint, backend.kernels, device, rank, groups, experts)
    if shard is None:
        num_blocks = decide_num_blocks(
            layout, engine.num_blocks, engine.kv_cache_memory, lambda: auto_pool_bytes(device)
        )
        if device.type == "cpu":
            require_host_memory(num_blocks * layout.block_bytes, engine)
        # A pool on the CPU spills nothing: its holding area is host memory already.
        sizes = (holding_bytes, 0 if device.type == "cpu" else spill_bytes)
        num_held, num_spilled = (num_holding_blocks(size, layout.block_bytes, num_blocks) for size in sizes)
        num_bytes = (num_blocks + num_held) * layout.block_bytes
        memory = None if allocate is None or device.type != "cpu" else allocate(num_bytes)
        pool = KvPool(layout, num_blocks, device, dtype, memory, num_held, num_spilled)
    else:
        pool = shard.allocate(facts, layout, device, dtype)
    # No sequence outgrows the pool; a context of millions of tokens would take minutes and gigabytes here.
    num_positions = min(max_model_len, max(pool.num_blocks * engine.block_size, WARM_UP_TOKENS))
    attention = backend.attention(_attention_spec(config, rank, model, num_positions, device), pool.tensor)
    states = SlotStates(engine.max_num_seqs, num_positions, engine.block_size)
    compiler = GrammarCompiler(model_dir / "tokenizer.json", config.vocab_size, config.eos_token_ids)
    grammars = GrammarMasks(compiler, config.vocab_size)
    kind = ModelRunner if rank.samples else FollowingRunner
    return kind(facts, model.decoder, attention, pool, states, backend.compiling, grammars=grammars)


def _tell_threads(num_threads: int) -> None:
    if num_threads > len(usable_cores()):
        _log.warning("computing with %d threads, which wait for each other: %s", num_threads, describe_cores())
    else:
        _log.info("computing with %d threads: %s", num_threads, describe_cores())


def _layout(config: ModelConfig, rank: ParallelRank, block_size: int, dtype: str) -> KVLayout:
    """Of this rank's part only."""
    heads = rank.kv_heads(config.num_kv_heads)
    return paged_kv(
        num_layers=len(rank.layers(config.num_layers)),
        num_kv_heads=heads.stop - heads.start,
        block_size=block_size,
        head_dim=config.head_dim,
        dtype=dtype,
    )


class _Backend(NamedTuple):
    """``compiling``: what runs the runner's first steps."""

    kernels: Kernels
    attention: Callable[[AttentionSpec, torch.Tensor], Attention]
    compiling: Callable[[Callable[[], None]], None] | None


def choose_backend(requested: str, device: torch.device) -> str:
    """ "auto" resolved: Numba on the CPU, else torch. Raises ConfigError."""
    if requested == "auto":
        return "cpu" if device.type == "cpu" else "torch"
    if requested == "cpu" and device.type != "cpu":
        raise ConfigError(f"attention_backend {requested} does not run on {device.type}", param="attention_backend")
    return requested


def _backend(name: str, dtype: torch.dtype, num_threads: int) -> _Backend:
    """Numba's kernels, compiled in the first steps, or torch's. Heavy packages are imported only for the chosen one."""
    if name == "cpu":
        from kvrelay.executors.torch.attention.cpu import CpuAttention, kernel_cache
        from kvrelay.executors.torch.kernels.compile_once import compile_once
        from kvrelay.executors.torch.kernels.numba_kernels import NumbaKernels
        from kvrelay.executors.torch.kernels.numba_threads import usable_threads
        from kvrelay.executors.torch.kernels.numba_vector import INSTRUCTIONS

        _log.info("kernels for %s", INSTRUCTIONS)
        threads = usable_threads(num_threads)
        attention = partial(CpuAttention, dtype=dtype, num_threads=threads)
        # Where Numba finds no OpenMP, torch's threads multiply.
        kernels = NumbaKernels(dtype, threads, own_products=threads > 1 or num_threads == 1)
        return _Backend(kernels, attention, partial(compile_once, cache=kernel_cache()))
    from kvrelay.executors.torch.attention.torch_ref import TorchAttention
    from kvrelay.executors.torch.kernels.torch_kernels import TorchKernels

    return _Backend(TorchKernels(dtype), TorchAttention, None)


def _attention_spec(
    config: ModelConfig, rank: ParallelRank, model: LoadedModel, num_positions: int, device: torch.device
) -> AttentionSpec:
    heads, kv_heads = rank.share(config.num_heads), rank.kv_heads(config.num_kv_heads)
    return AttentionSpec(
        num_heads=heads.stop - heads.start,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        head_dim=config.head_dim,
        windows=tuple(config.windows[i] for i in rank.layers(config.num_layers)),
        rope=torch.from_numpy(rope_table(config.rope, config.head_dim, num_positions)).to(device),
        norm_eps=config.norm_eps,
        q_norms=model.q_norms,
        k_norms=model.k_norms,
    )


def _device(requested: str) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no CUDA device", param="device")
    if requested == "cuda" or (requested == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _dtype(requested: str, stored: str, device: torch.device) -> str:
    """ "auto" is the checkpoint's type, or float32 if the device does not compute that type well."""
    if device.type == "cuda":
        return stored if requested == "auto" else requested
    if requested == "float16":
        raise ConfigError("dtype float16 runs on CUDA only; on the CPU use bfloat16 or float32", param="dtype")
    from kvrelay.executors.torch.kernels.numba_kernels import multiplies_bfloat16

    if requested == "bfloat16" and not multiplies_bfloat16():
        raise ConfigError(
            "dtype bfloat16: this CPU has neither AVX-512 nor AVX-NE-CONVERT to compute it; use float32", param="dtype"
        )
    if requested != "auto":
        return requested
    return "bfloat16" if stored == "bfloat16" and multiplies_bfloat16() else "float32"


def _max_model_len(requested: int, limit: int) -> int:
    if requested > limit:
        raise ConfigError(f"max_model_len {requested} is beyond the checkpoint's {limit}", param="max_model_len")
    if (requested or limit) < 2:
        raise ConfigError(
            "max_model_len must be at least 2: a token of the prompt, and one answered", param="max_model_len"
        )
    return requested or limit
