"""The Numba pieces between the products against torch's, and the bits of their bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.executors.torch.kernels.base import Kernels
from kvrelay.executors.torch.kernels.numba_kernels import NumbaKernels, as_numpy, multiplies_bfloat16
from kvrelay.executors.torch.kernels.numba_threads import usable_threads
from kvrelay.executors.torch.kernels.torch_kernels import TorchKernels

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=[3, 200], ids=["one-thread", "threads"])
def rows(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def test_norms(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    residual, weight = torch.randn(rows, 256), torch.rand(256)
    delta = torch.randn(rows, 256).to(dtype)
    ours, reference = NumbaKernels(dtype, usable_threads(2)), TorchKernels(dtype)
    torch.testing.assert_close(
        ours.rms_norm(residual, weight, 1e-6),
        reference.rms_norm(residual, weight, 1e-6),
        rtol=CLOSE[dtype],
        atol=CLOSE[dtype],
    )
    other = residual.clone()
    torch.testing.assert_close(
        ours.add_rms_norm(residual, delta, weight, 1e-6),
        reference.add_rms_norm(other, delta, weight, 1e-6),
        rtol=CLOSE[dtype],
        atol=CLOSE[dtype],
    )
    assert torch.equal(residual, other)


def test_silu_mul(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * 160) * 20).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -1e4, 1e4, -90.0])
    torch.testing.assert_close(
        NumbaKernels(dtype, usable_threads(2)).silu_mul(gate_up),
        TorchKernels(dtype).silu_mul(gate_up),
        rtol=CLOSE[dtype],
        atol=CLOSE[dtype],
    )


@pytest.fixture
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype that this CPU multiplies."""
    if dtype is torch.bfloat16 and not multiplies_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    return dtype


def test_embed_and_linear(product_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table, token_ids = torch.randn(50, 64).to(product_dtype), torch.tensor([3, 49, 0, 3])
    weight, bias = torch.randn(96, 64).to(product_dtype), torch.randn(96).to(product_dtype)
    ours, reference = NumbaKernels(product_dtype, 1), TorchKernels(product_dtype)
    embedded = ours.embed(table, token_ids)
    assert torch.equal(embedded, reference.embed(table, token_ids))
    x = embedded.to(product_dtype)
    for offset in (None, bias):
        torch.testing.assert_close(
            ours.linear(weight, offset)(x), reference.linear(weight, offset)(x), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize(
    "kernels", [NumbaKernels(torch.bfloat16, 1), TorchKernels(torch.bfloat16)], ids=["numba", "torch"]
)
@pytest.mark.parametrize("num_inputs", [2, 3])
def test_scores_are_not_rounded_to_bfloat16(kernels: Kernels, num_inputs: int) -> None:
    """256 and 256.5 are both 256 in bfloat16, and the first would be taken."""
    weight, x = torch.zeros(90, num_inputs), torch.zeros(30, num_inputs)
    weight[:, 0], weight[70, 1], x[:, 0], x[:, 1] = 16.0, 0.5, 16.0, 1.0
    expected = x @ weight.T
    scores = kernels.head(weight.bfloat16())(x.bfloat16())
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)
    assert scores.argmax(dim=-1).tolist() == [70] * 30


def test_a_head_in_float32_is_a_product_like_others() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64), torch.randn(5, 64)
    for kernels in (NumbaKernels(torch.float32, 1), TorchKernels(torch.float32)):
        assert torch.equal(kernels.head(weight)(x), kernels.linear(weight)(x).clone())


def test_products_of_a_row_do_not_depend_on_the_batch(product_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    product = NumbaKernels(product_dtype, 1).linear(torch.randn(96, 256).to(product_dtype))
    x = torch.randn(130, 256).to(product_dtype)
    whole = product(x).clone()
    for rows in (1, 2, 5, 17, 64, 129):
        assert torch.equal(product(x[:rows].clone()), whole[:rows])


def test_one_thread_and_all_give_the_same_bits(dtype: torch.dtype) -> None:
    """Fewer rows than threads are worth, and more."""
    torch.manual_seed(0)
    residual, weight = torch.randn(300, 256), torch.rand(256)
    delta, gate_up = torch.randn(300, 256).to(dtype), torch.randn(300, 512).to(dtype)
    all_threads, alone = NumbaKernels(dtype, usable_threads(2)), NumbaKernels(dtype, 1)
    many = all_threads.add_rms_norm(residual.clone(), delta, weight, 1e-6)
    assert torch.equal(many, alone.add_rms_norm(residual.clone(), delta, weight, 1e-6))
    few = alone.add_rms_norm(residual[:3].clone(), delta[:3], weight, 1e-6)
    assert torch.equal(few, many[:3])
    assert torch.equal(all_threads.silu_mul(gate_up)[:3], alone.silu_mul(gate_up[:3]))


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    values = torch.tensor([1.00390625, 1.01171875, -1.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3.0e38])
    table = values[:, None].contiguous()
    residual = table.clone()
    kernels = NumbaKernels(torch.bfloat16, 1)
    assert as_numpy(values.bfloat16()).dtype == np.uint16
    # A norm over one element with weight v gives v, up to the sign of the element.
    for i, value in enumerate(values):
        result = kernels.rms_norm(torch.ones(1, 1), value[None].clone(), 0.0)
        torch.testing.assert_close(result[0, 0], residual[i, 0].bfloat16(), rtol=0, atol=0, equal_nan=True)
