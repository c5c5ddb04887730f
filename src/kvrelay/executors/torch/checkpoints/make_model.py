"""Random checkpoints in Hugging Face layout, for tests and benchmarks.

Owns the weights' distribution, the split into shards and the files. ``architectures`` lists what can be made. Matrices
are drawn with variance 1 / inputs, not with the usual 0.02: at that gain each layer's attention changes the answer
visibly, so a wrong KV cache, mask or position shows as other greedy tokens. Norms are not all ones and biases not all
zero, for the same reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save

from kvrelay.data.prose import story
from kvrelay.data.recall import draw_codes, facts_text
from kvrelay.errors import InvalidInputError
from kvrelay.executors.torch.checkpoints.architectures import (
    ARCHITECTURES,
    FAMILIES,
    SIZES,
    Init,
    TensorSpec,
    config_of,
    size_of,
    tensors_of,
)
from kvrelay.executors.torch.checkpoints.tokenizer import BOS_ID, EOS_ID, train_tokenizer, write_tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# The tokenizer's training text. Fixed, so that two checkpoints of one vocabulary size share their tokenizer.
_TEXT_SEED, _NUM_TEXTS = 0, 600


def make_model(
    path: Path, arch: str, size: str, seed: int = 0, shards: int = 1, dtype: str = "bfloat16", *, force: bool = False
) -> None:
    """Write a checkpoint of random weights, with tokenizer and chat template, into the directory ``path``.

    ``arch`` is one of ``ARCHITECTURES``, ``size`` one of ``SIZES``, ``dtype`` (of the stored weights) one of
    ``DTYPES``. The same arguments give the same bytes. A directory that is not empty is refused unless ``force``; with
    ``force`` the files of a checkpoint in it are replaced. Raises InvalidInputError for arguments that cannot be
    honoured.
    """
    _check(arch=arch, size=size, seed=seed, dtype=dtype)
    specs = list(tensors_of(arch, size))
    if not 1 <= shards <= len(specs):
        raise InvalidInputError(
            f"shards must be from 1 to {len(specs)}, the number of tensors, not {shards}", param="shards"
        )
    sizes = size_of(arch, size)
    _prepare(path, force)
    pieces = FAMILIES[arch].pieces
    write_tokenizer(train_tokenizer(_texts(), sizes.vocab, pieces), path, sizes.max_position, pieces)
    _write_json(path / "config.json", config_of(arch, size, dtype))
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "do_sample": False},
    )
    _write_weights(path, _split(specs, shards), torch.Generator().manual_seed(seed), DTYPES[dtype])


def _check(*, arch: str, size: str, seed: int, dtype: str) -> None:
    choices = (("arch", arch, ARCHITECTURES), ("size", size, SIZES), ("dtype", dtype, tuple(DTYPES)))
    for param, chosen, known in choices:
        if chosen not in known:
            raise InvalidInputError(f"unknown {param} {chosen!r}: choose from {', '.join(known)}", param=param)
    if not 0 <= seed < 2**63:
        raise InvalidInputError(f"seed must be from 0 to 2**63 - 1, not {seed}", param="seed")


def _prepare(path: Path, force: bool) -> None:
    """Make the directory, or remove an old checkpoint from it."""
    if path.exists() and not path.is_dir():
        raise InvalidInputError(f"{path} is a file, not a directory", param="path")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise InvalidInputError(f"the directory {path} is not empty", param="path")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("model*.safetensors*"):
            old.unlink()
    except OSError as exc:
        raise InvalidInputError(f"cannot write to {path}: {exc.strerror}", param="path") from exc


def _texts() -> list[str]:
    rng = Random(_TEXT_SEED)
    texts = [story(rng) for _ in range(_NUM_TEXTS)]
    texts += [facts_text(rng, draw_codes(rng, 10), num_fillers=10) for _ in range(_NUM_TEXTS // 5)]
    return texts


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _split(specs: Sequence[TensorSpec], shards: int) -> list[list[TensorSpec]]:
    """Cut the tensors, in their order, into ``shards`` non-empty runs of about equal numbers of elements."""
    total = sum(prod(spec.shape) for spec in specs)
    groups: list[list[TensorSpec]] = [[]]
    before = 0
    for i, spec in enumerate(specs):
        opened, left = len(groups), len(specs) - i
        full = before >= total * opened / shards or left == shards - opened
        if groups[-1] and full and opened < shards:
            groups.append([])
        groups[-1].append(spec)
        before += prod(spec.shape)
    return groups


def _write_weights(
    path: Path, groups: Sequence[Sequence[TensorSpec]], generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Draw and write one shard after the other, so that only one is in memory."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, group in enumerate(groups, start=1):
        one = len(groups) == 1
        file = "model.safetensors" if one else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {spec.name: _draw(spec, generator).to(dtype) for spec in group}
        (path / file).write_bytes(save(tensors, metadata={"format": "pt"}))
        (path / file).chmod(0o644)
        weight_map |= dict.fromkeys(tensors, file)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(path / "model.safetensors.index.json", index)


def _draw(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Random values, float32, for one tensor."""
    values = torch.randn(spec.shape, generator=generator)
    match spec.init:
        case Init.MATRIX:
            return values.div_(spec.shape[1] ** 0.5)
        case Init.NORM:
            return values.mul_(0.1).add_(1.0)
        case Init.BIAS:
            return values.mul_(0.1)
