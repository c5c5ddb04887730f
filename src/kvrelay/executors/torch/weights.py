"""Reading safetensors: one file or many shards, checked by name and shape, without a second copy in memory.

Owns the files. Each of their failures becomes a CheckpointError of one line. Knows nothing of models, which request
tensors by name and shape. ``finish`` then checks that no tensor was left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvrelay.errors import CheckpointError
from kvrelay.executors.torch.shards import shard_files

# Buffers that old exporters saved with the weights; here they are computed.
_DERIVED = ("rotary_emb.inv_freq", "attn.masked_bias")


class Cut(msgspec.Struct, frozen=True):
    """Indices ``part`` along ``axis`` of a tensor; None: the whole tensor."""

    axis: int = 0
    part: slice | None = None

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the cut of a tensor of ``shape``."""
        sizes = list(shape)
        if self.part is not None:
            sizes[self.axis] = self.part.stop - self.part.start
        return tuple(sizes)

    def is_whole(self, shape: Sequence[int]) -> bool:
        return self.shape(shape) == tuple(shape)

    def index(self, num_axes: int) -> tuple[slice, ...]:
        return tuple(self.part or slice(None) if axis == self.axis else slice(None) for axis in range(num_axes))


WHOLE = Cut()


class Checkpoint:
    """The tensors of a directory, each read when asked for, converted to ``dtype``. A context manager."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._dir = model_dir
        self.dtype = dtype
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._unread: set[str] = set()
        self.files = shard_files(model_dir)

    def __enter__(self) -> Self:
        try:
            for file in self.files:
                handle = self._stack.enter_context(_open(file))
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    if self._handles.setdefault(name, handle) is not handle:
                        raise CheckpointError(f"{file} has a tensor {name} that another shard has, too: download anew")
        except BaseException:
            self._stack.close()
            raise
        self._unread = set(self._handles)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handles.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def ignore(self, name: str) -> None:
        """Allow this tensor to exist; it is not needed."""
        self._unread.discard(name)

    def ignore_under(self, prefix: str) -> None:
        """Another process reads the tensors whose names begin with this prefix."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def read(self, name: str, shape: Sequence[int], cut: Cut = WHOLE) -> torch.Tensor:
        """The tensor ``name``, which must have ``shape``, in the checkpoint's working dtype, on the CPU.

        With ``cut``, only that part is read from the file.
        """
        tensor = self.tensor(name, tuple(shape), cut)
        return tensor.to(self.dtype)

    def stack(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], cuts: Sequence[Cut] | None = None
    ) -> torch.Tensor:
        """Several tensors, or cuts of them, concatenated along the first axis, read directly into one fused
        parameter."""
        cuts = cuts or [WHOLE] * len(names)
        sizes = [cut.shape(shape) for cut, shape in zip(cuts, shapes, strict=True)]
        fused = torch.empty((sum(size[0] for size in sizes), *sizes[0][1:]), dtype=self.dtype)
        start = 0
        for name, shape, cut, size in zip(names, shapes, cuts, sizes, strict=True):
            fused[start : start + size[0]] = self.tensor(name, tuple(shape), cut)
            start += size[0]
        return fused

    def finish(self) -> None:
        """Raise CheckpointError if a tensor was never requested: it belongs to a model other than that of the
        config."""
        left = sorted(name for name in self._unread if not name.endswith(_DERIVED))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(f"{self._dir} holds tensors that its architecture does not have: {left[0]}{more}")

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut) -> torch.Tensor:
        handle = self._handles.get(name)
        if handle is None:
            raise CheckpointError(f"{self._dir} has no tensor {name}")
        try:
            stored = tuple(handle.get_slice(name).get_shape())
            if stored != shape:
                raise CheckpointError(f"tensor {name} of {self._dir} has shape {stored}, expected {shape}")
            tensor: torch.Tensor = (
                handle.get_tensor(name) if cut.is_whole(shape) else handle.get_slice(name)[cut.index(len(shape))]
            )
        except SafetensorError as exc:
            raise CheckpointError(f"cannot read tensor {name} of {self._dir}: {exc}") from exc
        if not tensor.is_floating_point():
            raise CheckpointError(f"tensor {name} of {self._dir} is of type {tensor.dtype}, expected a float type")
        self._unread.discard(name)
        return tensor


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{file} is not a complete safetensors file: {exc}") from exc
