"""Our products: right for every size, and the same bits whatever surrounds a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.executors.torch.kernels.numba_kernels import NumbaKernels
from kvrelay.executors.torch.kernels.numba_products import ROWS, WIDEN_FROM, WIDTH, multiplies, pack
from kvrelay.executors.torch.kernels.numba_threads import usable_threads
from kvrelay.executors.torch.kernels.numba_vector import MULTIPLIES_BFLOAT16

SIZES = [(1, 1), (7, 5), (WIDTH, 3), (WIDTH + 1, 64), (3 * WIDTH - 16, 33), (20 * WIDTH, 96)]
"""Outputs and inputs: panels full and not, inputs that the unrolled loop divides and not."""


def in_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The sums as the kernel forms them: one rounding per input, then one for the bias."""
    factors, columns = x.double().numpy(), weight.double().numpy()
    total = np.zeros((len(x), len(weight)), dtype=np.float32)
    for k in range(x.shape[1]):
        total = (factors[:, k, None] * columns[None, :, k] + total).astype(np.float32)
    return torch.from_numpy(total) + bias


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("threads", [1, 2])
def test_every_row_is_summed_in_order(size: tuple[int, int], stored: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(size).to(stored).float(), torch.randn(size[0])
    x = torch.randn(2 * WIDEN_FROM + ROWS - 1, size[1])
    assert pack(weight).dtype == stored
    expected = in_order(x, weight, bias)
    product = NumbaKernels(torch.float32, usable_threads(threads)).linear(weight, bias)
    for rows in (*range(1, 2 * ROWS + 2), WIDEN_FROM - 1, WIDEN_FROM, len(x)):
        assert torch.equal(product(x[:rows].clone()), expected[:rows])
    assert product(x[:0]).shape == (0, size[0])


def test_weights_keep_every_bit() -> None:
    """One value that is no bfloat16, and all are stored as float32."""
    weight = torch.ones(WIDTH, 4)
    assert pack(weight).dtype == torch.bfloat16
    weight[-1, -1] = 1 + 2**-12
    assert pack(weight).dtype == torch.float32
    assert NumbaKernels(torch.float32, 1).linear(weight)(torch.ones(1, 4))[0, -1] == 4 + 2**-12


@pytest.mark.skipif(not MULTIPLIES_BFLOAT16, reason="this CPU's bfloat16 products are oneDNN's")
@pytest.mark.parametrize(
    "size", [(1, 2), (7, 6), (WIDTH + 1, 64), (3 * WIDTH, 34)], ids=lambda size: f"{size[0]}x{size[1]}"
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16_rows_are_right_and_independent(size: tuple[int, int], with_bias: bool) -> None:
    """One rounding to bfloat16, at the end; the same bits alone and among others, on one thread and on two."""
    torch.manual_seed(0)
    weight, x = torch.randn(size).bfloat16(), torch.randn(2 * ROWS + 5, size[1]).bfloat16()
    bias = torch.randn(size[0]).bfloat16() if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    one, two = (NumbaKernels(torch.bfloat16, usable_threads(n)).linear(weight, bias) for n in (1, 2))
    all_rows = one(x).clone()
    torch.testing.assert_close(all_rows.double(), expected, rtol=2**-8, atol=1e-4)
    assert torch.equal(two(x), all_rows)
    for row in range(len(x)):
        assert torch.equal(one(x[row : row + 1].clone()), all_rows[row : row + 1])


@pytest.mark.skipif(not MULTIPLIES_BFLOAT16, reason="this CPU's bfloat16 products are oneDNN's")
def test_a_pair_needs_two_inputs() -> None:
    """With an odd number of inputs oneDNN multiplies."""
    weight, x = torch.randn(5, 3).bfloat16(), torch.randn(2, 3).bfloat16()
    assert not multiplies(weight)
    expected = (x.float() @ weight.float().T).bfloat16()
    torch.testing.assert_close(NumbaKernels(torch.bfloat16, 1).linear(weight)(x), expected, rtol=2**-7, atol=1e-3)


def test_onednn_multiplies_where_numba_has_no_threads() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(3, 64)
    ours, theirs = (NumbaKernels(torch.float32, 1, own_products=own).linear(weight, bias)(x) for own in (True, False))
    torch.testing.assert_close(ours, theirs)
