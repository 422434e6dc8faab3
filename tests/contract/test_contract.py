"""What every op promises, for all entries of the registry: an entry in ``reference.OPS`` gives a new op all these
tests."""

import itertools
import threading

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import DTYPES, OPS, OpSpec
from support import (
    FLOAT32_TOLERANCE,
    GRADIENT_FACTOR,
    OTHER_KERNEL,
    Arrays,
    as_list,
    assert_accurate,
    assert_same_bits,
    backend_scope,
    in_float64,
    jvp_of,
    layouts,
    max_error,
    poison_memory,
    to_numpy,
    vjp_of,
)

pytestmark = pytest.mark.parametrize("spec", OPS.values(), ids=OPS.keys())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(spec: OpSpec, shape: tuple[int, ...] | None = None, dtype: mx.Dtype = mx.float32) -> Arrays:
    arrays = spec.make_inputs(shape or spec.contract_shapes[-1], dtype)
    mx.eval(arrays)
    return arrays


def large_shape(spec: OpSpec) -> tuple[int, ...]:
    """A shape for which a backend uses all threads. The simulator does so for any shape, and would take minutes."""
    return (spec.contract_shapes if support.backend == "simulator" else spec.check_shapes)[-1]


def like(x: mx.array) -> mx.array:
    return mx.random.normal(x.shape).astype(x.dtype)


def scalar_of(function, weights: mx.array):
    """A scalar that depends on every element of the output in its own way."""
    return lambda *arrays: (function(*arrays).astype(mx.float32) * weights).sum()


def gradients_of(function, count: int):
    """The gradients in all arguments, always as a list."""
    gradient = mx.grad(function, argnums=list(range(count)))
    return lambda *arrays: as_list(gradient(*arrays))


def assert_same_up_to_last_bits(a: mx.array, b: mx.array) -> None:
    assert max_error(a, b) <= {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10, mx.float32: 2.0**-20}[b.dtype]


def assert_same_gradients(spec: OpSpec, ours: Arrays, wanted: Arrays, *, other_kernel: bool = False) -> None:
    """The same bits, except of another kernel, and where the order of a sum is not fixed."""
    of_any_order = spec.scattered_gradients and support.backend == "cuda"
    for a, b in zip(ours, wanted, strict=True):
        (assert_same_up_to_last_bits if other_kernel or of_any_order else assert_same_bits)(a, b)


# ---- values ----------------------------------------------------------------------------------------------------------


@each_dtype
def test_forward(spec: OpSpec, dtype: mx.Dtype):
    for shape in spec.contract_shapes:
        arrays = draw(spec, shape, dtype)
        poison_memory(spec.function(*arrays).nbytes)
        assert_accurate(spec.function, spec.reference, arrays, float32_tolerance=spec.float32_tolerance)


@each_dtype
def test_vjp(spec: OpSpec, dtype: mx.Dtype):
    count = len(spec.arguments)
    for shape in spec.contract_shapes:
        arrays = draw(spec, shape, dtype)
        output = spec.function(*arrays)
        poison_memory(output.nbytes)
        assert_accurate(
            vjp_of(spec.function, count),
            vjp_of(spec.reference, count),
            [*arrays, like(output)],
            factor=GRADIENT_FACTOR,
            float32_tolerance=spec.float32_tolerance,
        )


@each_dtype
def test_jvp(spec: OpSpec, dtype: mx.Dtype):
    count = len(spec.arguments)
    for shape in spec.contract_shapes:
        arrays = draw(spec, shape, dtype)
        assert_accurate(
            jvp_of(spec.function, count),
            jvp_of(spec.reference, count),
            [*arrays, *(like(x) for x in arrays)],
            factor=GRADIENT_FACTOR,
            float32_tolerance=spec.float32_tolerance,
        )


@each_dtype
def test_each_argument_alone(spec: OpSpec, dtype: mx.Dtype):
    """vjp and jvp in one argument take a different route than in all of them."""
    arrays = draw(spec, dtype=dtype)
    cotangent = like(spec.function(*arrays))
    zeros = [mx.zeros_like(x) for x in arrays]
    tolerance = OTHER_KERNEL if dtype == mx.float32 else 1e-2
    for index, array in enumerate(arrays):
        before, after = arrays[:index], arrays[index + 1 :]

        def in_one(x, before=before, after=after):
            return spec.function(*before, x, *after)

        gradient = vjp_of(spec.function, len(arrays))(*arrays, cotangent)[index]
        assert max_error(vjp_of(in_one, 1)(array, cotangent)[0], gradient) <= tolerance
        tangents = [*zeros[:index], like(array), *zeros[index + 1 :]]
        derivative = jvp_of(spec.function, len(arrays))(*arrays, *tangents)[0]
        assert max_error(jvp_of(in_one, 1)(array, tangents[index])[0], derivative) <= tolerance


