"""The Metal kernels of gathered products: results on both kinds of GPU, and freedom from races."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from quantized_numpy import FLOAT_FORMATS, Format
from tests.gather_matmul.metal_cases import Case

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

FOUR_BITS = Format("affine", 64, 4)
each_format = pytest.mark.parametrize("format", [FOUR_BITS, Format("affine", 32, 3), *FLOAT_FORMATS], ids=str)
each_dtype = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
each_gpu = pytest.mark.parametrize("matrix_units", [False, True], ids=["", "matrix units"])


def kernels_of(case: Case, **gpu: bool) -> set[str]:
    with mx.stream(mx.cpu), mlx_anvil.simulate(**gpu), mlx_anvil.trace() as trace:
        case.check()
    return {event.kernel.split("[")[0].split("_float")[0].split("_bfloat")[0] for event in trace.events}


@pytest.mark.alike("dtype")
@each_gpu
@each_dtype
@each_format
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("pairs", "rows", "ordered"), [(7, 1, False), (5, 3, False), (20, 1, True), (90, 1, True)])
def test_results(format, dtype, pairs, rows, ordered, gated, matrix_units, rng):
    rounded = matrix_units and dtype != mx.float32
    case = Case.draw(
        rng, format, dtype, pairs, 45, columns=320, rows=rows, sorted_ids=ordered, gated=gated, rounded_weights=rounded
    )
    with mx.stream(mx.cpu), mlx_anvil.simulate(matrix_units=matrix_units):
        case.check()


@pytest.mark.alike("dtype")
@each_dtype
@each_format
@pytest.mark.parametrize(("pairs", "rows", "ordered"), [(7, 1, False), (5, 40, False), (90, 1, True)])
def test_plain_product(format, dtype, pairs, rows, ordered, rng):
    case = Case.draw(rng, format, dtype, pairs, 45, columns=320, rows=rows, sorted_ids=ordered, transpose=False)
    with mx.stream(mx.cpu), mlx_anvil.simulate():
        case.check()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("of_x", "of_scales"), [(123, -123), (-60, 112)])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("pairs", "ordered"), [(7, False), (20, True), (90, True)])
def test_sums_that_overflow(pairs, ordered, gated, of_x, of_scales, dtype, rng):
    """Sums of codes times a large x, or codes times a large scale, where results fit."""
    case = Case.draw(rng, FOUR_BITS, dtype, pairs, 45, sorted_ids=ordered, gated=gated)
    case.x = mx.array(2.0**of_x, dtype) * case.x
    factor = mx.array(2.0**of_scales, dtype)
    case.matrices = [replace(m, scales=factor * m.scales, biases=factor * m.biases) for m in case.matrices]
    with mx.stream(mx.cpu), mlx_anvil.simulate(), np.errstate(over="ignore"):
        case.check()


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("pairs", [20, 90])
def test_order_is_not_needed(pairs, gated, rng):
    """A promise of order that does not hold costs time, but nothing else; nor do ids need to be in range."""
    case = Case.draw(rng, FOUR_BITS, mx.float16, pairs, 45, sorted_ids=True, gated=gated)
    rng.shuffle(case.rhs)
    case.rhs[rng.integers(0, pairs, 4)] = -1, -3, -900, 900
    with mx.stream(mx.cpu), mlx_anvil.simulate(checked=True):
        case.check(case.evaluate(hide_ids=True))


def test_experts_without_pairs_and_one_with_all(rng):
    case = Case.draw(rng, FOUR_BITS, mx.float16, 100, 45, experts=40, sorted_ids=True)
    for expert in (0, 17, 39):
        case.rhs[:] = expert
        with mx.stream(mx.cpu), mlx_anvil.simulate():
            case.check()


@pytest.mark.slow
def test_which_kernels_run(rng):
    def draw(pairs, *, ordered=True, **more):
        return Case.draw(rng, FOUR_BITS, mx.float16, pairs, 45, sorted_ids=ordered, **more)

    assert kernels_of(draw(8, ordered=False)) == {"gather_few"}
    assert kernels_of(draw(20)) == {"gather_table", "gather_few"}
    assert kernels_of(draw(4, experts=8)) == {"gather_few"}  # few of which share an expert
    assert kernels_of(draw(8, experts=8)) == {"gather_table", "gather_few"}
    assert kernels_of(draw(20, gated=True)) == {"gather_table", "gather_few_gated"}
    assert kernels_of(draw(90)) == {"gather_table", "gather_tiles_transposed"}
    assert kernels_of(draw(90, transpose=False)) == {"gather_table", "gather_tiles_plain"}
    units = {"matrix_units": True}
    assert kernels_of(draw(4, experts=8), **units) == {"gather_table", "gather_few_matrix"}
    assert kernels_of(draw(20), **units) == {"gather_table", "gather_few_matrix"}
    assert kernels_of(draw(90, gated=True, rounded_weights=True), **units) == {"gather_table", "gather_gemm_gated"}


@each_gpu
@pytest.mark.parametrize(("pairs", "ordered"), [(7, False), (20, True), (90, True)])
@pytest.mark.parametrize("product", ["one", "gated", "plain"])
def test_no_races(product, pairs, ordered, matrix_units, rng):
    """Three schedules with every access checked: no finding, and the same bits."""
    how = {"gated": product == "gated", "transpose": product != "plain", "rounded_weights": matrix_units}
    case = Case.draw(rng, FOUR_BITS, mx.float16, pairs, 45, sorted_ids=ordered, **how)
    results = []
    for seed in range(3):
        with mx.stream(mx.cpu), mlx_anvil.simulate(checked=True, seed=seed, matrix_units=matrix_units):
            results.append(case.evaluate())
    case.check(results[0])
    for result in results[1:]:
        np.testing.assert_array_equal(np.array(result), np.array(results[0]))


@pytest.mark.alike("dtype")
@each_dtype
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("pairs", [9, 90])
def test_dense(pairs, transposed, ordered, dtype, rng):
    experts, columns, outputs = 3, 96, 48
    w = rng.standard_normal((experts, outputs, columns) if transposed else (experts, columns, outputs))
    w = mx.array(w.astype(np.float32)).astype(dtype)
    x = mx.array(rng.standard_normal((pairs, 1, columns)).astype(np.float32)).astype(dtype)
    ids = rng.integers(0, experts, pairs).astype(np.int32)
    ids = np.sort(ids) if ordered else ids
    with mx.stream(mx.cpu), mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        b = w.swapaxes(-1, -2) if transposed else w
        out = mlx_anvil.gather_matmul(x, b, rhs_indices=mx.array(ids), sorted_indices=ordered)
        mx.eval(out)
    assert any("_dense" in event.kernel for event in trace.events)
    x64, w64 = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, w))
    exact = x64 @ (w64.swapaxes(-1, -2) if transposed else w64)[ids]
    limit = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    assert np.abs(np.array(out.astype(mx.float32)) - exact).max() <= limit * np.abs(exact).max()
