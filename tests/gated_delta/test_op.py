"""Tests of gated_delta beyond the contract: sizes, gates, padding, returned states, routes."""

import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import gated_delta
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, isas, kernel_names, max_error, on_isa, poison_memory, to_numpy
from tests.gated_delta.cases import (
    FLOAT32,
    Case,
    assert_close,
    check_gradients,
    check_results,
    definition,
    draw,
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_gate = pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
# Few steps and many on the CPU, and around chunks of the backward: 64 steps on the CPU, 16 and 32 on GPUs.
STEPS = (1, 2, 4, 5, 16, 17, 63, 64, 65)


@each_gate
@pytest.mark.parametrize("steps", STEPS)
def test_steps(steps: int, per_channel: bool):
    case = draw(steps, dims=(16, 20), per_channel=per_channel)
    check_results(case)
    check_gradients(case)


@pytest.mark.slow
@each_gate
def test_many_steps(per_channel: bool):
    case = draw(4097, heads=(1, 2), dims=(16, 8), per_channel=per_channel)
    check_results(case)
    check_gradients(case)


# Around tiles of the key dim, and blocks of rows.
DIMS = ((1, 1), (3, 5), (16, 33), (20, 7), (48, 31), (64, 64), (80, 65), (128, 128), (192, 9), (256, 17))


@each_dtype
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims: tuple[int, int], dtype: mx.Dtype):
    case = draw(6, heads=(1, 2), dims=dims, dtype=dtype, per_channel=sum(dims) % 2 == 0)
    check_results(case)
    check_gradients(case)


@pytest.mark.parametrize("heads", [(1, 1), (1, 5), (3, 3), (2, 6)], ids=str)
@pytest.mark.parametrize("steps", [3, 20])
def test_heads(heads: tuple[int, int], steps: int):
    case = draw(steps, heads=heads, batch=3)
    check_results(case)
    check_gradients(case)


@each_dtype
@each_gate
def test_dtypes_of_gates(dtype: mx.Dtype, per_channel: bool):
    for gates in DTYPES:
        case = draw(7, dtype=dtype, gates=gates, per_channel=per_channel)
        check_results(case)
        check_gradients(case)


def test_dtypes_of_operands():
    """y has the dtype of q, whatever the others have."""
    case = draw(5)
    exact = case.exact()
    y, state = gated_delta(case.q.astype(mx.bfloat16), *case.arrays[1:])
    assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    half = case.state.astype(mx.float16)
    y, state = gated_delta(*case.arrays[:5], half)
    assert state.dtype == mx.float32
    assert_close("y", y, exact[0], 1e-2)


@each_dtype
@each_gate
@pytest.mark.parametrize("steps", [3, 40])
def test_normalised(steps: int, per_channel: bool, dtype: mx.Dtype):
    case = draw(steps, dtype=dtype, per_channel=per_channel, normalize_eps=1e-6)
    case.q, case.k = 3 * case.q, 5 * case.k
    check_results(case)
    check_gradients(case)
    large = Case(*case.arrays, {"normalize_eps": 2.5})
    check_results(large)
    check_gradients(large)


@pytest.mark.parametrize("steps", [4, 70])
def test_without_a_state(steps: int):
    case = draw(steps, with_state=False)
    check_results(case)
    check_gradients(case)
    zeros = mx.zeros((1, 4, 24, 32))
    for a, b in zip(case.run(), gated_delta(*case.arrays, zeros), strict=True):
        assert_same_bits(a, b)


