"""What several test files share: exact references, tolerances, memory layouts."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil._check import FEW, FLOOR, OUTPUT_FACTOR, luck_of_few
from mlx_anvil._check import GRADIENT_FACTOR as GRADIENT_FACTOR  # for the tests that judge gradients

FLOAT32_TOLERANCE = 1e-5
# Between results of two kernels for the same numbers, which may add them up in another order.
OTHER_KERNEL = 5e-6


Arrays = list[mx.array]

backend, check_simulation = "cpu", False  # set by conftest.py


def backend_scope(*, checked: bool | None = None) -> AbstractContextManager[None]:
    """A block in which a thread's ops run on the tested backend. Every new thread needs its own."""
    checked = check_simulation if checked is None else checked
    return mlx_anvil.simulate(checked=checked) if backend == "simulator" else nullcontext()


def isas() -> list:
    """Parameters of a test for every instruction set of this machine; it skips those that the build left out."""
    left_out = pytest.mark.skip(reason="this build has no kernels for it: MLX_ANVIL_ISAS=all pip install .")
    return [*_ext._supported_isas(), *(pytest.param(name, marks=left_out) for name in _ext._left_out_isas())]


@contextmanager
def on_isa(name: str) -> Iterator[None]:
    """A block in which CPU kernels are those of an instruction set."""
    before = _ext._current_isa()
    _ext._set_isa(name)
    try:
        yield
    finally:
        _ext._set_isa(before)


def kernel_names(trace: mlx_anvil.Trace) -> list[str]:
    """Kernels of a trace without their specialisation, which depends on alignment."""
    return [re.sub(r"(_c\d+[tf])+$", "", name) for name in trace.kernels]


def to_numpy(x: mx.array) -> np.ndarray:
    """Values as float64."""
    with mx.stream(mx.cpu):
        return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x).astype(np.float64)


def in_float64(function: Callable[..., mx.array | Arrays], arrays: Arrays) -> Arrays:
    """``function`` of the same values in float64, on the CPU."""
    with mx.stream(mx.cpu):
        result = as_list(function(*(x.astype(mx.float64) for x in arrays)))
        mx.eval(result)
        return result


def as_list(result: mx.array | Arrays | tuple[mx.array, ...]) -> Arrays:
    return [result] if isinstance(result, mx.array) else list(result)


def vjp_of(function: Callable[..., mx.array], count: int) -> Callable[..., Arrays]:
    """``(inputs..., cotangent) -> gradients`` for a function of ``count`` arrays."""
    return lambda *arrays: mx.vjp(function, list(arrays[:count]), list(arrays[count:]))[1]


def jvp_of(function: Callable[..., mx.array], count: int) -> Callable[..., Arrays]:
    """``(inputs..., tangents...) -> tangents`` for a function of ``count`` arrays."""
    return lambda *arrays: mx.jvp(function, list(arrays[:count]), list(arrays[count:]))[1]


def max_error(result: mx.array, truth: mx.array, *, scale: float | None = None) -> float:
    """Largest deviation relative to the exact result's largest magnitude (absolute if that is zero), or to
    ``scale``."""
    assert result.shape == truth.shape, (result.shape, truth.shape)
    if truth.size == 0:
        return 0.0
    exact = to_numpy(truth)
    error = np.abs(to_numpy(result) - exact)
    assert np.isfinite(error).all(), "the result has values that are not finite where the truth is"
    return float(error.max() / ((np.abs(exact).max() if scale is None else scale) or 1.0))


def normal(*shape: int, dtype: mx.Dtype = mx.float32, scale: float = 1.0) -> mx.array:
    return (scale * mx.random.normal(shape)).astype(dtype)


def alike(arrays: Arrays) -> list[Arrays]:
    """Arrays whose results have terms of the same sizes and other sums: other signs in the last array, such as a
    cotangent. None if it has infinities, such as a mask."""
    *others, last = arrays
    if not mx.isfinite(last).all():
        return []
    signs = [(2 * mx.random.bernoulli(0.5, last.shape) - 1).astype(last.dtype) for _ in range(4)]
    return [[*others, last * sign] for sign in signs]