def test_gradient_is_the_slope(spec: OpSpec):
    """Central differences of the op itself along random directions, in float32."""
    arrays = draw(spec)
    weights = like(spec.function(*arrays)).astype(mx.float32)
    gradients = gradients_of(scalar_of(spec.function, weights), len(arrays))(*arrays)
    step = 1e-2
    for index, gradient in enumerate(gradients):
        # As large as the argument itself, so that the step is a small one for every argument.
        size = float(np.sqrt(np.mean(to_numpy(arrays[index]) ** 2))) if arrays[index].size else 1.0
        direction = size * mx.random.normal(arrays[index].shape)

        def value(t, index=index, direction=direction):
            moved = [*arrays[:index], arrays[index] + t * direction, *arrays[index + 1 :]]
            return float((to_numpy(spec.function(*moved)) * to_numpy(weights)).sum())

        slope = (value(step) - value(-step)) / (2 * step)
        # What the sums behind each value round; it stays where the terms of `gradient` cancel.
        noise = 2.0**-23 * np.linalg.norm(to_numpy(spec.function(*arrays)) * to_numpy(weights)) / step
        expected = float((to_numpy(gradient) * to_numpy(direction)).sum())
        scale = float(
            np.linalg.norm(to_numpy(gradient)) * np.linalg.norm(to_numpy(direction)) / np.sqrt(direction.size)
        )
        assert abs(slope - expected) <= 1e-3 * max(scale, abs(expected)) + noise


def test_second_derivatives(spec: OpSpec):
    arrays = draw(spec)
    weights = like(spec.function(*arrays))

    def norm_of_gradient(function):
        first = gradients_of(lambda *xs: (function(*xs) ** 2 * weights).sum(), len(arrays))
        return gradients_of(lambda *xs: sum((g**2).sum() for g in first(*xs)), len(arrays))

    for ours, exact in zip(
        norm_of_gradient(spec.function)(*arrays), norm_of_gradient(spec.reference)(*arrays), strict=True
    ):
        assert max_error(ours, exact) <= 10 * FLOAT32_TOLERANCE


# ---- memory ----------------------------------------------------------------------------------------------------------


@each_dtype
def test_any_memory_layout(spec: OpSpec, dtype: mx.Dtype):
    # On NVIDIA GPUs, 16-bit arrays that are not aligned take other kernels.
    other_kernel = support.backend == "cuda" and dtype != mx.float32
    count = len(spec.arguments)
    for shape in spec.contract_shapes:
        arrays = draw(spec, shape, dtype)
        expected = spec.function(*arrays)
        cotangent = like(expected)
        gradients = vjp_of(spec.function, count)(*arrays, cotangent)
        mx.eval(expected, gradients)
        for index, array in enumerate(arrays):
            for _, view in layouts(array):
                moved = [*arrays[:index], view, *arrays[index + 1 :]]
                (assert_same_up_to_last_bits if other_kernel else assert_same_bits)(spec.function(*moved), expected)
                moved_gradients = vjp_of(spec.function, count)(*moved, cotangent)
                assert_same_gradients(spec, moved_gradients, gradients, other_kernel=other_kernel)


def test_inputs_are_not_changed(spec: OpSpec):
    arrays = draw(spec)
    before = [to_numpy(x).copy() for x in arrays]
    output = spec.function(*arrays)
    mx.eval(output, vjp_of(spec.function, len(arrays))(*arrays, like(output)))
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(to_numpy(array), copy)


def test_temporaries_may_be_reused(spec: OpSpec):
    """The output may reuse the memory of inputs that nobody else holds. That must not change its values."""
    arrays = draw(spec)
    expected = spec.function(*(x * 2 for x in arrays))
    mx.eval(expected)
    held = [x * 2 for x in arrays]
    mx.eval(held)
    assert_same_bits(spec.function(*held), expected)
    kept = spec.function(*(x * 2 for x in arrays))
    del held
    assert_same_bits(kept, expected)


