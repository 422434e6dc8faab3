"""Tests of ssd_scan beyond the contract: sizes, step sizes, padding, returned states, mlx-lm's function, routes."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import ssd_scan
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, isas, kernel_names, max_error, on_isa, poison_memory, to_numpy
from tests.gated_delta.cases import FLOAT32, assert_close
from tests.ssd_scan.cases import OPTIONAL, ROWS, Case, check_gradients, check_results, definition, draw

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Few steps and many on the CPU, and around chunks of the backward: 64 steps on the CPU, 16 and 32 on GPUs.
STEPS = (1, 2, 4, 5, 16, 17, 63, 64, 65, 200)


@pytest.mark.parametrize("steps", STEPS)
def test_steps(steps: int):
    case = draw(steps, dims=(16, 20))
    check_results(case)
    check_gradients(case)


@pytest.mark.slow
def test_many_steps():
    case = draw(4097, heads=(1, 2), dims=(16, 8))
    check_results(case)
    check_gradients(case)


# Around tiles of N, and blocks of rows.
DIMS = ((1, 1), (3, 5), (16, 33), (20, 7), (48, 31), (64, 64), (80, 65), (128, 64), (192, 9), (256, 17))


@each_dtype
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims: tuple[int, int], dtype: mx.Dtype):
    case = draw(6, heads=(1, 2), dims=dims, dtype=dtype, dt=dtype)
    check_results(case)
    check_gradients(case)


# The last ones have a group of more heads than pieces of work on the CPU.
@pytest.mark.parametrize("heads", [(1, 1), (1, 5), (3, 3), (2, 6), (1, 40)], ids=str)
@pytest.mark.parametrize("steps", [3, 20, 70])
def test_heads(heads: tuple[int, int], steps: int):
    case = draw(steps, heads=heads, batch=3 if heads[1] < 40 else 1)
    check_results(case)
    check_gradients(case)


@each_dtype
def test_a_group_of_many_heads(dtype: mx.Dtype):
    case = draw(67, heads=(1, 19), dims=(16, 9), dtype=dtype)
    check_results(case)
    check_gradients(case)


@pytest.mark.parametrize("arrays", [(), *((name,) for name in OPTIONAL), ("D", "z")], ids=str)
@pytest.mark.parametrize("steps", [3, 21])
def test_optional_arrays(steps: int, arrays: tuple[str, ...]):
    case = draw(steps, with_arrays=arrays)
    check_results(case)
    check_gradients(case)


@pytest.mark.parametrize(
    "options",
    [
        {"dt_softplus": False, "dt_limit": None},
        {"dt_softplus": True, "dt_limit": None},
        {"dt_softplus": False, "dt_limit": (0.2, 0.6)},
        {"dt_softplus": True, "dt_limit": (-math.inf, 0.9)},
        {"dt_softplus": True, "dt_limit": [0.7, math.inf]},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [2, 12])
def test_step_sizes(steps: int, options: dict[str, Any]):
    case = draw(steps, **options)
    check_results(case, slack=2)  # of steps below 0, decays are above 1, and their errors grow
    check_gradients(case)


def test_far_step_sizes():
    """Softplus keeps small numbers, and a decay may be 0 or 1."""
    case = draw(8, dt_limit=None, with_arrays=("D", "state"))
    case.arrays["dt"] = mx.broadcast_to(mx.array([-80.0, -20, -1e-3, 0, 5, 50, 90, 1000])[None, :, None], (1, 8, 4))
    check_results(case)
    small = draw(1, heads=(1, 1), dims=(1, 1), with_arrays=(), dt_limit=None)
    small.arrays["dt"] = mx.full((1, 1, 1), -30.0)
    assert max_error(small.run()[1], mx.array(small.exact()[1].astype(np.float32))) <= FLOAT32


def test_dtypes_of_operands():
    """y has the dtype of x, whatever the others have."""
    case = draw(5)
    exact = case.exact()
    y, state = case.run(x=case.arrays["x"].astype(mx.bfloat16))
    assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    y, state = case.run(**{name: case.arrays[name].astype(mx.float16) for name in ("A", "D", "dt", "state", "dt_bias")})
    assert (y.dtype, state.dtype) == (mx.float32, mx.float32)
    assert_close("y", y, exact[0], 1e-2)


@pytest.mark.parametrize("steps", [4, 37, 130])
def test_lengths(steps: int):
    """Each batch row has the results of a call of its own; padding changes nothing, even if it is NaN."""
    lengths = [0, steps, 1, steps // 2]
    case = draw(steps, batch=4, lengths=mx.array(lengths))
    poison_memory(case.arrays["x"].nbytes)
    y, state = check_results(case)
    check_gradients(case)
    padding = mx.arange(steps)[None] >= mx.array(lengths)[:, None]
    assert not to_numpy(mx.where(padding[..., None, None], y, 0)).any()
    assert_same_bits(state[0], case.arrays["state"][0])
    spoilt = Case(dict(case.arrays), case.options)
    for name in ROWS:
        x = case.arrays[name]
        spoilt.arrays[name] = mx.where(padding.reshape(4, steps, *(1,) * (x.ndim - 2)), math.nan, x)
    for a, b in zip(spoilt.run(), (y, state), strict=True):
        assert_same_bits(a, b)
    gradients = mx.grad(lambda *x: sum(out.sum() for out in case.of_arrays(*x)), argnums=tuple(range(9)))
    for a, b in zip(gradients(*spoilt.arrays.values()), gradients(*case.arrays.values()), strict=True):
        assert np.isfinite(to_numpy(a)).all()
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    "positions",
    [[0], [4, 1, 4], mx.array([3, 0]), mx.array([[0, 4], [2, 2]])],
    ids=["first", "repeated", "array", "of each batch row"],
)
@pytest.mark.parametrize("steps", [5, 36])
def test_returned_states(positions: object, steps: int):
    at = positions.tolist() if isinstance(positions, mx.array) else positions
    at = (np.array(at) * (steps - 1) // 4).tolist()
    case = draw(steps, batch=2, return_states=mx.array(at) if isinstance(positions, mx.array) else at)
    for lengths in (None, mx.array([2, steps]), mx.array([0, steps - 1])):
        case.options["lengths"] = lengths
        check_results(case)
        check_gradients(case)


def test_no_positions_and_no_steps():
    case = draw(3)
    assert case.run(return_states=[])[2].shape == (1, 0, 4, 24, 32)
    empty = draw(0)
    y, state, states = empty.run(return_states=[])
    assert (y.shape, states.shape) == ((1, 0, 4, 24), (1, 0, 4, 24, 32))
    assert_same_bits(state, empty.arrays["state"])
    weights = mx.random.normal(state.shape)
    gradient = mx.grad(lambda s: (empty.run(state=s)[1] * weights).sum())(state)
    assert_same_bits(gradient, weights)


def test_step_by_step():
    case = draw(23, heads=(2, 2), dims=(64, 48), batch=2)
    y, last = case.run()
    outputs, state = [], case.arrays["state"]
    for t in range(23):
        own, state = case.run(**{name: case.arrays[name][:, t : t + 1] for name in ROWS}, state=state)
        outputs.append(own)
    assert max_error(mx.concatenate(outputs, axis=1), y) <= FLOAT32
    assert max_error(state, last) <= FLOAT32


@pytest.mark.parametrize("steps", [1, 2, 5, 63, 64, 65, 200])
@pytest.mark.parametrize("heads", [(1, 4), (2, 6), (4, 4)], ids=str)
def test_as_mlx_lm(heads: tuple[int, int], steps: int):
    theirs = pytest.importorskip("mlx_lm.models.ssm", reason="mlx-lm is not installed")
    case = draw(steps, heads=heads, dims=(32, 20), batch=2, with_arrays=("D", "state", "dt_bias"))
    given = dict(case.arrays)
    given["A_log"] = mx.log(-given.pop("A"))
    order = (given[name] for name in ("x", "A_log", "B", "C", "D", "dt", "dt_bias", "state"))
    for a, b in zip(case.run(), theirs.ssm_attn(*order, time_step_limit=case.options["dt_limit"]), strict=True):
        assert max_error(a, b) <= 1e-5  # theirs adds in another order


@each_dtype
@pytest.mark.parametrize("steps", [1, 9])
def test_views_of_a_projection_are_not_copied(steps: int, dtype: mx.Dtype):
    """As models call it: x, B and C are slices of one array. The same bits, and no memory beyond the results."""
    (groups, heads), columns, dim = (2, 4), 32, 32
    case = draw(steps, (groups, heads), (columns, dim), dtype, batch=2)
    sizes = (heads * dim, groups * columns, groups * columns)
    mixed = mx.random.normal((2, steps, sum(sizes))).astype(dtype) / 6
    parts = mx.split(mixed, [sizes[0], sizes[0] + sizes[1]], axis=-1)
    shapes = ((heads, dim), (groups, columns), (groups, columns))
    x, b, c = (part.reshape(2, steps, *shape) for part, shape in zip(parts, shapes, strict=True))
    mx.eval(x, b, c)

    def run(x: mx.array, b: mx.array, c: mx.array) -> tuple[mx.array, ...]:
        return case.run(x=x, B=b, C=c)

    for ours, wanted in zip(support.without_copies(run, x, b, c), run(*map(mx.contiguous, (x, b, c))), strict=True):
        assert_same_bits(ours, wanted)


@each_dtype
def test_layouts_give_the_same_bits(dtype: mx.Dtype):
    case = draw(7, dims=(16, 12), dtype=dtype, batch=2)
    wanted = case.run()
    for name, x in case.arrays.items():
        for layout, moved in support.layouts(x):
            poison_memory(1 << 16)
            for a, b in zip(case.run(**{name: moved}), wanted, strict=True):
                assert mx.array_equal(a, b), (name, layout)


@pytest.mark.cpu_only
@pytest.mark.parametrize("steps", [1, 9])
def test_the_state_is_changed_in_place(steps: int):
    case = draw(steps, heads=(1, 16), dims=(128, 64))
    wanted = case.run()
    mx.eval(wanted)
    state = case.arrays.pop("state") + 0
    mx.eval(state)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y, state = case.run(state=state)
    mx.eval(y, state)
    assert mx.get_peak_memory() - before < state.nbytes // 2 + y.nbytes
    for a, b in zip((y, state), wanted, strict=True):
        assert_same_bits(a, b)


@pytest.mark.cpu_only
def test_memory_of_a_gradient():
    """It has states at intervals: those of all steps would take a hundred times as much."""
    case = draw(1024, heads=(1, 2), dims=(64, 64))
    gradient = mx.grad(lambda *x: case.of_arrays(*x)[0].sum(), argnums=tuple(range(9)))
    arrays = list(case.arrays.values())
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(gradient(*arrays))
    assert mx.get_peak_memory() - before < 4 * sum(x.nbytes for x in arrays)


def test_routes():
    with mlx_anvil.trace() as trace:
        mx.eval(draw(1).run())
        mx.eval(draw(20).run())
    assert not trace.fallbacks
    assert {name.split("_")[0] for name in kernel_names(trace)} <= {"ssd", "gated"}
    with mlx_anvil.trace() as trace:
        check_results(draw(3, heads=(1, 1), dims=(257, 4)))
    assert "key dims up to 256" in str(trace.fallbacks[0])


@pytest.mark.cpu_only
@pytest.mark.parametrize("isa", isas())
def test_every_instruction_set(isa: str):
    case = draw(70, heads=(1, 2), dims=(48, 37), return_states=[40])
    few = draw(3, heads=(1, 2), dims=(48, 37), return_states=[1])
    with on_isa(isa):
        for own in (case, few):
            check_results(own)
            check_gradients(own)


def test_same_bits_on_two_runs():
    case = draw(90, heads=(1, 6), dims=(64, 64), batch=2)
    gradient = mx.grad(lambda *x: case.of_arrays(*x)[0].sum(), argnums=tuple(range(9)))
    arrays = list(case.arrays.values())
    for a, b in zip(gradient(*arrays), gradient(*arrays), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "z", "state", "dt_bias"])
def test_vmap(name: str):
    """Over one of the arrays, at every axis, with gradients; over rows it takes no MLX ops but those of gradients."""
    case = draw(6, batch=2, dims=(16, 5))
    x = case.arrays[name]
    several = mx.stack([x, 0.5 * x, 0.8 * x])

    def run(own: mx.array) -> tuple[mx.array, ...]:
        return case.run(**{name: own})

    def gradient(own: mx.array) -> mx.array:
        return mx.grad(lambda given: sum(out.sum() for out in run(given)))(own)

    wanted = [(*run(own), gradient(own)) for own in several]
    for axis in range(x.ndim + 1):
        moved = mx.moveaxis(several, 0, axis)
        mapped = (*mx.vmap(run, in_axes=axis)(moved), mx.vmap(gradient, in_axes=axis)(moved))
        for i in range(3):
            for a, b in zip(mapped, wanted[i], strict=True):
                assert max_error(a[i], b) <= 2 * FLOAT32


def test_vmap_of_options():
    case = draw(5, batch=2)
    lengths, positions = mx.array([[0, 5], [3, 1], [5, 2]]), mx.array([[0, 4], [2, 3], [1, 1]])

    def run(length: mx.array, at: mx.array) -> tuple[mx.array, ...]:
        return case.run(lengths=length, return_states=at)

    mapped = mx.vmap(run)(lengths, positions)
    for i in range(3):
        for a, b in zip(mapped, run(lengths[i], positions[i]), strict=True):
            assert max_error(a[i], b) <= FLOAT32
    arrays = {name: to_numpy(x) for name, x in case.arrays.items()}
    exact = definition(**arrays, **{**case.options, "lengths": [3, 1], "return_states": [2, 3]})
    for a, b in zip(mapped, exact, strict=True):
        assert_close("vmap", a[1], b, FLOAT32)


def test_second_derivatives():
    case = draw(4, heads=(1, 2), dims=(3, 2))
    x = case.arrays["x"]

    def slope(own: mx.array) -> mx.array:
        return (
            mx.grad(lambda given: (ssd_scan(**{**case.arrays, "x": given}, **case.options)[0] ** 2).sum())(own)
        ).sum()

    ours = mx.grad(slope)(x)
    with mlx_anvil.composed():
        wanted = mx.grad(slope)(x)
    assert max_error(ours, wanted) <= 1e-5