@each_gate
@pytest.mark.parametrize("steps", [4, 37, 130])
def test_lengths(steps: int, per_channel: bool):
    """Each batch row has the results of a call of its own; padding changes nothing, even if it is NaN."""
    lengths = [0, steps, 1, steps // 2]
    case = draw(steps, batch=4, per_channel=per_channel, lengths=mx.array(lengths))
    poison_memory(case.v.nbytes)
    y, state = check_results(case)
    check_gradients(case)
    padding = mx.arange(steps)[None] >= mx.array(lengths)[:, None]
    assert not to_numpy(mx.where(padding[..., None, None], y, 0)).any()
    assert_same_bits(state[0], case.state[0])
    spoilt = [mx.where(padding.reshape(4, steps, *(1,) * (x.ndim - 2)), math.nan, x) for x in case.arrays[:5]]
    for a, b in zip(case.run(*spoilt, case.state), (y, state), strict=True):
        assert_same_bits(a, b)
    gradients = mx.grad(lambda *x: case.run(*x)[0].sum() + case.run(*x)[1].sum(), argnums=(0, 1, 2, 3, 4, 5))
    for a, b in zip(gradients(*spoilt, case.state), gradients(*case.arrays), strict=True):
        assert np.isfinite(to_numpy(a)).all()
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    "positions",
    [[0], [4, 1, 4], (0, 1, 2, 3, 4), mx.array([3, 0]), mx.array([[0, 4], [2, 2]])],
    ids=["first", "repeated", "all", "array", "of each batch row"],
)
@pytest.mark.parametrize("steps", [5, 36])
def test_returned_states(positions: object, steps: int):
    at = positions.tolist() if isinstance(positions, mx.array) else list(positions)
    at = (np.array(at) * (steps - 1) // 4).tolist()
    case = draw(steps, batch=2, return_states=mx.array(at) if isinstance(positions, mx.array) else at)
    check_results(case)
    check_gradients(case)
    case.options["lengths"] = mx.array([2, steps])
    check_results(case)
    check_gradients(case)
    case.options["lengths"] = mx.array([0, steps - 1])
    check_results(case)
    check_gradients(case)


def test_a_returned_state_goes_on():
    """A speculative decode goes back to the state of the last token it accepts."""
    case = draw(8)
    y, state, states = case.run(return_states=list(range(8)))
    assert_same_bits(states[:, 7], state)
    rest = [x[:, 3:] for x in case.arrays[:5]]
    again = gated_delta(*rest, states[:, 2])
    assert max_error(again[0], y[:, 3:]) <= FLOAT32
    assert max_error(again[1], state) <= FLOAT32


def test_no_positions_and_no_steps():
    case = draw(3)
    assert case.run(return_states=[])[2].shape == (1, 0, 4, 24, 32)
    empty = draw(0)
    y, state, states = empty.run(return_states=[])
    assert (y.shape, states.shape) == ((1, 0, 4, 24), (1, 0, 4, 24, 32))
    assert_same_bits(state, empty.state)
    gradient = mx.grad(lambda s: (empty.run(*empty.arrays[:5], s)[1] * empty.state).sum())(empty.state)
    assert_same_bits(gradient, empty.state)


def test_positions_that_the_call_cannot_read():
    """They are moved inside the range, as lengths are."""
    case = draw(4, batch=2)
    mx.eval(case.arrays)
    unread = case.run(return_states=mx.array([-3, 9]) + 0, lengths=mx.array([-1, 7]) + 0)
    wanted = case.run(return_states=[0, 3], lengths=mx.array([0, 4]))
    for a, b in zip(unread, wanted, strict=True):
        assert_same_bits(a, b)


@each_gate
def test_step_by_step(per_channel: bool):
    case = draw(23, heads=(2, 2), dims=(64, 48), per_channel=per_channel, batch=2)
    y, last = case.run()
    outputs, state = [], case.state
    for t in range(23):
        own, state = gated_delta(*(x[:, t : t + 1] for x in case.arrays[:5]), state)
        outputs.append(own)
    assert max_error(mx.concatenate(outputs, axis=1), y) <= FLOAT32
    assert max_error(state, last) <= FLOAT32


@each_gate
def test_as_mlx_lm(per_channel: bool):
    ours = pytest.importorskip("mlx_lm.models.gated_delta", reason="mlx-lm is not installed")
    case = draw(19, heads=(2, 4), per_channel=per_channel, batch=2)
    for a, b in zip(case.run(), ours.gated_delta_ops(*case.arrays), strict=True):
        assert max_error(a, b) <= 2 * FLOAT32
    q, k = ours.normalize_qk(case.q, case.k, inv_scale=32**-0.5, eps=1e-6)
    theirs = ours.gated_delta_ops(q, k, *case.arrays[2:])
    for a, b in zip(case.run(normalize_eps=1e-6), theirs, strict=True):
        assert max_error(a, b) <= 2 * FLOAT32
    mask = mx.arange(19)[None] < mx.array([7, 19])[:, None]
    y, state = ours.gated_delta_ops(*case.arrays, mask)
    results = case.run(lengths=mx.array([7, 19]))
    assert max_error(results[0], mx.where(mask[..., None, None], y, 0)) <= 2 * FLOAT32
    assert max_error(results[1], state) <= 2 * FLOAT32


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e-30])
def test_decays_that_lose_the_state(factor: float):
    """The backward divides by no decay."""
    case = draw(9, dims=(16, 5))
    case.g = mx.where(mx.arange(9)[None, :, None] % 3 == 1, factor, case.g)
    check_results(case)
    check_gradients(case)