def assert_accurate(
    function: Callable[..., mx.array | Arrays],
    reference: Callable[..., mx.array | Arrays],
    arrays: Arrays,
    *,
    factor: float = OUTPUT_FACTOR,
    float32_tolerance: float = FLOAT32_TOLERANCE,
) -> None:
    """Checks accuracy: float32 within a fixed fraction of the output's scale; 16-bit formats within ``factor`` times
    the error of the reference computed in that format (the FlashAttention criterion)."""
    results = as_list(function(*arrays))

    def composed(arrays: Arrays) -> Arrays:
        with mx.stream(mx.cpu):
            return as_list(reference(*arrays))

    samples = [(in_float64(reference, arrays), composed(arrays))]
    assert len(results) == len(samples[0][0])
    # Few sums may all be nearly zero while their terms are not, and the composed ones may be exact by chance. Such are
    # judged by the sums and the errors of more samples, and by what they come to with all arguments positive.
    positive = samples[0][0]
    if any(0 < result.size <= FEW for result in results):
        samples += [(in_float64(reference, other), composed(other)) for other in alike(arrays)]
        positive = in_float64(reference, [mx.abs(x) for x in arrays])
    for i, result in enumerate(results):
        exact, plain = (of[i] for of in samples[0])
        assert result.dtype == plain.dtype
        scale, limit, judges = None, float32_tolerance, samples[:1]
        if 0 < exact.size <= FEW:
            judges = samples
            scale = max(np.abs(to_numpy(x)).max() for x in (positive[i], *(truth[i] for truth, _ in judges)))
        if result.dtype != mx.float32:
            worst = max(max_error(of_dtype[i], truth[i], scale=scale) for truth, of_dtype in judges)
            limit = factor * worst + FLOOR + luck_of_few(result)
        error = max_error(result, exact, scale=scale)
        assert error <= limit, f"{error:.2e} is more than {limit:.2e}"


@contextmanager
def on_one_device() -> Iterator[None]:
    """Skips a test if a shapeless graph would need both a GPU and, for float64, the CPU. The op refuses that
    (docs/ops.md)."""
    try:
        yield
    except ValueError as error:
        if backend not in ("cuda", "metal") or "a graph of MLX ops on several devices" not in str(error):
            raise
        pytest.skip(str(error))


def assert_same_bits(a: mx.array, b: mx.array) -> None:
    """Equal shape, dtype and bits (NaN equal to NaN)."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    bits = mx.uint32 if a.dtype == mx.float32 else mx.uint16
    with mx.stream(mx.cpu):
        if mx.issubdtype(a.dtype, mx.integer):
            assert mx.array_equal(a, b).item()
            return
        same = mx.contiguous(a).view(bits) == mx.contiguous(b).view(bits)
        assert mx.all(same | (mx.isnan(a) & mx.isnan(b))).item()


def transposed(x: mx.array) -> mx.array:
    axes = tuple(reversed(range(x.ndim)))
    return mx.contiguous(x.transpose(axes)).transpose(axes)


def inside_larger(x: mx.array) -> mx.array:
    inner = tuple(slice(1, 1 + n) for n in x.shape)
    return mx.contiguous(mx.pad(x, [(1, 2)] * x.ndim))[inner]


def every_second(x: mx.array) -> mx.array:
    return mx.contiguous(mx.stack([x, mx.full(x.shape, math.nan).astype(x.dtype)], axis=-1))[..., 0]


def reversed_twice(x: mx.array) -> mx.array:
    return mx.contiguous(x[..., ::-1])[..., ::-1]


def off_alignment(x: mx.array) -> mx.array:
    return mx.contiguous(mx.concatenate([mx.zeros((1,), x.dtype), x.reshape(-1)]))[1:].reshape(x.shape)


def layouts(x: mx.array) -> Iterator[tuple[str, mx.array]]:
    """The same values in other memory layouts, as views of a model's tensors have them."""
    yield "contiguous", x
    yield "transposed", transposed(x)
    yield "inside a larger array", inside_larger(x)
    if x.ndim:
        yield "every second element", every_second(x)
        yield "reversed twice", reversed_twice(x)
        yield "one element off alignment", off_alignment(x)


def without_copies(function: Callable[..., Any], *arrays: mx.array) -> Any:
    """Evaluates results and checks that only their own memory is allocated."""
    mx.eval(arrays)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    results = function(*arrays)
    mx.eval(results)
    assert mx.get_peak_memory() - before <= sum(x.nbytes for x in as_list(results)) + 65536
    return results


def poison_memory(nbytes: int) -> None:
    """Leaves NaN in the memory that MLX will allocate next, so that elements that are not written become visible."""
    count = max(1, nbytes // 4)
    buffers = [mx.full((count,), math.nan, mx.float32) for _ in range(4)]
    mx.eval(buffers)
    del buffers
