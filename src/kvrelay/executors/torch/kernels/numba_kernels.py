"""The contract on the CPU: Numba on torch's memory, with reused buffers; some CPUs' bfloat16 products are oneDNN's.

Both kinds of products compute a row with the same bits independently of the other rows, unlike others. So a request's
tokens do not depend on its neighbours. Ours are faster: a call of oneDNN's takes 13 us before it computes. In float32
they read weights that are bfloat16 in the checkpoint as such: half the bytes. In bfloat16 they need AVX512-BF16. With
AMX, which Numba does not reach, oneDNN is many times faster, but it would round the head's scores. Owns the buffers
and the choice between one thread and several.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvrelay.executors.torch.kernels import numba_elementwise as kernels
from kvrelay.executors.torch.kernels import numba_products as products
from kvrelay.executors.torch.kernels.base import Linear
from kvrelay.executors.torch.kernels.numba_threads import use_threads

# Below this number of elements a kernel takes less time than waking another thread.
_PARALLEL_FROM = 24_576
# The same for a product, in multiply-adds.
_PARALLEL_PRODUCT_FROM = 300_000
# The batch size for which packed weights are laid out; other sizes work too.
_PACK_ROWS = 64


def multiplies_bfloat16() -> bool:
    """Whether this CPU has the instructions that oneDNN's bfloat16 products need (AVX-512 or AVX-NE-CONVERT)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as an array; bfloat16 as uint16, because Numba has no bfloat16. A buffer's tensor carries its
    array: a step asks for some hundred of them."""
    try:
        array: npt.NDArray[Any] = tensor.array  # type: ignore[attr-defined]
    except AttributeError:
        array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


@lru_cache(maxsize=8)
def single(value: float) -> np.float32:
    """Numba computes in the precision of what it gets."""
    return np.float32(value)


class Buffer:
    """Memory for results of [T, width], kept between steps and grown when a step is larger than any before."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat = torch.empty(0, dtype=dtype)
        self._last = self._flat.view(0, 1)

    def take(self, rows: int, width: int) -> torch.Tensor:
        if self._last.shape == (rows, width):
            return self._last
        needed = rows * width
        if self._flat.numel() < needed:
            self._flat = torch.empty(needed, dtype=self._dtype)
        self._last = self._flat[:needed].view(rows, width)
        self._last.array = as_numpy(self._last)  # type: ignore[attr-defined]
        return self._last


class NumbaKernels:
    """``num_threads`` as returned by ``usable_threads``. ``own_products`` False: oneDNN multiplies everything."""

    def __init__(self, dtype: torch.dtype, num_threads: int, *, own_products: bool = True) -> None:
        self._num_threads = num_threads
        self._own_products = own_products
        self._normed, self._activated = Buffer(dtype), Buffer(dtype)
        self._residual = Buffer(torch.float32)
        self._products: dict[tuple[int, torch.dtype], Buffer] = {}
        """By number of columns."""
        self._rooms: dict[int, npt.NDArray[np.float32]] = {}
        self._compiled: set[object] = set()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        if self._own_products and products.multiplies(weight):
            return self._own_linear(weight, bias, weight.dtype)
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return lambda x: F.linear(x, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        product = torch.ops.mkldnn._linear_pointwise.default
        none: list[float] = []

        def apply(x: torch.Tensor) -> torch.Tensor:
            use_threads(self._num_threads)  # oneDNN runs on the same team
            result: torch.Tensor = product(x, packed, bias, "none", none, "")
            return result

        return apply

    def head(self, weight: torch.Tensor) -> Linear:
        if weight.dtype == torch.float32:
            return self.linear(weight)
        product = self._own_linear(weight, None, torch.float32)
        return product if products.holds_pairs(weight) else lambda x: product(x.float())

    def _own_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, result: torch.dtype) -> Linear:
        num_outputs, num_inputs = weight.shape
        pairs = products.holds_pairs(weight)
        packed = products.pack_pairs(weight) if pairs else as_numpy(products.pack(weight))
        size, num_panels = num_outputs * num_inputs, len(packed)
        added = np.zeros(0, dtype=np.float32) if bias is None else bias.float().numpy()
        num_widened = num_inputs if packed.dtype == np.uint16 else 0
        room = self._rooms.setdefault(num_widened, products.scratch(self._num_threads, num_widened))
        buffer = self._products.setdefault((num_outputs, result), Buffer(result))
        key = (products.product, packed.dtype, result)

        def apply(x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            out = buffer.take(rows, num_outputs)
            source = as_numpy(x)
            arguments = (source.view(np.uint32) if pairs else source, packed, added, as_numpy(out))
            if key not in self._compiled:
                self._compile(key, products.part, *arguments, room[0], 0, rows, 0, num_panels)
                self._compile(key, products.product, *arguments, room, 1)
                # Without rows, only to start the threads now.
                products.product(
                    arguments[0][:0], packed, added, arguments[3][:0], room, use_threads(self._num_threads)
                )
            if self._num_threads == 1 or rows * size < _PARALLEL_PRODUCT_FROM:
                products.part(*arguments, room[0], 0, rows, 0, num_panels)
            else:
                products.product(*arguments, room, use_threads(self._num_threads))
            return out

        return apply

    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.float()
        weight.array = weight.numpy()  # type: ignore[attr-defined]
        return weight

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        out = self._residual.take(len(token_ids), table.shape[1])
        kernels.embed(as_numpy(table), as_numpy(token_ids), as_numpy(out))
        return out

    def rms_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = self._normed.take(*residual.shape)
        arguments = (as_numpy(residual), as_numpy(weight), single(eps), as_numpy(out))
        self._over_rows(kernels.norm_rows, kernels.norm, arguments, out)
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = self._normed.take(*residual.shape)
        arguments = (as_numpy(residual), as_numpy(delta), as_numpy(weight), single(eps), as_numpy(out))
        self._over_rows(kernels.add_norm_rows, kernels.add_norm, arguments, out)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = self._activated.take(gate_up.shape[0], gate_up.shape[1] // 2)
        self._over_rows(kernels.silu_mul_rows, kernels.silu_mul, (as_numpy(gate_up), as_numpy(out)), out)
        return out

    def _over_rows(self, alone: Any, together: Any, arguments: tuple[Any, ...], out: torch.Tensor) -> None:
        """On this thread, or on all if ``out`` is large."""
        if together not in self._compiled:
            self._compile(together, alone, *arguments, 0, 1)
            self._compile(together, together, *arguments, 1)
        if self._num_threads == 1 or out.numel() < _PARALLEL_FROM:
            alone(*arguments, 0, out.shape[0])
        else:
            together(*arguments, use_threads(self._num_threads))

    def _compile(self, key: object, kernel: Any, *arguments: Any) -> None:
        """Compile, or load from the cache, for arguments of these types. The first step does it with the kernel for one
        thread and that for all, and notes ``key``: no later step is to wait for a compiler."""
        kernel.compile(tuple(numba.typeof(argument) for argument in arguments))
        self._compiled.add(key)
