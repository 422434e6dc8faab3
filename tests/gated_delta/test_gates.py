"""Tests of gated_delta_gates beyond the contract: mlx-lm's functions, far arguments, dtypes of weights, gradients,
errors."""

import math
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import gated_delta_gates
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, isas, kernel_names, layouts, max_error, on_isa, poison_memory, to_numpy

ALL = (0, 1, 2, 3)
PLAIN: dict[str, Any] = {}
BOUNDED = {"lower_bound": -5.0, "allow_neg_eigval": True}
# Per head and per channel, with fewer, as many and more columns than vectors, SIMD groups and blocks have lanes.
SHAPES = [((7,), ()), ((5, 3), ()), ((2, 9, 32), ()), ((3, 70), ()), ((1,), (1,)), ((2, 3, 5), (7,)), ((11, 2), (33,))]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_option = pytest.mark.parametrize("options", [PLAIN, BOUNDED], ids=["plain", "bounded"])


def of_numpy(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None = None, scale: float = 1
) -> tuple[np.ndarray, np.ndarray]:
    speed = np.exp(to_numpy(A_log)).reshape(-1, *(1,) * (a.ndim - b.ndim))
    x = to_numpy(a) + to_numpy(dt_bias)
    logarithm = -speed * np.logaddexp(x, 0) if lower_bound is None else lower_bound / (1 + np.exp(-speed * x))
    return np.exp(logarithm), scale / (1 + np.exp(-to_numpy(b)))


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@each_dtype
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 2, 4, 18), (7,), (3, 33)], ids=str)
def test_values(shape: tuple[int, ...], dtype: mx.Dtype, weights: mx.Dtype):
    """From where g is 1 to where it is 0, in float32 whatever the dtypes are."""
    heads = shape[-2:] if len(shape) == 4 else shape[-1:]
    a, b = (4 * mx.random.normal(x) for x in (shape, shape[:3] if len(shape) == 4 else shape))
    a_log, dt_bias = mx.random.normal(heads[:1]), 10 * mx.random.normal(heads)
    arrays = [a.astype(dtype), b.astype(dtype), a_log.astype(weights), dt_bias.astype(weights)]
    for options, exact in (
        ({}, of_numpy(*arrays)),
        ({"lower_bound": -5.0, "allow_neg_eigval": True}, of_numpy(*arrays, lower_bound=-5.0, scale=2)),
    ):
        results = gated_delta_gates(*arrays, **options)
        assert all(x.dtype == mx.float32 for x in results)
        for ours, wanted in zip(results, exact, strict=True):
            np.testing.assert_allclose(to_numpy(ours), wanted, rtol=2e-5, atol=1e-7)


def test_small_decays_keep_their_digits():
    """log g, where softplus is about e^x."""
    x = mx.linspace(-60, -5, 56)
    g, _ = gated_delta_gates(x, x, mx.full((56,), 10.0), mx.zeros((56,)))
    decay = 1 - to_numpy(g)
    np.testing.assert_allclose(decay, -np.expm1(-np.exp(10) * np.logaddexp(to_numpy(x), 0)), rtol=1e-5, atol=2.0**-23)


def test_far_arguments():
    x = mx.array([-math.inf, -1e30, -200.0, 200.0, 1e30, math.inf, math.nan])
    g, beta = gated_delta_gates(x, x, mx.zeros((7,)), mx.zeros((7,)))
    np.testing.assert_array_equal(to_numpy(g), [1, 1, 1, 0, 0, 0, np.nan])
    np.testing.assert_array_equal(to_numpy(beta), [0, 0, 0, 1, 1, 1, np.nan])
    bounded, _ = gated_delta_gates(x, x, mx.zeros((7,)), mx.zeros((7,)), lower_bound=-5.0)
    least = math.exp(-5)
    np.testing.assert_allclose(to_numpy(bounded), [1, 1, 1, least, least, least, np.nan], rtol=1e-6)


