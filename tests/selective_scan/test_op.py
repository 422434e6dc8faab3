"""Tests of selective_scan beyond the contract: sizes, options, layouts, states, lengths, errors, routes."""

import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import selective_scan
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, layouts, poison_memory, to_numpy
from tests.selective_scan.cases import (
    OPTIONAL,
    assert_close,
    check_gradients,
    check_results,
    draw,
    exact_scan,
    gradients,
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize("steps", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 200])
def test_steps(steps, dtype):
    """Around the chunks of steps between kept states: 16 on a GPU, 32 on the CPU."""
    case = draw((1, steps, 40, 16), dtype)
    check_results(case)
    check_gradients(case)


@each_dtype
@pytest.mark.parametrize("channels", [1, 7, 8, 31, 32, 33, 65, 130])
@pytest.mark.parametrize("states", [1, 4, 15, 16])
def test_channels_and_states(states, channels, dtype):
    case = draw((2, 5, channels, states), dtype)
    check_results(case)
    check_gradients(case)


@each_dtype
@pytest.mark.parametrize("states", [17, 33, 64])
def test_many_states(states, dtype):
    case = draw((1, 19, 9, states), dtype)
    check_results(case)
    check_gradients(case)


@each_dtype
@pytest.mark.parametrize("optional", [(), *((name,) for name in OPTIONAL)], ids=str)
@pytest.mark.parametrize("softplus", [False, True])
def test_options(softplus, optional, dtype):
    case = draw((2, 21, 10, 16), dtype, optional, dt_softplus=softplus)
    check_results(case)
    check_gradients(case)


@each_dtype
@pytest.mark.parametrize("softplus", [False, True])
def test_lengths(softplus, dtype):
    """Steps past a length change nothing, whatever is there."""
    lengths = [0, 1, 16, 17, 33, 40]
    case = draw((len(lengths), 40, 20, 16), dtype, dt_softplus=softplus, lengths=mx.array(lengths))
    y, state = check_results(case)
    found = check_gradients(case)
    past = mx.arange(40)[None, :, None] >= case.options["lengths"][:, None, None]
    for name in ("x", "dt", "B", "C", "z"):
        case.arrays[name] = mx.where(past, math.nan, case.arrays[name])
    case.d_y = mx.where(past, math.nan, case.d_y)
    assert all(mx.array_equal(a, b) for a, b in zip(case.scan(), (y, state), strict=True))
    for name, gradient in gradients(case, selective_scan, case.arrays).items():
        assert mx.array_equal(gradient, found[name]), name


@each_dtype
def test_layouts_give_the_same_bits(dtype):
    case = draw((2, 18, 12, 16), dtype)
    expected = case.scan()
    of_gradients = gradients(case, selective_scan, case.arrays)
    for name, x in case.arrays.items():
        for layout, moved in layouts(x):
            other = draw((2, 18, 12, 16), dtype)
            other.arrays = case.arrays | {name: moved}
            other.d_y, other.d_state = case.d_y, case.d_state
            poison_memory(1 << 16)
            assert all(mx.array_equal(a, b) for a, b in zip(other.scan(), expected, strict=True)), (name, layout)
            for of, gradient in gradients(other, selective_scan, other.arrays).items():
                assert mx.array_equal(gradient, of_gradients[of]), (name, layout, of)


@each_dtype
def test_slices_of_projections(dtype):
    """As Mamba calls it: x and z are halves of one projection, and so are dt, B and C."""
    case = draw((2, 9, 16, 4), dtype)
    joined = mx.concatenate([case.arrays[name] for name in ("x", "z", "B", "C")], axis=-1)
    mx.eval(joined)
    parts = dict(zip(("x", "z", "B", "C"), mx.split(joined, [16, 32, 36], axis=-1), strict=True))
    expected = case.scan()
    case.arrays |= parts
    assert all(mx.array_equal(a, b) for a, b in zip(case.scan(), expected, strict=True))


@each_dtype
def test_steps_one_by_one_are_the_whole(dtype):
    case = draw((2, 37, 24, 16), dtype)
    y, state = case.scan()
    rows, h = [], case.arrays["state"]
    for t in range(37):
        step = {name: case.arrays[name][:, t : t + 1] for name in ("x", "dt", "B", "C", "z")}
        row, h = selective_scan(**(case.arrays | step | {"state": h}))
        rows.append(row)
    assert_same_bits(h, state)
    assert_same_bits(mx.concatenate(rows, axis=1), y)


@pytest.mark.slow
def test_a_long_sequence():
    case = draw((1, 4097, 33, 16), mx.float32)
    check_results(case)


def test_large_and_small_decays():
    """Steps that forget everything, that keep everything, and that grow."""
    case = draw((1, 40, 32, 16), mx.float32, ())
    for rate, step in ((-1e4, 10.0), (0.0, 1.0), (-1e-30, 1.0), (0.5, 1.0)):
        case.arrays["A"] = mx.full(case.arrays["A"].shape, rate)
        case.arrays["dt"] = mx.full(case.arrays["dt"].shape, step)
        check_results(case)


