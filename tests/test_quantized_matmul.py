"""What the contract does not cover of the ops on quantized matrices: every format, rows, batches, errors."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, kernel_names, max_error, poison_memory, to_numpy

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
CODED = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
FORMATS = AFFINE + CODED
ROWS = (1, 2, 3, 5, 8, 9, 33)

each_format = pytest.mark.parametrize(("mode", "bits", "group"), FORMATS, ids=lambda v: str(v))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Matrix:
    """A random quantized matrix in which all codes appear, and what it stands for in float64."""

    def __init__(self, mode, bits, group, outputs, columns, dtype=mx.float32, batch=()):
        self.options = {"mode": mode, "bits": bits, "group_size": group}
        words = mx.random.randint(0, 2**16, (2, *batch, outputs, columns * bits // 32)).astype(mx.uint32)
        self.w = words[0] * 65536 + words[1]
        if mode == "mxfp8":  # without the codes of NaN
            self.w = mx.bitwise_and(self.w, 0xFEFEFEFE)
        shape = (*batch, outputs, columns // group)
        if mode == "affine":
            scales = mx.random.normal(shape) * 0.1
            scales = mx.where(mx.random.bernoulli(0.1, shape), 0.0, scales)
            self.arrays = [self.w, scales.astype(dtype), mx.random.normal(shape).astype(dtype)]
        else:
            low, high = {"nvfp4": (0x20, 0x40), "mxfp4": (120, 130), "mxfp8": (114, 122)}[mode]
            self.arrays = [self.w, mx.random.randint(low, high, shape).astype(mx.uint8)]
        mx.eval(self.arrays)

    def dense(self) -> np.ndarray:
        """From the bits, by another way than the kernels'."""
        bits, group = self.options["bits"], self.options["group_size"]
        w = np.array(self.w)
        stream = np.unpackbits(w.view(np.uint8), axis=-1, bitorder="little")
        codes = (stream.reshape(*w.shape[:-1], -1, bits) << np.arange(bits)).sum(axis=-1, dtype=np.int64)
        if self.options["mode"] == "affine":
            scales, biases = (np.repeat(to_numpy(a), group, axis=-1) for a in self.arrays[1:])
            return codes * scales + biases
        scales = np.array(self.arrays[1]).astype(np.int64)
        values = float_values(2, 1)[codes] if bits == 4 else float_values(4, 3)[codes]
        scales = float_values(4, 3)[scales] if self.options["mode"] == "nvfp4" else 2.0 ** (scales - 127)
        return values * np.repeat(scales, group, axis=-1)