@each_dtype
def test_same_bits_every_time(spec: OpSpec, dtype: mx.Dtype):
    arrays = draw(spec, large_shape(spec), dtype)
    cotangent = like(spec.function(*arrays))
    gradients = vjp_of(spec.function, len(arrays))
    first, of_first = spec.function(*arrays), gradients(*arrays, cotangent)
    mx.eval(first, of_first)
    assert_same_bits(first, spec.function(*arrays))
    assert_same_gradients(spec, of_first, gradients(*arrays, cotangent))


def test_special_values(spec: OpSpec):
    """NaN and infinities come out where the formula in float32 has them, and nowhere else."""
    arrays = draw(spec)
    for index in range(len(arrays)):
        for value in spec.special_values:
            changed = [mx.array(x) for x in arrays]
            changed[index] = mx.where(mx.random.bernoulli(0.2, arrays[index].shape), value, arrays[index])
            ours = to_numpy(spec.function(*changed))
            with mx.stream(mx.cpu):
                plain = to_numpy(spec.reference(*changed))
            np.testing.assert_array_equal(np.isnan(ours), np.isnan(plain))
            # Where large terms cancel, what is left has the rounding of the terms; exponentials of large ones magnify
            # it, in float32 arithmetic of any order.
            finite = np.isfinite(plain)
            largest = np.abs(plain[finite]).max(initial=1.0)
            exact = to_numpy(in_float64(spec.reference, changed)[0])
            both = finite & np.isfinite(exact)
            rounding = np.abs(plain[both] - exact[both]).max(initial=0.0)
            # Of a float32 product tensor cores keep 22 bits, and cut sums off.
            times = 8 if support.backend == "cuda" else 2
            tolerance = spec.float32_tolerance
            np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=tolerance * largest + times * rounding)


# ---- transformations -------------------------------------------------------------------------------------------------


def test_vmap(spec: OpSpec):
    batch = 3
    shape = spec.contract_shapes[-1]
    count = len(spec.arguments)
    # Every subset of the arguments; every axis too where that is not too many.
    choices = itertools.product((None, 0, -1) if count <= 3 else (None, -1), repeat=count)
    for axes in choices:
        if all(axis is None for axis in axes):
            continue
        single = draw(spec, shape)
        batched = [
            x if axis is None else mx.stack([x * (1 + 0.1 * i) for i in range(batch)], axis=axis)
            for x, axis in zip(single, axes, strict=True)
        ]

        def element(i, axes=axes, batched=batched):
            return [x if a is None else mx.take(x, i, axis=a) for x, a in zip(batched, axes, strict=True)]

        expected = [spec.function(*element(i)) for i in range(batch)]
        for out_axis in (0, -1):
            mapped = mx.vmap(spec.function, in_axes=axes, out_axes=out_axis)(*batched)
            assert max_error(mapped, mx.stack(expected, axis=out_axis)) <= OTHER_KERNEL

        weights = like(expected[0])
        gradient = gradients_of(scalar_of(spec.function, weights), len(single))
        mapped = mx.vmap(gradient, in_axes=axes)(*batched)
        for index, result in enumerate(mapped):
            by_loop = mx.stack([gradient(*element(i))[index] for i in range(batch)])
            assert max_error(result, by_loop) <= OTHER_KERNEL


@pytest.mark.parametrize("shapeless", [False, True])
def test_compile(spec: OpSpec, shapeless: bool):
    compiled = mx.compile(lambda *xs: spec.function(*(x * 2 for x in xs)) + 1, shapeless=shapeless)
    for shape in spec.contract_shapes[-2:]:
        arrays = draw(spec, shape)
        assert max_error(compiled(*arrays), spec.function(*(x * 2 for x in arrays)) + 1) <= 1e-6


@pytest.mark.parametrize("shapeless", [False, True])
def test_compile_of_gradient(spec: OpSpec, shapeless: bool):
    gradient = gradients_of(lambda *xs: (spec.function(*xs) ** 2).sum(), len(spec.arguments))
    compiled = mx.compile(gradient, shapeless=shapeless)
    for shape in spec.contract_shapes[-2:]:
        arrays = draw(spec, shape)
        for ours, plain in zip(compiled(*arrays), gradient(*arrays), strict=True):
            assert max_error(ours, plain) <= 1e-6