def test_slope_at_zero():
    """Where a definition of softplus in pieces has none."""
    a, weights = mx.array([-1e-6, 0.0, 1e-6]), mx.zeros((3,))
    slope = mx.grad(lambda a: gated_delta_gates(a, a, weights, weights)[0].sum())(a)
    np.testing.assert_allclose(to_numpy(slope), -0.25, rtol=1e-5)  # -sigmoid(0) e^-log(2)


def test_as_mlx_lm():
    theirs = pytest.importorskip("mlx_lm.models.gated_delta", reason="mlx-lm is not installed")
    a, b, a_log = mx.random.normal((2, 3, 4, 8)), mx.random.normal((2, 3, 4)), mx.random.normal((4, 1))
    dt_bias = mx.random.normal((4, 8))
    g, beta = gated_delta_gates(a, b, a_log, dt_bias)
    np.testing.assert_allclose(to_numpy(g), to_numpy(theirs.compute_g(a_log, a, dt_bias)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(to_numpy(beta), to_numpy(mx.sigmoid(b)), rtol=1e-6)
    bounded, _ = gated_delta_gates(a, b, a_log, dt_bias, lower_bound=-5.0)
    wanted = theirs.compute_lower_bound_g(a_log, a, dt_bias, -5.0)
    np.testing.assert_allclose(to_numpy(bounded), to_numpy(wanted), rtol=1e-5)


# ---- gradients -------------------------------------------------------------------------------------------------------


def draw(
    shape: tuple[int, ...],
    channels: tuple[int, ...] = (),
    dtype: mx.Dtype = mx.float32,
    weights: mx.Dtype | None = None,
) -> list[mx.array]:
    """``shape`` is that of b. From where g is 1 to where it is 0."""
    heads = shape[-1:]
    arrays = [3 * mx.random.normal((*shape, *channels)), 3 * mx.random.normal(shape)]
    own = [0.7 * mx.random.normal(heads), 2 * mx.random.normal((*heads, *channels))]
    drawn = [*(x.astype(dtype) for x in arrays), *(x.astype(weights or dtype) for x in own)]
    mx.eval(drawn)
    return drawn


def cotangents_of(arrays: list[mx.array]) -> list[mx.array]:
    return [mx.random.normal(x.shape) for x in arrays[:2]]


def gradients(
    arrays: list[mx.array], cotangents: list[mx.array], options: dict[str, Any], argnums: tuple[int, ...] = ALL
) -> list[mx.array]:
    def of_some(*some: mx.array) -> list[mx.array]:
        given = list(arrays)
        for i, x in zip(argnums, some, strict=True):
            given[i] = x
        return list(gated_delta_gates(*given, **options))

    return mx.vjp(of_some, [arrays[i] for i in argnums], cotangents)[1]


def exact_terms(arrays: list[mx.array], cotangents: list[mx.array], options: dict[str, Any]) -> list[np.ndarray]:
    """The gradients of a, b, A_log and dt_bias in float64, before those of the weights are added up over rows."""
    a, b, a_log, dt_bias = map(to_numpy, arrays)
    d_g, d_beta = map(to_numpy, cotangents)
    sigmoid = lambda x: np.exp(-np.logaddexp(-x, 0))  # noqa: E731
    speed = np.exp(a_log).reshape(-1, *(1,) * (a.ndim - b.ndim))
    x = a + dt_bias
    if "lower_bound" in options:
        s = sigmoid(speed * x)
        d_u = d_g * np.exp(options["lower_bound"] * s) * options["lower_bound"] * s * sigmoid(-speed * x)
        d_x, d_log = d_u * speed, d_u * speed * x
    else:
        exponent = -speed * np.logaddexp(x, 0)
        d_x, d_log = -d_g * np.exp(exponent) * speed * sigmoid(x), d_g * np.exp(exponent) * exponent
    d_b = d_beta * (2 if options.get("allow_neg_eigval") else 1) * sigmoid(b) * sigmoid(-b)
    return [d_x, d_b, d_log, d_x]


def assert_gradients(ours: list[mx.array], arrays: list[mx.array], terms: list[np.ndarray]) -> None:
    """Each is rounded once to its dtype, and sums lose no digits however many rows there are."""
    for i, (array, gradient, of) in enumerate(zip(arrays, ours, terms, strict=True)):
        assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
        axes = tuple(range(of.ndim - arrays[3].ndim)) if i >= 2 else ()
        axes += tuple(range(len(axes) + 1, of.ndim)) if i == 2 else ()
        exact, scale = of.sum(axis=axes), np.abs(of).sum(axis=axes)
        rounding = 2e-6 * np.maximum(scale, np.abs(of).max(initial=0.0))  # of float32, where exponentials are steep
        of_dtype = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[array.dtype] * np.abs(exact)
        smallest = 2.0**-24 if array.dtype == mx.float16 else 1e-30
        error = np.abs(to_numpy(gradient) - exact)
        assert (error <= rounding + of_dtype + smallest).all(), (i, error.max(), scale.max(initial=0.0))


def check_gradients(arrays: list[mx.array], options: dict[str, Any]) -> list[mx.array]:
    cotangents = cotangents_of(arrays)
    ours = gradients(arrays, cotangents, options)
    assert_gradients(ours, arrays, exact_terms(arrays, cotangents, options))
    return ours


@each_option
@each_dtype
@pytest.mark.parametrize(("shape", "channels"), SHAPES, ids=str)
def test_gradients(shape: tuple[int, ...], channels: tuple[int, ...], dtype: mx.Dtype, options: dict[str, Any]):
    for weights in DTYPES:
        check_gradients(draw(shape, channels, dtype, weights), options)


@pytest.mark.usefixtures("checked_simulator")
@each_option
@each_dtype
@pytest.mark.parametrize("channels", [(), (40,)], ids=["heads", "channels"])
def test_gradients_of_the_metal_kernels(channels: tuple[int, ...], dtype: mx.Dtype, options: dict[str, Any]):
    """In several parts of rows, the last of them short."""
    poison_memory(1 << 16)
    with mlx_anvil.trace() as trace:
        check_gradients(draw((2, 13, 3), channels, dtype, mx.float32), options)
    sums = ["gated_delta_gates_sum_float32"] * 2
    assert kernel_names(trace)[-3:] == [f"gated_delta_gates_backward_{str(dtype).split('.')[-1]}", *sums]


@each_option
@pytest.mark.parametrize(("rows", "channels"), [(5000, ()), (1031, (32,))], ids=["heads", "channels"])
def test_gradients_of_many_rows(rows: int, channels: tuple[int, ...], options: dict[str, Any]):
    """Whose sums have the same bits on two runs, and not more errors than those of few rows."""
    arrays = draw((rows, 3), channels)
    cotangents = [mx.abs(x) for x in cotangents_of(arrays)]
    ours = gradients(arrays, cotangents, options)
    assert_gradients(ours, arrays, exact_terms(arrays, cotangents, options))
    for first, second in zip(ours, gradients(arrays, cotangents, options), strict=True):
        assert_same_bits(first, second)


@pytest.mark.parametrize("rows", [70_000, 1_000_000])
def test_sums_of_equal_rows(rows: int):
    """Rounding has the same sign in all of them: added up one after the other, a million lose three digits."""

    def of(rows: int) -> list[mx.array]:
        arrays = [mx.full((rows, 1), 0.1), mx.zeros((rows, 1)), mx.zeros((1,)), mx.zeros((1,))]
        return gradients(arrays, [mx.ones((rows, 1))] * 2, {})[2:]

    for of_all, of_one in zip(of(rows), of(1), strict=True):
        assert abs(of_all.item() / (rows * of_one.item()) - 1) <= 2e-6


@each_option
@pytest.mark.parametrize("channels", [(), (5,)], ids=["heads", "channels"])
def test_gradients_of_views(channels: tuple[int, ...], options: dict[str, Any]):
    arrays = draw((2, 3, 4), channels)
    cotangents = cotangents_of(arrays)
    wanted = gradients(arrays, cotangents, options)
    everything = [*arrays, *cotangents]
    for views in zip(*(layouts(x) for x in everything), strict=True):
        given = [x for _, x in views]
        for a, b in zip(gradients(given[:4], given[4:], options), wanted, strict=True):
            assert_same_bits(a, b)
    repeated = [mx.broadcast_to(x[:1, :1], x.shape) for x in everything[:2]]
    ones = [mx.broadcast_to(mx.ones(()), x.shape) for x in cotangents]
    ours = gradients([*repeated, *arrays[2:]], ones, options)
    assert_gradients(ours, arrays, exact_terms([*repeated, *arrays[2:]], ones, options))


@pytest.mark.parametrize("channels", [(), (5,)], ids=["heads", "channels"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (2, 0)], ids=str)
def test_gradients_of_nothing(shape: tuple[int, ...], channels: tuple[int, ...]):
    poison_memory(4096)
    arrays = draw(shape, channels)
    for array, gradient in zip(arrays, gradients(arrays, cotangents_of(arrays), {}), strict=True):
        assert gradient.shape == array.shape
        assert not to_numpy(gradient).any()


@each_option
def test_gradients_of_some_arguments(options: dict[str, Any]):
    """The same bits as with all; without the weights there are no sums."""
    arrays = draw((3, 5, 4), (6,))
    cotangents = cotangents_of(arrays)
    wanted = gradients(arrays, cotangents, options)
    for argnums in ((0,), (1,), (2,), (3,), (1, 0), (3, 0)):
        ours = gradients(arrays, cotangents, options, argnums)
        for i, gradient in zip(argnums, ours, strict=True):
            assert_same_bits(gradient, wanted[i])


def test_training_takes_kernels_alone():
    arrays = draw((2, 9, 4), (6,), mx.bfloat16, mx.float32)
    for argnums, options in product((ALL, (0, 1), (2,)), (PLAIN, BOUNDED)):
        loss = lambda *x, options=options: sum(y.sum() for y in gated_delta_gates(*x, **options))  # noqa: E731
        with mlx_anvil.strict(), mlx_anvil.trace() as trace:
            mx.eval(mx.value_and_grad(loss, argnums=argnums)(*arrays))
        assert kernel_names(trace)[:2] == ["gated_delta_gates_bfloat16", "gated_delta_gates_backward_bfloat16"]
    per_row = mx.vmap(mx.grad(loss, argnums=(0, 1)), in_axes=(0, 0, None, None))
    with mlx_anvil.strict():
        rows = per_row(*arrays)
    for ours, wanted in zip(rows, mx.grad(loss, argnums=(0, 1))(*arrays), strict=True):
        assert_same_bits(ours, wanted)


@pytest.mark.parametrize("simulated", [False, True], ids=["", "simulator"])
@pytest.mark.parametrize("log", [-math.inf, -200.0, 0.0, 5.0, 90.0, 1e30, math.inf], ids=str)
@each_option
def test_gradients_of_far_arguments(
    log: float, simulated: bool, options: dict[str, Any], request: pytest.FixtureRequest
):
    """They are finite; NaN stays where it is."""
    if simulated:
        request.getfixturevalue("checked_simulator")
    far = [-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0, 1e30]
    x = mx.array([far, far])
    size = len(far)
    arrays = [x, x, mx.full((size,), log), mx.zeros((size,))]
    ones = [mx.ones(x.shape)] * 2
    # With a bound, the slope at 0 is a fourth of the bound times e^A_log.
    is_steep = log >= 90 and bool(options)
    for gradient in gradients(arrays, ones, options):
        is_finite = np.isfinite(to_numpy(gradient))
        assert is_finite[..., np.array(far) != 0].all() if is_steep else is_finite.all()
    spoilt = [mx.where(mx.arange(2)[:, None] == 0, math.nan, x), *arrays[1:]]
    d_a, d_b, d_log, d_bias = map(to_numpy, gradients(spoilt, ones, options))
    assert np.isnan(d_a[0]).all()
    assert np.isnan(d_log).all()
    assert np.isnan(d_bias).all()
    assert np.isfinite(d_b).all()
    assert not np.isnan(d_a[1]).any()


@pytest.mark.parametrize("simulated", [False, True], ids=["", "simulator"])
@each_option
def test_infinite_arguments_have_no_slope(simulated: bool, options: dict[str, Any], request: pytest.FixtureRequest):
    if simulated:
        request.getfixturevalue("checked_simulator")
    x = mx.array([-math.inf, math.inf])
    arrays = [x, x, mx.zeros((2,)), mx.zeros((2,))]
    for gradient in gradients(arrays, [mx.ones((2,))] * 2, options):
        assert not to_numpy(gradient).any()


@pytest.mark.cpu_only
@pytest.mark.parametrize("isa", isas())
@each_option
def test_every_instruction_set(isa: str, options: dict[str, Any]):
    with on_isa(isa):
        for (shape, channels), dtype in product((((300, 5), ()), ((2, 7, 3), (33,))), DTYPES):
            check_gradients(draw(shape, channels, dtype), options)


# Without rows the gradients of a and of dt_bias are equal, in MLX's ops one array.
@each_option
@pytest.mark.parametrize(("shape", "channels"), [((2, 3, 4), ()), ((2, 3, 4), (5,)), ((4,), ()), ((1,), (5,))], ids=str)
def test_derivatives_of_gradients(shape: tuple[int, ...], channels: tuple[int, ...], options: dict[str, Any]):
    """By MLX's ops, beside those of the definition."""
    arrays = [0.3 * x for x in draw(shape, channels)]
    tangents = [mx.random.normal(x.shape) for x in arrays]

    def squares(results: Any) -> mx.array:
        return sum((y * y).sum() for y in results)

    def derivatives_of(op: Any) -> list[mx.array]:
        gradient = mx.grad(lambda *x: squares(op(*x, **options)), argnums=ALL)
        second = mx.grad(lambda *x: squares(gradient(*x)), argnums=ALL)(*arrays)
        mapped = mx.vmap(gradient)(*(mx.stack([x, 0.5 * x, x]) for x in arrays))
        return [*second, *mx.jvp(gradient, arrays, tangents)[1], *mapped]

    ours, wanted = (derivatives_of(op) for op in (gated_delta_gates, mlx_anvil.reference.gated_delta_gates))
    scale = max(np.abs(to_numpy(x)).max() for x in wanted)
    for a, b in zip(ours, wanted, strict=True):
        assert max_error(a, b, scale=scale) <= 1e-5


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": mx.zeros((2, 3))}, r"a has shape \(2, 3\); allowed: the shape of b, \(2, 4\), or one axis more"),
        ({"a": mx.zeros((2, 4, 0)), "dt_bias": mx.zeros((4, 0))}, r"a has shape \(2, 4, 0\)"),
        ({"b": mx.zeros(())}, r"b has shape \(\); allowed: \[..., heads\]"),
        ({"A_log": mx.zeros((1, 4))}, r"A_log has shape \(1, 4\); allowed: \(4,?\).* or \(4, 1\)"),
        ({"dt_bias": mx.zeros((1,))}, r"dt_bias has shape \(1,?\); allowed: \(4,?\)"),
        ({"lower_bound": math.inf}, r"lower_bound is inf; allowed: None, or a finite number"),
        ({"a": mx.zeros((2, 4), mx.int32)}, r"a has dtype int32"),
    ],
    ids=str,
)
def test_errors(given: dict[str, Any], message: str):
    arrays = {"a": mx.zeros((2, 4)), "b": mx.zeros((2, 4)), "A_log": mx.zeros((4,)), "dt_bias": mx.zeros((4,))}
    with pytest.raises(ValueError, match=r"^\[gated_delta_gates\] " + message):
        gated_delta_gates(**{**arrays, **given})