def float_values(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """All values of a small float with a sign bit; the largest e4m3 codes are not special here but for NaN."""
    count = 1 << (exponent_bits + mantissa_bits)
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if exponent_bits == 4:
        values[-1] = np.nan
    return np.concatenate([values, -values])


def tolerance(dtype: mx.Dtype) -> float:
    """Of the largest result: what the dtype's own rounding allows, and float32's sums."""
    return {mx.float32: 1e-5, mx.float16: 2.0**-11 + 1e-5, mx.bfloat16: 2.0**-8 + 1e-5}[dtype]


def check(result: mx.array, exact: np.ndarray, dtype: mx.Dtype) -> None:
    assert result.dtype == dtype
    assert result.shape == exact.shape
    error = np.abs(to_numpy(result) - exact).max() / np.abs(exact).max()
    assert error <= tolerance(dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


@each_format
@each_dtype
def test_every_format(mode, bits, group, dtype):
    for rows, (outputs, columns) in itertools.product(ROWS, ((1, 128), (37, 640), (67, 384))):
        matrix = Matrix(mode, bits, group, outputs, columns, dtype)
        dense = matrix.dense()
        x = mx.random.normal((rows, columns)).astype(dtype)
        poison_memory(rows * outputs * 4)
        ours = mlx_anvil.quantized_matmul(x, *matrix.arrays, **matrix.options)
        check(ours, to_numpy(x) @ dense.swapaxes(-1, -2), dtype)
        y = mx.random.normal((rows, outputs)).astype(dtype)
        poison_memory(rows * columns * 4)
        ours = mlx_anvil.quantized_matmul(y, *matrix.arrays, transpose=False, **matrix.options)
        check(ours, to_numpy(y) @ dense, dtype)


@each_format
def test_as_mlx(mode, bits, group):
    quantized = mx.quantize(mx.random.normal((48, 256)), group_size=group, bits=bits, mode=mode)
    options = {"group_size": group, "bits": bits, "mode": mode}
    for rows in (1, 40):
        x = mx.random.normal((rows, 256))
        with mx.stream(mx.cpu):
            plain = mx.quantized_matmul(x, *quantized, **options)
        assert max_error(mlx_anvil.quantized_matmul(x, *quantized, **options), plain) <= 1e-5


@pytest.mark.parametrize(("mode", "group"), [("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)])
def test_extreme_scales(mode, group):
    """Scales at both ends, subnormal ones among them, and the sign that those of nvfp4 have."""
    bits = 8 if mode == "mxfp8" else 4
    codes = [0, 1, 2, 240] if mode != "nvfp4" else [0, 1, 7, 8, 0x7E, 0x81, 0xFE]
    matrix = Matrix(mode, bits, group, len(codes), group)
    matrix.arrays[1] = mx.array(codes, mx.uint8)[:, None]
    x = mx.zeros((1, group))
    x[0, 3] = 2.0
    ours = to_numpy(mlx_anvil.quantized_matmul(x, *matrix.arrays, **matrix.options))
    exact = to_numpy(x) @ matrix.dense().T
    np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=1e-44)


def test_nan_codes():
    w = mx.full((1, 8), 0x38383838, mx.uint32)
    w[0, 2] = 0x387F3838
    x = mx.ones((1, 32))
    scales = mx.full((1, 1), 127, mx.uint8)
    assert np.isnan(mlx_anvil.quantized_matmul(x, w, scales, mode="mxfp8", bits=8, group_size=32).item())


@each_dtype
def test_swiglu(dtype):
    for (mode, bits, group), rows in itertools.product([("affine", 4, 64), *CODED], (1, 3, 8, 9)):
        gate, up = (Matrix(mode, bits, group, 45, 256, dtype) for _ in range(2))
        x = (mx.random.normal((rows, 256)) * 0.02).astype(dtype)
        a, b = (to_numpy(x) @ m.dense().T for m in (gate, up))
        with mlx_anvil.trace() as trace:
            ours = mlx_anvil.quantized_swiglu(x, gate.arrays, up.arrays, **gate.options)
            mx.eval(ours)
        exact = a * 0.5 * (1 + np.tanh(a / 2)) * b
        error = np.abs(to_numpy(ours) - exact).max() / np.abs(exact).max()
        assert error <= (tolerance(dtype) if rows <= 8 else 4 * tolerance(dtype))
        if not trace.fallbacks:
            assert len(trace.kernels) == (1 if rows <= 8 else 3)


# ---- rows and batches ------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize(("mode", "bits", "group"), [("affine", 4, 64), ("affine", 3, 32), ("affine", 8, 128), *CODED])
def test_rows_do_not_depend_on_each_other(mode, bits, group, dtype):
    matrix = Matrix(mode, bits, group, 75, 640, dtype)
    x = mx.random.normal((8, 640)).astype(dtype)
    alone = mx.concatenate([mlx_anvil.quantized_gemv(row[None], *matrix.arrays, **matrix.options) for row in x])
    for rows in range(1, 9):
        for order in (list(range(rows)), list(range(8 - rows, 8))[::-1]):
            together = mlx_anvil.quantized_gemv(x[mx.array(order)], *matrix.arrays, **matrix.options)
            assert_same_bits(together, alone[mx.array(order)])


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("rows", [2, 11])
def test_batches(transpose, rows):
    columns, outputs = 128, 21
    width = columns if transpose else outputs
    for x_batch, w_batch in (((3, 2), ()), ((3,), (3,)), ((3, 2), (2,)), ((), (4,)), ((2, 1), (1, 3))):
        matrix = Matrix("affine", 4, 64, outputs, columns, batch=w_batch)
        x = mx.random.normal((*x_batch, rows, width))
        right = matrix.dense().swapaxes(-1, -2) if transpose else matrix.dense()
        ours = mlx_anvil.quantized_matmul(x, *matrix.arrays, transpose=transpose, **matrix.options)
        check(ours, to_numpy(x) @ right, mx.float32)


def test_a_vector():
    matrix = Matrix("affine", 4, 64, 21, 128)
    x = mx.random.normal((128,))
    check(mlx_anvil.quantized_matmul(x, *matrix.arrays), to_numpy(x) @ matrix.dense().T, mx.float32)


@pytest.mark.parametrize(("rows", "outputs"), [(0, 5), (3, 0), (12, 0)])
def test_empty(rows, outputs):
    matrix = Matrix("affine", 4, 64, outputs, 128)
    forward = mlx_anvil.quantized_matmul(mx.ones((rows, 128)), *matrix.arrays)
    assert forward.shape == (rows, outputs)
    plain = mlx_anvil.quantized_matmul(mx.ones((rows, outputs)), *matrix.arrays, transpose=False)
    assert plain.shape == (rows, 128)
    assert not to_numpy(plain).any()


def test_mixed_dtypes():
    matrix = Matrix("affine", 4, 64, 21, 128, mx.float32)
    x = mx.random.normal((2, 128)).astype(mx.bfloat16)
    check(mlx_anvil.quantized_matmul(x, *matrix.arrays), to_numpy(x) @ matrix.dense().T, mx.float32)


# ---- transformations -------------------------------------------------------------------------------------------------


def test_vmap_over_codes():
    """MLX's own op cannot be mapped."""
    matrix = Matrix("affine", 4, 64, 21, 128, batch=(3,))
    x = mx.random.normal((3, 2, 128))
    w, scales, biases = matrix.arrays
    dense = matrix.dense()
    for axes in itertools.product((0, None), repeat=4):
        if axes == (None,) * 4:
            continue
        arrays = [a if axis == 0 else a[1] for a, axis in zip((x, w, scales, biases), axes, strict=True)]
        mapped = mx.vmap(mlx_anvil.quantized_matmul, in_axes=axes)(*arrays)
        for i in range(3):
            one = [a[i] if axis == 0 else a for a, axis in zip(arrays, axes, strict=True)]
            assert max_error(mapped[i], mlx_anvil.quantized_matmul(*one)) <= 1e-6
    mapped = mx.vmap(mlx_anvil.quantized_matmul)(x, *matrix.arrays)
    check(mapped, to_numpy(x) @ dense.swapaxes(-1, -2), mx.float32)


@pytest.mark.parametrize(("mode", "bits", "group"), CODED)
def test_gradient_of_coded_formats(mode, bits, group):
    matrix = Matrix(mode, bits, group, 21, 128)
    x, cotangent = mx.random.normal((3, 128)), mx.random.normal((3, 21))
    ours = mx.vjp(lambda x: mlx_anvil.quantized_matmul(x, *matrix.arrays, **matrix.options), [x], [cotangent])[1][0]
    check(ours, to_numpy(cotangent) @ matrix.dense(), mx.float32)


def test_gradient_takes_a_kernel():
    matrix = Matrix("affine", 4, 64, 21, 128)
    x = mx.random.normal((3, 128))
    with mlx_anvil.trace() as trace:
        mx.eval(mx.grad(lambda x: mlx_anvil.quantized_gemv(x, *matrix.arrays).sum())(x))
    if not trace.fallbacks:
        assert "quantized_matmul_plain_float32_affine4_g64" in kernel_names(trace)


# ---- bad input -------------------------------------------------------------------------------------------------------


def good_call() -> dict:
    w, scales, biases = Matrix("affine", 4, 64, 21, 128).arrays
    return {"x": mx.ones((2, 128)), "w": w, "scales": scales, "biases": biases}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, r"bits is 7; allowed in mode 'affine': 2, 3, 4, 5, 6, 8"),
        ({"group_size": 16}, r"group_size is 16; allowed in mode 'affine': 32, 64, 128"),
        ({"mode": "mxfp4", "group_size": 64}, r"group_size is 64; allowed in mode 'mxfp4': 32"),
        ({"mode": "int4"}, r"mode is 'int4'; allowed: 'affine', 'mxfp4', 'mxfp8', 'nvfp4'"),
        ({"biases": None}, r"biases is None; mode 'affine' needs an array"),
        ({"mode": "mxfp4"}, r"biases is an array; mode 'mxfp4' allows None only"),
        ({"mode": "mxfp4", "biases": None}, r"scales has dtype float32; allowed: uint8"),
        ({"w": mx.ones((21, 16), mx.int32)}, r"w has dtype int32; allowed: uint32"),
        ({"w": mx.ones((21, 17), mx.uint32)}, r"w has shape \(21, 17\) and scales has shape \(21, 2\); allowed"),
        ({"w": mx.ones((16,), mx.uint32)}, r"w has shape \(16,\); allowed: rank 2"),
        ({"biases": mx.ones((21, 1))}, r"biases has shape \(21, 1\) and scales has shape \(21, 2\); allowed"),
        ({"biases": mx.ones((21, 2), mx.int32)}, r"biases has dtype int32; allowed: float32, float16, bf"),
        ({"x": mx.ones((2, 64))}, r"x has shape \(2, 64\) and w has shape \(21, 16\); allowed: .* 128 elements"),
    ],
)
@pytest.mark.parametrize("op", ["quantized_matmul", "quantized_gemv"])
def test_bad_values(op, change, message):
    with pytest.raises(ValueError, match=rf"^\[{op}\] {message}"):
        getattr(mlx_anvil, op)(**(good_call() | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 4.5}, r"bits is a float; allowed: None, or an int"),
        ({"mode": 4}, r"mode is a int.*; allowed: 'affine'"),
        ({"transpose": 1}, r"transpose is a int.*; allowed: a bool"),
        ({"biases": 1.0}, r"biases is a float.*; allowed: mlx.core.array"),
    ],
)
def test_bad_types(change, message):
    with pytest.raises(TypeError, match=rf"^\[quantized_matmul\] {message.replace(' a ', ' an? ', 1)}"):
        mlx_anvil.quantized_matmul(**(good_call() | change))


