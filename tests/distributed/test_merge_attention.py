"""``merge_attention``: attention over parts of the keys, merged, is attention over all keys."""

import itertools
from typing import Any

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil.distributed import merge_attention
from support import max_error, normal

LIMIT = 2e-5
ENDS = (0, 5, 5, 12, 33)  # one part is empty


def merged(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> tuple[mx.array, mx.array]:
    parts = [
        mlx_anvil.flash_attention(q, k[:, :, begin:end], v[:, :, begin:end], return_lse=True, **options)
        for begin, end in itertools.pairwise(ENDS)
    ]
    return merge_attention([out for out, _ in parts], [lse for _, lse in parts], return_lse=True)


def operands(dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    return normal(2, 4, 3, 16, dtype=dtype), normal(2, 2, 33, 16, dtype=dtype), normal(2, 2, 33, 24, dtype=dtype)


def test_it_is_attention_over_all_keys():
    arrays = operands()
    for result, exact in zip(merged(*arrays), mlx_anvil.flash_attention(*arrays, return_lse=True), strict=True):
        assert max_error(result, exact) <= LIMIT


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_low_precision(dtype: mx.Dtype):
    arrays = operands(dtype)
    out, lse = merged(*arrays)
    exact = mlx_anvil.flash_attention(*(x.astype(mx.float32) for x in arrays))
    assert (out.dtype, lse.dtype) == (dtype, mx.float32)
    assert max_error(out, exact) <= 2 * mx.finfo(dtype).eps


def test_gradients():
    arrays = operands()
    weights = normal(2, 4, 3, 24), normal(2, 4, 3)

    def loss(attention: Any) -> Any:
        def of(*arrays: mx.array) -> mx.array:
            out, lse = attention(*arrays)
            return (out * weights[0]).sum() + (lse * weights[1]).sum()

        return mx.grad(of, argnums=(0, 1, 2))

    exact = loss(lambda *arrays: mlx_anvil.flash_attention(*arrays, return_lse=True))(*arrays)
    for result, truth in zip(loss(merged)(*arrays), exact, strict=True):
        assert max_error(result, truth) <= LIMIT


def test_numerical_gradients():
    outputs, lses = normal(3, 2, 4), normal(3, 2)
    lses[1, 0] = -mx.inf
    weights = normal(2, 4), normal(2)

    def loss(outputs: mx.array, lses: mx.array) -> mx.array:
        out, lse = merge_attention(outputs, lses, return_lse=True)
        return (out * weights[0]).sum() + (lse * weights[1]).sum()

    step = 1e-2
    for at, gradient in enumerate(mx.grad(loss, argnums=(0, 1))(outputs, lses)):
        arrays = [outputs, lses]
        x = arrays[at]
        for i in range(x.size):
            shift = (mx.arange(x.size) == i).reshape(x.shape) * step
            ends = [loss(*([*arrays[:at], x + sign * shift, *arrays[at + 1 :]])) for sign in (1, -1)]
            numerical = (ends[0] - ends[1]) / (2 * step)
            assert abs((numerical - gradient.reshape(-1)[i]).item()) <= 2e-3


def test_parts_without_visible_keys_count_as_zero():
    """Also in the gradients."""
    outputs, lses = normal(3, 2, 4), normal(3, 2)
    lses[1], lses[:, 1] = -mx.inf, -mx.inf
    out, lse = merge_attention(outputs, lses, return_lse=True)
    rest = merge_attention(outputs[::2, :1], lses[::2, :1])
    assert max_error(out[:1], rest) == 0.0
    assert out[1].tolist() == [0.0] * 4
    assert lse[1].item() == -mx.inf

    def loss(outputs: mx.array, lses: mx.array) -> mx.array:
        return merge_attention(outputs, lses).square().sum()

    for gradient in mx.grad(loss, argnums=(0, 1))(outputs, lses):
        assert mx.isfinite(gradient).all().item()
        assert mx.abs(gradient[:, 1]).max().item() == 0.0


def test_errors():
    out, lse = mx.zeros((2, 3, 4)), mx.zeros((2, 3))
    for arguments, error, message in (
        ((out, lse[:1]), ValueError, r"outputs has shape \(2, 3, 4\) and lses \(1, 3\); allowed: \[n, ..., D\] and"),
        ((out[:0], lse[:0]), ValueError, "outputs has no part; allowed: at least one"),
        (([], []), ValueError, "outputs is empty; allowed: at least one part"),
        (([out, out[:1]], [lse, lse]), ValueError, r"outputs has arrays of shapes \[\(1, 3, 4\), \(2, 3, 4\)\]; allow"),
        ((out.astype(mx.int32), lse), TypeError, "outputs has dtype mlx.core.int32; allowed: floating point"),
    ):
        with pytest.raises(error, match=r"^\[merge_attention\] " + message):
            merge_attention(*arguments)
