"""Kernels on every GPU of a host, and arrays of one GPU on another's stream: `pytest --backend cuda` with several
GPUs."""

import mlx.core as mx
import pytest

import mlx_anvil
import support
from mlx_anvil.reference import OPS, OpSpec
from support import assert_same_bits, vjp_of


@pytest.fixture
def second() -> mx.Device:
    if support.backend != "cuda" or mx.device_count(mx.gpu) < 2:
        pytest.skip("needs --backend cuda and two GPUs")
    return mx.Device(mx.gpu, 1)


@pytest.mark.parametrize("spec", OPS.values(), ids=OPS.keys())
def test_second_device(spec: OpSpec, second: mx.Device):
    """Results and gradients have the bits of the first device. Kernels are loaded for each device."""
    shape = spec.contract_shapes[-1]
    arrays = spec.make_inputs(shape, mx.float32)
    expected = spec.function(*arrays)
    cotangent = mx.random.normal(expected.shape).astype(expected.dtype)
    mx.eval(arrays, expected, cotangent)
    with mx.stream(second), mlx_anvil.trace() as trace:
        result = spec.function(*arrays)
        gradients = vjp_of(spec.function, len(arrays))(*arrays, cotangent)
        mx.eval(result, gradients)
    assert any(event.device.startswith("cuda") for event in trace.events)
    assert_same_bits(result, expected)
    for gradient, array in zip(gradients, arrays, strict=True):
        assert gradient.shape == array.shape
        assert mx.isfinite(gradient).all().item()


def test_threadgroup_memory_that_is_asked_for(second: mx.Device):
    """More threadgroup memory than the default has to be requested for each device's copy of a kernel."""
    x = mx.random.normal((8, 1024)).astype(mx.float16)
    matrix = mx.quantize(mx.random.normal((6144, 1024)).astype(mx.float16))
    expected = mlx_anvil.quantized_gemv(x, *matrix)
    mx.eval(expected)
    with mx.stream(second), mlx_anvil.trace() as trace:
        result = mlx_anvil.quantized_gemv(x, *matrix)
        mx.eval(result)
    assert "_matrix_float16_g64_n32s4" in trace.kernels[0]
    assert_same_bits(result, expected)
