"""An adapter's (LoRA's) files as PEFT writes them: its rank, the digest of its contents, and whether it fits a model.

They are read before vLLM reads them, so that an adapter that does not fit is refused with its reason. A frontend reads
them when an adapter is loaded at run time, and each worker again: both must find the same contents.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvrelay.core.adapters import adapter_id
from kvrelay.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's values of ``max_lora_rank``."""
PREFIX = "base_model.model."
HEADER_LIMIT = 100 * 2**20


class Adapter(msgspec.Struct, frozen=True):
    """``id``: of its name and contents."""

    id: str
    path: Path
    rank: int

    @property
    def digest(self) -> str:
        return self.id.rpartition("@")[2]


class AdapterMissingError(ConfigError):
    """A file of it is not there."""

    status = 404


def read_adapter(path: Path, name: str, shapes: Mapping[str, tuple[int, ...]], param: str) -> Adapter:
    """The adapter in the directory ``path``. ``shapes``: the model's (``tensor_shapes``); empty: they are not here, and
    nothing is compared. ``param``: what named the directory.

    Raises ConfigError for one that vLLM could not load: AdapterMissingError if a file is not there.
    """

    def refused(reason: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
        return kind(f"adapter {name}{reason}", param=param)

    try:
        raw = (path / CONFIG).read_bytes()
        with (path / WEIGHTS).open("rb") as weights:
            contents = hashlib.sha256(raw).digest() + hashlib.file_digest(weights, "sha256").digest()
        config = json.loads(raw)
    except OSError as exc:
        is_missing = isinstance(exc, FileNotFoundError | NotADirectoryError)
        kind = AdapterMissingError if is_missing else ConfigError
        raise refused(f": {exc.filename}: {exc.strerror}", kind) from exc
    except (ValueError, RecursionError) as exc:
        raise refused(f": {CONFIG} is no JSON: {exc}") from exc
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or config.get("peft_type") != "LORA":
        raise refused(f": {CONFIG} is not one of a LoRA with a rank r")
    if not 1 <= rank <= RANKS[-1]:
        raise refused(f" has rank {rank}, vLLM takes 1 to {RANKS[-1]}")
    try:
        own = tensor_shapes([path / WEIGHTS])
    except ConfigError as exc:
        raise refused(f": {exc.message}") from exc
    difference = _difference(rank, own, shapes) if shapes else None
    if difference is not None:
        raise refused(f" is of another model: {difference}")
    return Adapter(adapter_id(name, hashlib.sha256(contents).hexdigest()[:16]), path.resolve(), rank)


def _difference(rank: int, own: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> str | None:
    """``B A`` must have the shape of the weight that it is added to: A is (r, in), B (out, r), the weight (out, in).
    A weight that the checkpoint has under another name is left to vLLM. None: it fits."""
    num_known = 0
    for key, shape in own.items():
        module, _, half = key.removeprefix(PREFIX).rpartition(".lora_")
        weight = base.get(f"{module}.weight")
        if weight is None or half not in ("A.weight", "B.weight"):
            continue
        num_known += 1
        wanted = (rank, weight[1]) if half == "A.weight" else (weight[0], rank)
        if shape != wanted:
            return f"{key} has the shape {shape}, not {wanted}"
    return None if num_known else f"none of its {len(own)} tensors belongs to this one"


def model_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint's tensors; empty if its weights are not here. Raises ConfigError."""
    return tensor_shapes(model_path.glob("*.safetensors"))


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """By tensor, from the headers of safetensors files: 8 bytes of length, then JSON. Raises ConfigError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(length, HEADER_LIMIT)))
            shapes |= {name: tuple(each["shape"]) for name, each in header.items() if name != "__metadata__"}
        except (OSError, ValueError, RecursionError, struct.error, KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{file} is no complete safetensors file: {exc!r}") from exc
    return shapes
