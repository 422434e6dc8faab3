"""Tests of gather_quantized_matmul and its gated product beyond the contract: formats, group sizes and ids against NumPy
in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import gated as gate_of
from quantized_numpy import FLOAT_FORMATS, FORMATS, Format, Matrix, assert_rounded, dense_factor, draw, normal
from support import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    assert_same_bits,
    luck_of_few,
    max_error,
    poison_memory,
    to_numpy,
)

gather = mlx_anvil.gather_quantized_matmul

AFFINE = Format("affine", 64, 4)
EXPERTS = 5
# Rows of each expert: none, one, up to 8 by GEMV, more by GEMM, more than a piece of it.
PER_EXPERT = ((0, 1, 3, 8, 2), (9, 0, 17, 1, 40), (0, 0, 600, 0, 5))

each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
some_formats = pytest.mark.parametrize(
    "format", [AFFINE, Format("affine", 32, 3), Format("affine", 128, 8), *FLOAT_FORMATS], ids=str
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ids_of(counts: tuple[int, ...], rng: np.random.Generator, is_sorted: bool = False) -> np.ndarray:
    """An id for each pair, so that each expert has its count."""
    ids = np.repeat(np.arange(len(counts)), counts)
    return ids if is_sorted else rng.permutation(ids)


def multiply(x: mx.array, matrix: Matrix, **options: Any) -> mx.array:
    return gather(x, *matrix.arrays, **matrix.format.options, **options)


def exact(x: mx.array, matrix: Matrix, lhs: np.ndarray, rhs: np.ndarray, transpose: bool = True) -> np.ndarray:
    """By expert, because each needs its own weights of many bytes."""
    left, weights = to_numpy(x).reshape(-1, *x.shape[-2:])[lhs], matrix.weights
    columns = weights.shape[-2 if transpose else -1]
    result = np.zeros((*rhs.shape, x.shape[-2], columns))
    for expert in range(weights.shape[0]):
        result[rhs == expert] = left[rhs == expert] @ (weights[expert].T if transpose else weights[expert])
    return result


@each_dtype
@each_format
@pytest.mark.parametrize("transpose", [True, False])
def test_forward(format, dtype, transpose, rng):
    columns, outputs = 2 * format.group_size, 37
    matrix = draw(format, (EXPERTS, outputs, columns), rng, dtype)
    terms = columns if transpose else outputs
    for counts in PER_EXPERT[:2]:
        for is_sorted in (False, True):
            ids = ids_of(counts, rng, is_sorted)
            x = normal((len(ids), 1, terms), dtype)
            poison_memory(2 * len(ids) * max(outputs, columns))
            options = {"transpose": transpose, "sorted_indices": is_sorted}
            result = multiply(x, matrix, rhs_indices=mx.array(ids), **options)
            wanted = exact(x, matrix, np.arange(len(ids)), ids, transpose)
            # CUDA multiplies sorted pairs in tiles, for which it rounds the weights.
            assert_rounded(result, wanted, dtype, terms=terms, factor=dense_factor(9 if is_sorted else 1))


@some_formats
@pytest.mark.parametrize("rows", [1, 3])
def test_every_instruction_set(format, rows, instruction_set, rng):
    matrix = draw(format, (EXPERTS, 150, 2 * format.group_size), rng)
    for counts in PER_EXPERT:
        ids = ids_of(counts, rng)
        lhs = rng.integers(0, 7, len(ids))
        x = normal((7, rows, 2 * format.group_size))
        result = multiply(x, matrix, lhs_indices=mx.array(lhs), rhs_indices=mx.array(ids))
        assert_rounded(result, exact(x, matrix, lhs, ids), mx.float32)
        y = normal((7, rows, 150))
        result = multiply(y, matrix, lhs_indices=mx.array(lhs), rhs_indices=mx.array(ids), transpose=False)
        assert_rounded(result, exact(y, matrix, lhs, ids, False), mx.float32)


@some_formats
def test_gradient(format, rng):
    matrix = draw(format, (EXPERTS, 37, 2 * format.group_size), rng)
    for counts in PER_EXPERT[:2]:
        ids = ids_of(counts, rng)
        lhs = rng.integers(0, 7, len(ids))
        x = normal((7, 2, 2 * format.group_size))
        dy = normal((len(ids), 2, 37))
        gradient = mx.vjp(
            lambda x, ids=ids, lhs=lhs: multiply(x, matrix, lhs_indices=mx.array(lhs), rhs_indices=mx.array(ids)),
            [x],
            [dy],
        )[1][0]
        wanted = np.zeros(x.shape)
        np.add.at(wanted, lhs, exact(dy, matrix, np.arange(len(ids)), ids, False))
        assert_rounded(gradient, wanted, mx.float32, factor=GRADIENT_FACTOR)


def test_as_mlx(rng):
    """The forms in which mlx-lm calls mx.gather_qmm."""
    matrix = draw(AFFINE, (EXPERTS, 64, 128), rng)
    ids = mx.array(rng.integers(0, EXPERTS, (2, 3, 4)), mx.uint32)
    x = normal((2, 3, 1, 1, 128))
    rows = normal((24, 1, 128))
    batch = normal((EXPERTS, 2, 128))
    some = mx.array([[0, 4], [2, 2]])
    for given, options in (
        (x, {"rhs_indices": ids}),
        (rows, {"rhs_indices": mx.sort(ids.flatten()), "sorted_indices": True}),
        (rows, {"rhs_indices": ids.flatten(), "lhs_indices": mx.arange(24, dtype=mx.uint32)}),
        (batch, {"lhs_indices": mx.array([3, 0, 1, 1, 4])}),
        (batch, {"lhs_indices": some[:, None], "rhs_indices": some}),
        (batch[:1], {"rhs_indices": some}),
        (batch[0], {"rhs_indices": some}),
        (normal((2, 1, 1, 128)), {"rhs_indices": mx.array([[1, 2, 3]])}),
        (normal((3, 1, 128)), {"rhs_indices": mx.array([[1, 2, 3], [4, 3, 2]])}),
    ):
        ours = gather(given, *matrix.arrays, **options)
        with mx.stream(mx.cpu):
            assert max_error(ours, mx.gather_qmm(given, *matrix.arrays, **options)) <= 1e-5


def test_no_ids_are_a_quantized_matmul(rng):
    matrix = draw(AFFINE, (EXPERTS, 64, 128), rng)
    x = normal((EXPERTS, 3, 128))
    assert_same_bits(gather(x, *matrix.arrays), mlx_anvil.quantized_matmul(x, *matrix.arrays))


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_dtypes_of_ids(dtype, rng):
    matrix = draw(AFFINE, (EXPERTS, 16, 64), rng)
    x = normal((4, 1, 64))
    ids = np.array([4, 0, 3, 3])
    wanted = multiply(x, matrix, rhs_indices=mx.array(ids))
    assert_same_bits(multiply(x, matrix, rhs_indices=mx.array(ids, dtype)), wanted)
    if mx.issubdtype(dtype, mx.signedinteger):
        assert_same_bits(multiply(x, matrix, rhs_indices=mx.array(ids - EXPERTS, dtype)), wanted)


@pytest.mark.parametrize("rows", [1, 12])
def test_unknown_ids_clamp(rows, rng):
    matrix = draw(AFFINE, (EXPERTS, 16, 64), rng)
    x = normal((4, rows, 64))
    lazy = mx.array([7, -9, 2**31 - 1, 4], mx.int64) + mx.array([0, 0, 2**33, 0], mx.int64)
    wanted = multiply(x, matrix, rhs_indices=mx.array([4, 0, 4, 4]))
    assert_same_bits(multiply(x, matrix, rhs_indices=lazy), wanted)
    lazy = mx.array([9, -9, 0, 1], mx.int32) + 0
    wanted = multiply(x, matrix, lhs_indices=mx.array([3, 0, 0, 1]), rhs_indices=mx.array([0]))
    assert_same_bits(multiply(x, matrix, lhs_indices=lazy, rhs_indices=mx.array([0])), wanted)


def test_a_broken_promise_of_sorted_ids(rng):
    matrix = draw(AFFINE, (EXPERTS, 16, 64), rng)
    x, ids = normal((40, 1, 64)), mx.array(rng.integers(0, EXPERTS, 40))
    wanted = multiply(x, matrix, rhs_indices=ids)
    assert max_error(multiply(x, matrix, rhs_indices=ids, sorted_indices=True), wanted) <= 1e-6


@pytest.mark.parametrize("per_expert", [2, 20])
def test_special_numbers_stay_in_their_rows(per_expert, rng):
    matrix = draw(AFFINE, (EXPERTS, 40, 128), rng)
    ids = rng.permutation(np.repeat(np.arange(EXPERTS), per_expert))
    x = to_numpy(normal((len(ids), 1, 128)))
    wanted = exact(mx.array(x.astype(np.float32)), matrix, np.arange(len(ids)), ids)
    x[3, 0, 5], x[7, 0, 9] = np.nan, 3e38
    result = to_numpy(multiply(mx.array(x.astype(np.float32)), matrix, rhs_indices=mx.array(ids)))
    assert np.isnan(result[3]).all()
    large = exact(mx.array(x[7:8].astype(np.float32)), matrix, np.arange(1), ids[7:8])[0]
    fits = np.abs(large) < 3e38
    np.testing.assert_allclose(result[7][fits], large[fits], atol=1e-6 * np.abs(large[fits]).max())
    others = np.delete(np.arange(len(ids)), [3, 7])
    np.testing.assert_allclose(result[others], wanted[others], atol=1e-5 * np.abs(wanted).max())


# ---- transformations -------------------------------------------------------------------------------------------------


def test_ids_have_no_gradient(rng):
    """Those of a router, which depend on what is differentiated."""
    matrix = draw(AFFINE, (EXPERTS, 128, 128), rng)
    x = normal((3, 1, 1, 128))

    def loss(x: mx.array) -> mx.array:
        ids = mx.argpartition(x[:, 0, 0, :EXPERTS], kth=1, axis=-1)[:, :2]
        return (multiply(x, matrix, rhs_indices=ids) ** 2).sum()

    fixed = mx.argpartition(x[:, 0, 0, :EXPERTS], kth=1, axis=-1)[:, :2]
    wanted = mx.grad(lambda x: (multiply(x, matrix, rhs_indices=fixed) ** 2).sum())(x)
    assert_same_bits(mx.grad(loss)(x), wanted)


@pytest.mark.parametrize("mapped", ["x", "rhs", "lhs", "w", "x and lhs", "w and rhs"])
def test_vmap(mapped, rng):
    matrix = draw(AFFINE, (2, EXPERTS, 8, 64), rng)
    x, lhs = normal((2, 3, 2, 64)), mx.array(rng.integers(-3, 3, (2, 6)))
    rhs = mx.array(rng.integers(-EXPERTS, EXPERTS, (2, 6)))
    parts = {"x": x, "lhs": lhs, "rhs": rhs, "w": matrix.arrays}
    names = mapped.split(" and ")

    def call(x: mx.array, lhs: mx.array, rhs: mx.array, w: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return gather(x, w, scales, biases, lhs, rhs)

    def of(i: int) -> list[mx.array]:
        chosen = {name: part if name in names else _first(part) for name, part in parts.items()}
        if i >= 0:
            chosen = {name: _at(part, i) if name in names else part for name, part in chosen.items()}
        return [chosen["x"], chosen["lhs"], chosen["rhs"], *chosen["w"]]

    axes = tuple(0 if name in names else None for name in ("x", "lhs", "rhs", "w", "w", "w"))
    result = mx.vmap(call, in_axes=axes)(*of(-1))
    assert max_error(result, mx.stack([call(*of(i)) for i in range(2)])) <= 1e-6


def _first(part: Any) -> Any:
    return _at(part, 0)


def _at(part: Any, i: int) -> Any:
    return tuple(x[i] for x in part) if isinstance(part, tuple) else part[i]


@pytest.mark.cpu_only  # measures the memory of MLX there
def test_no_array_of_weights_per_pair(rng):
    """Gradients in scales and biases hold the gradient of the weights of all experts, but not of all pairs."""
    pairs, outputs, columns = 500, 128, 256
    matrix = draw(AFFINE, (2, outputs, columns), rng)
    x, ids = normal((pairs, 1, columns)), mx.array(rng.integers(0, 2, pairs))
    mx.eval(matrix.arrays, x, ids)

    def loss(scales: mx.array, biases: mx.array) -> mx.array:
        return (gather(x, matrix.w, scales, biases, rhs_indices=ids) ** 2).sum()

    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(loss, argnums=(0, 1))(matrix.scales, matrix.biases))
    assert mx.get_peak_memory() - before < pairs * outputs * columns * 4 / 8


# ---- the gated product -----------------------------------------------------------------------------------------------


def gated(x: mx.array, gate: Matrix, up: Matrix, *, ids: mx.array, **more: Any) -> mx.array:
    pair = [list(matrix.arrays) for matrix in (gate, up)]
    return _ext._gather_quantized_swiglu(x, *pair, ids, **gate.format.options, **more)


@each_dtype
@some_formats
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated(format, dtype, with_bias, rng):
    gate, up = (draw(format, (EXPERTS, 37, 2 * format.group_size), rng, dtype) for _ in range(2))
    biases = [normal((EXPERTS, 37), dtype) for _ in range(2)] if with_bias else [None, None]
    activation = {"activation": "swiglu_oai", "limit": 2.0} if with_bias else {}
    for counts in PER_EXPERT[:2]:
        ids = ids_of(counts, rng)
        lhs = rng.integers(0, 7, len(ids))
        x = 0.1 * normal((7, 1, 2 * format.group_size))
        x = x.astype(dtype)
        result = gated(
            x,
            gate,
            up,
            ids=mx.array(ids, mx.int32),
            lhs=mx.array(lhs, mx.int32),
            gate_bias=biases[0],
            up_bias=biases[1],
            **activation,
        )
        with mx.stream(mx.cpu):
            products = [mx.array(exact(x, m, lhs, ids)).astype(mx.float64) for m in (gate, up)]
            if with_bias:
                products = [
                    p + b[mx.array(ids)][:, None].astype(mx.float64) for p, b in zip(products, biases, strict=True)
                ]
            wanted = to_numpy(gate_of(*products, **activation))
            rounded = to_numpy(gate_of(*(p.astype(dtype) for p in products), **activation))
        error = np.abs(to_numpy(result) - wanted).max()
        scale = np.abs(wanted).max()
        if dtype == mx.float32:
            limit = 2e-5 * scale
        else:
            limit = OUTPUT_FACTOR * np.abs(rounded - wanted).max() + luck_of_few(result) * scale
        assert error <= limit


def test_gradients_of_the_gated_product(rng):
    gate, up = (draw(AFFINE, (EXPERTS, 37, 128), rng) for _ in range(2))
    gate_bias, up_bias = (normal((EXPERTS, 37)) for _ in range(2))
    x, ids = 0.1 * normal((4, 1, 1, 128)), mx.array(rng.integers(0, EXPERTS, (4, 3)), mx.int32)
    dy = normal((4, 3, 1, 37))

    def fused(x: mx.array, gate_bias: mx.array, up_bias: mx.array) -> mx.array:
        return gated(x, gate, up, ids=ids, gate_bias=gate_bias, up_bias=up_bias)

    def composed(x: mx.array, gate_bias: mx.array, up_bias: mx.array) -> mx.array:
        products = [
            mlx_anvil.reference.gather_quantized_matmul(x, *m.arrays, rhs_indices=ids) + b[ids][:, :, None]
            for m, b in ((gate, gate_bias), (up, up_bias))
        ]
        return gate_of(*products)

    arrays = [x, gate_bias, up_bias]
    for ours, wanted in zip(mx.vjp(fused, arrays, [dy])[1], mx.vjp(composed, arrays, [dy])[1], strict=True):
        assert max_error(ours, wanted) <= 1e-5
    tangents = [normal(a.shape) for a in arrays]
    assert max_error(mx.jvp(fused, arrays, tangents)[1][0], mx.jvp(composed, arrays, tangents)[1][0]) <= 1e-5
    both = [mx.stack([a, 2 * a]) for a in arrays]
    assert max_error(mx.vmap(fused)(*both), mx.stack([fused(*arrays), fused(*(2 * a for a in arrays))])) <= 1e-5
