"""Tests of gather_matmul beyond the contract: layouts of the weights, group sizes and gradients."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import gather_matmul as reference
from quantized_numpy import normal
from support import GRADIENT_FACTOR, assert_accurate, assert_same_bits, max_error, vjp_of, without_copies

gather = mlx_anvil.gather_matmul

EXPERTS = 5
PER_EXPERT = ((0, 1, 3, 8, 2), (9, 0, 17, 1, 300))

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ids_of(counts: tuple[int, ...], rng: np.random.Generator) -> mx.array:
    return mx.array(rng.permutation(np.repeat(np.arange(len(counts)), counts)))


@each_dtype
@pytest.mark.parametrize(("outputs", "columns"), [(1, 1), (37, 67), (150, 300)])
def test_every_instruction_set(outputs, columns, dtype, instruction_set, rng):
    w = normal((EXPERTS, outputs, columns), dtype)
    for counts in PER_EXPERT:
        ids = ids_of(counts, rng)
        x = normal((ids.size, 1, columns), dtype)
        for of_w in (lambda w: w.swapaxes(-1, -2), lambda w: mx.contiguous(w.swapaxes(-1, -2))):
            assert_accurate(
                lambda x, w, f=of_w, ids=ids: gather(x, f(w), rhs_indices=ids),
                lambda x, w, ids=ids: reference(x, w.swapaxes(-1, -2), rhs_indices=ids),
                [x, w],
            )


@each_dtype
def test_gradients(dtype, instruction_set, rng):
    for counts in PER_EXPERT:
        ids = ids_of(counts, rng)
        lhs = mx.array(rng.integers(0, 7, ids.size))
        arrays = [normal(shape, dtype) for shape in ((7, 2, 67), (EXPERTS, 37, 67), (ids.size, 2, 37))]
        ours, wanted = (
            vjp_of(lambda a, b, f=function, lhs=lhs, rhs=ids: f(a, b.swapaxes(-1, -2), lhs, rhs), 2)
            for function in (gather, reference)
        )
        assert_accurate(ours, wanted, arrays, factor=GRADIENT_FACTOR)


@pytest.mark.cpu_only  # rows of 67 columns are multiplied by MLX elsewhere
def test_layouts_have_the_same_bits(rng):
    for dtype in DTYPES:
        w = normal((EXPERTS, 37, 67), dtype)
        plain = mx.contiguous(w.swapaxes(-1, -2))
        for counts in PER_EXPERT:
            ids = ids_of(counts, rng)
            x = normal((ids.size, 1, 67), dtype)
            assert_same_bits(gather(x, w.swapaxes(-1, -2), rhs_indices=ids), gather(x, plain, rhs_indices=ids))


@pytest.mark.cpu_only  # measures the memory of MLX there
def test_a_transposed_view_is_not_copied(rng):
    w, x = normal((EXPERTS, 512, 512)), normal((4, 1, 512))
    ids = mx.array([0, 3, 3, 1])
    without_copies(lambda x, w: gather(x, w.swapaxes(-1, -2), rhs_indices=ids), x, w)


@pytest.mark.parametrize("shapes", [((3, 2, 5), (4, 5, 6)), ((5,), (4, 5, 6)), ((3, 2, 5), (5,)), ((5,), (5,))])
def test_as_mlx(shapes, rng):
    a, b = (normal(shape) for shape in shapes)
    lhs = mx.array([2, 0, 1]) if len(shapes[0]) == 3 else mx.array([0, 0, 0])
    rhs = mx.array([3, 3, 0]) if len(shapes[1]) == 3 else mx.array([0, 0, 0])
    with mx.stream(mx.cpu):
        wanted = mx.gather_mm(a, b, lhs, rhs)
    assert max_error(gather(a, b, lhs, rhs), wanted) <= 1e-5


def test_no_ids_are_a_batch(rng):
    a, b = normal((3, 2, 5)), normal((3, 5, 6))
    assert max_error(gather(a, b), a @ b) <= 1e-6


@pytest.mark.parametrize(
    "shapes", [((0, 2, 5), (4, 5, 6)), ((3, 0, 5), (4, 5, 6)), ((3, 2, 0), (4, 0, 6)), ((3, 2, 5), (4, 5, 0))]
)
def test_empty(shapes):
    a, b = (mx.ones(shape) for shape in shapes)
    ids = mx.zeros((a.shape[0],), mx.int32)
    result, gradients = mx.vjp(
        lambda a, b: gather(a, b, rhs_indices=ids), [a, b], [mx.ones((*a.shape[:2], b.shape[2]))]
    )
    assert result[0].shape == (*a.shape[:2], b.shape[2])
    assert not mx.any(result[0]).item()
    assert [g.shape for g in gradients] == [a.shape, b.shape]


def test_gradients_are_the_same_twice(rng):
    w, x = normal((EXPERTS, 64, 64)), normal((7, 1, 64))
    lhs, rhs = mx.array(rng.integers(0, 7, 200)), mx.array(rng.integers(0, EXPERTS, 200))
    gradient = mx.grad(lambda x, w: (gather(x, w, lhs, rhs) ** 2).sum(), argnums=(0, 1))
    for first, second in zip(gradient(x, w), gradient(x, w), strict=True):
        assert_same_bits(first, second)


@pytest.mark.cpu_only  # measures the memory of MLX there
def test_no_array_of_weights_per_pair(rng):
    pairs, outputs, columns = 500, 128, 256
    w, x, ids = normal((2, columns, outputs)), normal((pairs, 1, columns)), mx.array(rng.integers(0, 2, pairs))
    mx.eval(ids)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(lambda w: (gather(x, w, rhs_indices=ids) ** 2).sum())(w))
    assert mx.get_peak_memory() - before < pairs * outputs * columns * 4 / 8