def test_batches_that_do_not_fit():
    matrix = Matrix("affine", 4, 64, 21, 128, batch=(3,))
    with pytest.raises(ValueError, match=r"^\[quantized_matmul\] x has shape .* allowed: leading dimensions"):
        mlx_anvil.quantized_matmul(mx.ones((2, 5, 128)), *matrix.arrays)


def test_too_many_rows_for_gemv():
    call = good_call() | {"x": mx.ones((3, 3, 128))}
    with pytest.raises(ValueError, match=r"^\[quantized_gemv\] x has shape \(3, 3, 128\), 9 rows .* at most 8"):
        mlx_anvil.quantized_gemv(**call)


def test_no_gradient_in_codes():
    matrix = Matrix("mxfp4", 4, 32, 21, 128)
    x = mx.ones((2, 128))
    with pytest.raises(ValueError, match=r"^\[quantized_matmul\] no gradient in scales of mode 'mxfp4'"):
        mx.vjp(
            lambda s: mlx_anvil.quantized_matmul(x, matrix.w, s, **matrix.options),
            [matrix.arrays[1]],
            [mx.ones((2, 21))],
        )
    with pytest.raises(ValueError, match=r"^\[quantized_matmul\] no gradient in w"):
        mx.vjp(
            lambda w: mlx_anvil.quantized_matmul(x, w, matrix.arrays[1], **matrix.options),
            [matrix.w],
            [mx.ones((2, 21))],
        )