def test_equal_calls_are_one_node(spec: OpSpec):
    """``is_equivalent`` lets MLX's compiler merge equal calls; unequal ones stay apart."""
    arrays = draw(spec)
    twice = mx.compile(lambda *xs: spec.function(*xs) + spec.function(*xs))
    mx.eval(twice(*arrays))
    with mlx_anvil.trace() as of_one:
        mx.eval(spec.function(*arrays))
    with mlx_anvil.trace() as of_two:
        mx.eval(twice(*arrays))
    assert len(of_two.kernels) == len(of_one.kernels)


def test_checkpoint(spec: OpSpec):
    arrays = draw(spec)
    weights = like(spec.function(*arrays))
    plain = gradients_of(scalar_of(spec.function, weights), len(arrays))(*arrays)
    saved = gradients_of(scalar_of(mx.checkpoint(spec.function), weights), len(arrays))(*arrays)
    assert_same_gradients(spec, saved, plain)


# ---- streams and threads ---------------------------------------------------------------------------------------------


def test_two_streams(spec: OpSpec):
    device = mx.default_device()
    first, second = mx.new_stream(device), mx.new_stream(device)
    arrays = draw(spec)
    expected = spec.function(*arrays) * 2
    on_streams = mx.multiply(spec.function(*arrays, stream=first), 2, stream=second)
    assert_same_bits(on_streams, expected)


def test_threads(spec: OpSpec):
    if support.backend == "cuda":
        pytest.skip("MLX cannot be evaluated from several threads on CUDA (docs/cuda.md)")
    arrays = draw(spec, large_shape(spec))
    cotangent = like(spec.function(*arrays))
    expected = spec.function(*arrays), vjp_of(spec.function, len(arrays))(*arrays, cotangent)
    # `cotangent` too: where an array has not been waited for, the first reader takes its event off it, and MLX does not
    # guard that against another thread's doing the same.
    mx.eval(expected, cotangent)
    device = mx.default_device()
    results: list[tuple[mx.array, Arrays]] = []

    def work() -> None:
        with backend_scope(), mx.stream(mx.new_stream(device)):
            for _ in range(2):
                mine = spec.function(*arrays), vjp_of(spec.function, len(arrays))(*arrays, cotangent)
                mx.eval(mine)
            results.append(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 4
    for result, gradients in results:
        assert_same_bits(result, expected[0])
        assert_same_gradients(spec, gradients, expected[1])


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 1.0, [1.0, 2.0], np.ones(3, np.float32), "x"], ids=lambda b: type(b).__name__)
def test_not_an_array(spec: OpSpec, bad: object):
    arrays = draw(spec)
    for index, name in enumerate(spec.operands):
        given = [*arrays[:index], bad, *arrays[index + 1 :]]
        with pytest.raises(TypeError, match=rf"^\[{spec.name}\] {name} is .*allowed: mlx\.core\.array"):
            spec.function(*given)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_, mx.complex64, mx.float64], ids=str)
def test_unsupported_dtype(spec: OpSpec, dtype: mx.Dtype):
    with mx.stream(mx.cpu):
        arrays = draw(spec)
        for index, name in enumerate(spec.operands):
            given = [*arrays[:index], arrays[index].astype(dtype), *arrays[index + 1 :]]
            kind = str(dtype).removeprefix("mlx.core.").rstrip("_")
            with pytest.raises(
                ValueError, match=rf"^\[{spec.name}\] {name} has dtype {kind}; allowed: float32, float16, bf"
            ):
                spec.function(*given)


def test_bad_stream(spec: OpSpec):
    arrays = draw(spec)
    for bad in (3, "gpu"):
        with pytest.raises(TypeError, match=rf"^\[{spec.name}\] stream is .*allowed: None, "):
            spec.function(*arrays, stream=bad)


@pytest.mark.skipif(mx.device_count(mx.gpu) > 0, reason="this machine has a GPU that MLX can use")
def test_gpu_stream_without_a_gpu(spec: OpSpec):
    arrays = draw(spec)
    for gpu in (mx.gpu, mx.Device(mx.gpu, 0)):
        with pytest.raises(ValueError, match=rf"^\[{spec.name}\] stream is on the GPU.*allowed here: mx\.cpu"):
            spec.function(*arrays, stream=gpu)
