"""The norms' kernels as NVIDIA GPUs launch them: more elements per thread, and operands that are read ahead."""

from collections.abc import Callable

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil import layer_norm, reference, rms_norm
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.reference import DTYPES
from support import GRADIENT_FACTOR, assert_accurate, assert_same_bits, in_float64, max_error, vjp_of

NORMS = {"rms_norm": (rms_norm, reference.rms_norm), "layer_norm": (layer_norm, reference.layer_norm)}
each_norm = pytest.mark.parametrize("name", NORMS)
# One pack and two per thread; packs past the end; packs that are not whole; up to 16 SIMD groups; a long row.
each_width = pytest.mark.parametrize("columns", [128, 256, 264, 520, 515, 4096, 8192, 8200])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("matrix_units")]

READS_AHEAD = 13


def normal(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def of_operands(name: str, function: Callable, residual: bool) -> Callable:
    """The norm as a function of x, weight, the bias of layer_norm, and the residual, in this order."""
    names = ["x", "weight", *(["bias"] if name == "layer_norm" else []), *(["residual"] if residual else [])]
    return lambda *arrays: function(**dict(zip(names, arrays, strict=True)))


def operands(name: str, rows: int, columns: int, dtype: mx.Dtype, residual: bool) -> list[mx.array]:
    vectors = [normal(columns, dtype=dtype) for _ in range(2 if name == "layer_norm" else 1)]
    return [normal(rows, columns, dtype=dtype), *vectors, *([normal(rows, columns, dtype=dtype)] if residual else [])]


@pytest.mark.alike("dtype")
@each_norm
@each_dtype
@each_width
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_results_and_gradients(name, dtype, columns, residual):
    ours, definition = (of_operands(name, function, residual) for function in NORMS[name])
    arrays = operands(name, 9, columns, dtype, residual)
    assert_accurate(ours, definition, arrays)
    cotangents = [normal(9, columns, dtype=dtype) for _ in range(1 + residual)]
    gradients = (vjp_of(function, len(arrays)) for function in (ours, definition))
    assert_accurate(*gradients, [*arrays, *cotangents], factor=GRADIENT_FACTOR)


@each_norm
@each_width
def test_float32_weight_of_float16_rows(name, columns):
    function, definition = NORMS[name]
    x, weight, d_y = normal(9, columns), normal(columns, dtype=mx.float32), normal(9, columns)
    (y,) = in_float64(definition, [x, weight])
    assert max_error(function(x, weight), y) <= 2**-11
    d_x, d_weight = vjp_of(function, 2)(x, weight, d_y)
    exact = in_float64(vjp_of(definition, 2), [x, weight, d_y])
    assert max_error(d_x, exact[0]) <= 2**-11
    assert max_error(d_weight, exact[1]) <= 1e-5


@each_norm
def test_parts_of_several_rows(name):
    """There are more rows than parts, so rows are read ahead within a part, and the last part has fewer rows."""
    ours, definition = (of_operands(name, function, False) for function in NORMS[name])
    arrays = [*operands(name, 300, 4096, mx.float16, False), normal(300, 4096)]
    with mlx_anvil.trace() as trace:
        gradients = vjp_of(ours, len(arrays) - 1)(*arrays)
        mx.eval(gradients)
    backward, *sums = [event for event in trace.events if event.kernel]
    assert parse_key(backward.kernel)[1][READS_AHEAD]
    assert len(sums) == 1, "one launch adds up the parts of both gradients"
    assert_accurate(*(vjp_of(f, len(arrays) - 1) for f in (ours, definition)), arrays, factor=GRADIENT_FACTOR)


@each_norm
def test_gradient_in_x_alone(name):
    ours, definition = NORMS[name]
    weight, arrays = normal(1024), [normal(9, 1024), normal(9, 1024)]
    of_x = (vjp_of(lambda x, f=function: f(x, weight.astype(x.dtype)), 1) for function in (ours, definition))
    assert_accurate(*of_x, arrays, factor=GRADIENT_FACTOR)


@each_norm
def test_weights_of_groups(name):
    """Under vmap each batch element has its own weight, so parts start at other rows than the first."""
    function, definition = NORMS[name]
    arrays = [normal(3, 5, 600), normal(3, 600), normal(3, 5, 600)]
    ours, exact = (mx.vmap(f) for f in (function, definition))
    assert_accurate(ours, exact, arrays[:2])
    assert_accurate(vjp_of(ours, 2), vjp_of(exact, 2), arrays, factor=GRADIENT_FACTOR)


@each_norm
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(name):
    function = NORMS[name][0]
    x, weight = normal(20, 4096), normal(4096)
    assert_same_bits(function(x[7:8], weight), function(x, weight)[7:8])


@pytest.mark.parametrize(
    ("columns", "dtype", "ahead"), [(4096, mx.float16, True), (4096, mx.float32, False), (8200, mx.float16, False)]
)
def test_what_is_read_ahead(columns, dtype, ahead):
    with mlx_anvil.trace() as trace:
        mx.eval(rms_norm(normal(2, columns, dtype=dtype), normal(columns, dtype=dtype)))
    assert parse_key(trace.events[0].kernel)[1][READS_AHEAD] == ahead