def test_swiglu_matrices_that_differ():
    x, gate, up = mx.ones((1, 128)), Matrix("affine", 4, 64, 21, 128), Matrix("affine", 4, 64, 22, 128)
    with pytest.raises(ValueError, match=r"^\[quantized_swiglu\] gate w has shape .*; allowed: equal shapes"):
        mlx_anvil.quantized_swiglu(x, gate.arrays, up.arrays)
    with pytest.raises(TypeError, match=r"^\[quantized_swiglu\] up is .*allowed: a tuple"):
        mlx_anvil.quantized_swiglu(x, gate.arrays, None)


# ---- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_quantized_linear(bias, tmp_path):
    linear = nn.Linear(128, 21, bias=bias)
    theirs = nn.QuantizedLinear.from_linear(linear, bits=4, group_size=64)
    x = mx.random.normal((3, 128))
    for ours in (mlx_anvil.nn.QuantizedLinear.from_linear(linear), mlx_anvil.nn.QuantizedLinear.from_mlx(theirs)):
        assert ours.parameters().keys() == theirs.parameters().keys()
        assert max_error(ours(x), theirs(x)) <= 1e-5
    theirs.save_weights(str(tmp_path / "weights.safetensors"))
    loaded = mlx_anvil.nn.QuantizedLinear(128, 21, bias=bias)
    loaded.load_weights(str(tmp_path / "weights.safetensors"))
    assert_same_bits(loaded(x), ours(x))


def test_quantized_swiglu_module():
    plain = mlx_anvil.nn.SwiGLU(128, 192)
    module = mlx_anvil.nn.QuantizedSwiGLU.from_swiglu(plain)
    x = mx.random.normal((3, 128))
    gate, up, down = (getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    assert max_error(module(x), down(nn.silu(gate(x)) * up(x))) <= 1e-5