@each_dtype
@pytest.mark.parametrize("steps", [1, 9])
def test_views_of_a_projection_are_not_copied(steps: int, dtype: mx.Dtype):
    """As models call it: q, k and v are slices of one array. The same bits, and no memory beyond the results."""
    heads, dim = (2, 4), 32
    mixed = mx.random.normal((2, steps, 2 * heads[0] * dim + heads[1] * dim)).astype(dtype) / 6
    parts = mx.split(mixed, [heads[0] * dim, 2 * heads[0] * dim], axis=-1)
    q, k, v = (x.reshape(2, steps, h, dim) for x, h in zip(parts, (heads[0], *heads), strict=True))
    rest = draw(steps, heads=heads, dims=(dim, dim), dtype=dtype, batch=2).arrays[3:]
    mx.eval(q, k, v)
    results = support.without_copies(gated_delta, q, k, v, *rest)
    for a, b in zip(results, gated_delta(*map(mx.contiguous, (q, k, v)), *rest), strict=True):
        assert_same_bits(a, b)


@pytest.mark.cpu_only
@pytest.mark.parametrize("steps", [1, 9])
def test_the_state_is_changed_in_place(steps: int):
    case = draw(steps, heads=(16, 16), dims=(128, 128))
    *rest, state = case.arrays
    wanted = case.run()
    mx.eval(wanted)
    state = state + 0
    mx.eval(state)
    case.state = None
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y, state = gated_delta(*rest, state)
    mx.eval(y, state)
    assert mx.get_peak_memory() - before < state.nbytes // 2 + y.nbytes
    for a, b in zip((y, state), wanted, strict=True):
        assert_same_bits(a, b)


@pytest.mark.cpu_only
def test_memory_of_a_gradient():
    """It has states at intervals: those of all steps would take a hundred times as much."""
    case = draw(1024, heads=(1, 2), dims=(64, 64))
    gradient = mx.grad(lambda *x: case.run(*x)[0].sum(), argnums=(0, 1, 2, 3, 4, 5))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(gradient(*case.arrays))
    assert mx.get_peak_memory() - before < 4 * sum(x.nbytes for x in case.arrays)


def test_routes():
    with mlx_anvil.trace() as trace:
        mx.eval(draw(1).run())
        mx.eval(draw(20).run())
    assert all(name.startswith("gated_delta_") for name in kernel_names(trace))
    assert not trace.fallbacks
    with mlx_anvil.trace() as trace:
        check_results(draw(3, heads=(1, 1), dims=(257, 4)))
    assert trace.kernels == []
    assert "key dims up to 256" in str(trace.fallbacks[0])


@pytest.mark.cpu_only
@pytest.mark.parametrize("isa", isas())
@each_gate
def test_every_instruction_set(isa: str, per_channel: bool):
    case = draw(70, heads=(1, 2), dims=(48, 37), per_channel=per_channel, normalize_eps=1e-6, return_states=[40])
    few = Case(*[x[:, :3] for x in case.arrays[:5]], case.state, {"return_states": [1]})
    with on_isa(isa):
        check_results(case)
        check_gradients(case)
        check_results(few)
        check_gradients(few)


@each_gate
def test_same_bits_on_two_runs(per_channel: bool):
    case = draw(90, heads=(2, 6), dims=(64, 64), per_channel=per_channel, batch=2)
    gradient = mx.grad(lambda *x: case.run(*x)[0].sum(), argnums=(0, 1, 2, 3, 4, 5))
    for a, b in zip(gradient(*case.arrays), gradient(*case.arrays), strict=True):
        assert_same_bits(a, b)


def test_vmap_of_options():
    case = draw(5, batch=2)
    lengths, positions = mx.array([[0, 5], [3, 1], [5, 2]]), mx.array([[0, 4], [2, 3], [1, 1]])

    def run(length: mx.array, at: mx.array) -> tuple[mx.array, ...]:
        return case.run(lengths=length, return_states=at)

    mapped = mx.vmap(run)(lengths, positions)
    for i in range(3):
        for a, b in zip(mapped, run(lengths[i], positions[i]), strict=True):
            assert max_error(a[i], b) <= FLOAT32
    exact = definition(*map(to_numpy, case.arrays), lengths=[3, 1], return_states=[2, 3])
    for a, b in zip(mapped, exact, strict=True):
        assert_close("vmap", a[1], b, FLOAT32)