def test_overflow_is_infinite():
    x, steps = mx.ones((1, 3, 5)), mx.full((1, 3, 5), 2.0)
    b = mx.ones((1, 3, 2))
    _, state = selective_scan(x, steps, mx.full((5, 2), 90.0), b, b, state=mx.ones((1, 5, 2)))
    assert mx.isinf(state).all().item()


def test_nan_stays_in_its_channel():
    case = draw((1, 12, 20, 16), mx.float32)
    x = np.array(case.arrays["x"])
    x[0, 4, 7] = math.nan
    case.arrays["x"] = mx.array(x)
    y, state = case.scan()
    exact_y, exact_state = exact_scan(case)
    assert (np.isnan(to_numpy(y)) == np.isnan(exact_y)).all()
    assert (np.isnan(to_numpy(state)) == np.isnan(exact_state)).all()


def test_mixed_dtypes_promote():
    case = draw((1, 6, 8, 4), mx.bfloat16)
    case.arrays["dt"] = case.arrays["dt"].astype(mx.float32)
    y, _ = case.scan()
    assert y.dtype == mx.float32
    assert_close("y", y, exact_scan(case)[0], 2e-6)


@pytest.mark.cpu_only  # the CPU's allocator counts
def test_memory_of_a_gradient_is_linear_in_steps():
    """The states of all steps would take 64 times as much as x."""
    case = draw((1, 2048, 64, 64), mx.float32, ())
    mx.eval(list(case.arrays.values()), case.d_y, case.d_state)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(gradients(case, selective_scan, case.arrays))
    assert mx.get_peak_memory() - before < 8 * case.arrays["x"].nbytes


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": (2, 3)}, r"x has shape \(2, 3\); allowed: rank 3"),
            ({"dt": (1, 4, 5)}, r"dt has shape \(1, 4, 5\); allowed: the shape of x, \(1, 4, 6\)"),
            ({"A": (5, 3)}, r"A has shape \(5, 3\) and x has shape \(1, 4, 6\); allowed: \[channels, states\]"),
            ({"A": (6, 0)}, r"A has shape \(6, 0\)"),
            ({"B": (1, 4, 2)}, r"B has shape \(1, 4, 2\); allowed: \[batch, steps, states\], \(1, 4, 3\)"),
            ({"C": (1, 3)}, r"C has shape"),
            ({"D": (5,)}, r"D has shape \(5,\); allowed: \[channels\], \(6,\)"),
            ({"z": (1, 4)}, r"z has shape"),
            ({"state": (1, 3, 6)}, r"state has shape \(1, 3, 6\); allowed: \[batch, channels, states\], \(1, 6, 3\)"),
        ],
        ids=str,
    )
    def test_shapes(self, change, message):
        case = draw((1, 4, 6, 3), mx.float32)
        arrays = case.arrays | {name: mx.zeros(shape) for name, shape in change.items()}
        with pytest.raises(ValueError, match=rf"^\[selective_scan\] {message}"):
            selective_scan(**arrays)

    @pytest.mark.parametrize(
        ("lengths", "message"),
        [
            (mx.array([1.0]), "lengths has dtype float32; allowed: integers"),
            (mx.array([1, 2]), r"lengths has shape \(2,\); allowed: one length per batch, \(1,\)"),
            (mx.array([5]), "lengths has 5; allowed: 0 to 4"),
            (mx.array([-1]), "lengths has -1; allowed: 0 to 4"),
        ],
        ids=str,
    )
    def test_lengths(self, lengths, message):
        with mx.stream(mx.cpu):
            mx.eval(lengths)
            case = draw((1, 4, 6, 3), mx.float32, lengths=lengths)
            with pytest.raises(ValueError, match=rf"^\[selective_scan\] {message}"):
                case.scan()

    def test_dtypes(self):
        case = draw((1, 4, 6, 3), mx.float32)
        case.arrays["state"] = case.arrays["state"].astype(mx.int32)
        with pytest.raises(ValueError, match=r"^\[selective_scan\] state has dtype int32"):
            case.scan()


@pytest.mark.cpu_only
def test_many_states_on_a_gpu_take_mlx_ops():
    case = draw((1, 4, 6, 17), mx.float32)
    with mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        check_results(case)
    assert "GPU kernels take up to 16 states" in str(trace)


def test_vmap_over_rows_is_one_kernel():
    case = draw((2, 7, 8, 4), mx.float32)
    names = [name for name in case.arrays if name not in ("A", "D")]
    stacked = {name: mx.stack([case.arrays[name], 2 * case.arrays[name]]) for name in names}

    def scan(*rows: mx.array) -> tuple[mx.array, mx.array]:
        return selective_scan(**(case.arrays | dict(zip(names, rows, strict=True))))

    with mlx_anvil.trace() as trace:
        both = mx.vmap(scan)(*stacked.values())
        mx.eval(both)
    assert not trace.fallbacks
    for i in range(2):
        alone = scan(*(x[i] for x in stacked.values()))
        assert all(mx.allclose(a[i], b, atol=1e-6) for a, b in zip(both, alone, strict=True))
