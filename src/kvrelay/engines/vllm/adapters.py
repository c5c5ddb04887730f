"""The adapters (LoRA) in a directory: each sub-directory with an ``adapter_config.json`` is one, named by its folder.

They are read before vLLM starts, so that one that does not fit ends the start with its reason. vLLM is told an
adapter's id as its name; so its own block hashes, and the events of its cache, tell adapters apart by content.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.core.adapters import adapter_id
from kvrelay.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's values of ``max_lora_rank``."""
MAX_SLOTS = 4
PREFIX = "base_model.model."
HEADER_LIMIT = 100 * 2**20


class Adapter(msgspec.Struct, frozen=True):
    """``number``: vLLM's key of it, from 1."""

    id: str
    number: int
    path: Path
    rank: int


def read_adapters(directory: str, model_path: Path, model: str) -> tuple[Adapter, ...]:
    """Those in ``directory``, in order of their names; none if it is empty. ``model``: the name that is served.

    Raises ConfigError for one that vLLM could not load.
    """
    if not directory:
        return ()
    folder = Path(directory)
    paths = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not paths:
        raise _error(f"{directory} has no folder with an {CONFIG}")
    shapes = _shapes(model_path.glob("*.safetensors"))
    return tuple(_read(path, number, shapes, model) for number, path in enumerate(paths, 1))


def adapter_arguments(adapters: tuple[Adapter, ...]) -> dict[str, Any]:
    """Of vLLM's AsyncEngineArgs. All adapters stay in host memory: none is read again from a file that may have
    changed."""
    if not adapters:
        return {}
    return {
        "enable_lora": True,
        "max_loras": min(len(adapters), MAX_SLOTS),
        "max_cpu_loras": len(adapters),
        "max_lora_rank": next(rank for rank in RANKS if rank >= max(each.rank for each in adapters)),
    }


def with_empty_slot(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for a CPU, with more slots than adapters, so that the last one is always empty.

    In a step with an adapter, vLLM's CPU operators give a row without one the index -1, which is the last slot: the
    model's own answers would get that slot's adapter (vLLM's pull requests 48421 and 49656). Slots are filled from the
    first, and an empty one adds zero."""
    if "max_cpu_loras" not in arguments:
        return dict(arguments)
    num_slots = max(arguments["max_loras"], arguments["max_cpu_loras"] + 1)
    return {**arguments, "max_loras": num_slots, "max_cpu_loras": num_slots}


def _read(path: Path, number: int, shapes: Mapping[str, tuple[int, ...]], model: str) -> Adapter:
    if path.name == model:
        raise _error(f"adapter {path.name} has the name of its model")
    try:
        raw, weights = (path / CONFIG).read_bytes(), (path / WEIGHTS).read_bytes()
        config = json.loads(raw)
    except OSError as exc:
        raise _error(f"adapter {path.name}: {exc.filename}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise _error(f"adapter {path.name}: {CONFIG} is no JSON: {exc}") from exc
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or config.get("peft_type") != "LORA":
        raise _error(f"adapter {path.name}: {CONFIG} is not one of a LoRA with a rank r")
    if not 1 <= rank <= RANKS[-1]:
        raise _error(f"adapter {path.name} has rank {rank}, vLLM takes 1 to {RANKS[-1]}")
    _check_shapes(path.name, rank, _shapes([path / WEIGHTS]), shapes)
    digest = hashlib.sha256(hashlib.sha256(raw).digest() + hashlib.sha256(weights).digest()).hexdigest()[:16]
    return Adapter(adapter_id(path.name, digest), number, path.resolve(), rank)


def _check_shapes(
    name: str, rank: int, own: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]
) -> None:
    """``B A`` must have the shape of the weight that it is added to: A is (r, in), B (out, r), the weight (out, in).
    A weight that the checkpoint has under another name is left to vLLM. Raises ConfigError."""
    num_known = 0
    for key, shape in own.items():
        module, _, half = key.removeprefix(PREFIX).rpartition(".lora_")
        weight = base.get(f"{module}.weight")
        if weight is None or half not in ("A.weight", "B.weight"):
            continue
        num_known += 1
        wanted = (rank, weight[1]) if half == "A.weight" else (weight[0], rank)
        if shape != wanted:
            raise _error(f"adapter {name} is of another model: {key} has the shape {shape}, not {wanted}")
    if not num_known:
        raise _error(f"adapter {name} is of another model: none of its {len(own)} tensors belongs to this one")


def _shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """By tensor, from the headers of safetensors files: 8 bytes of length, then JSON. Raises ConfigError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(length, HEADER_LIMIT)))
            shapes |= {name: tuple(each["shape"]) for name, each in header.items() if name != "__metadata__"}
        except (OSError, ValueError, RecursionError, struct.error, KeyError, TypeError, AttributeError) as exc:
            raise _error(f"{file} is no complete safetensors file: {exc!r}") from exc
    return shapes


def _error(message: str) -> ConfigError:
    return ConfigError(message, param="lora_dir")
