"""Bad input of the quantized ops: the call raises a ValueError or TypeError that says what was given and what is
allowed."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from quantized_numpy import FLOAT_FORMATS, FORMATS, Format, draw

AFFINE = Format("affine", 64, 4)
OPS = ("quantized_matmul", "quantized_gemv", "quantized_swiglu")

each_op = pytest.mark.parametrize("op", OPS)


def call(op: str, x: object, arrays: tuple[object, ...], **options: object) -> mx.array:
    """Calls the op on one matrix, which the SwiGLU uses twice."""
    function = getattr(mlx_anvil, op)
    if op == "quantized_swiglu":
        return function(x, arrays, arrays, **options)
    return function(x, *arrays, **options)


@pytest.fixture
def matrix(rng: np.random.Generator):
    return draw(AFFINE, (6, 128), rng)


@each_op
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "bits is 7; allowed.*2, 3, 4, 5, 6, 8"),
        ({"bits": 1}, "bits is 1; allowed.*2, 3, 4, 5, 6, 8"),
        ({"group_size": 16}, "group_size is 16; allowed.*32, 64, 128"),
        ({"group_size": -64}, "group_size is -64; allowed.*32, 64, 128"),
        ({"mode": "nf4"}, "mode is 'nf4'; allowed.*affine.*mxfp4.*mxfp8.*nvfp4"),
        ({"mode": "mxfp4", "group_size": 64}, "group_size is 64; allowed.*32"),
        ({"mode": "mxfp8", "bits": 4}, "bits is 4; allowed.*8"),
        ({"mode": "nvfp4", "group_size": 32}, "group_size is 32; allowed.*16"),
    ],
)
def test_format(op, options, message, matrix):
    with pytest.raises(ValueError, match=rf"^\[{op}\] {message}"):
        call(op, mx.zeros((1, 128)), matrix.arrays, **options)


@each_op
def test_packed_width(op, matrix):
    w, scales, biases = matrix.arrays
    for bits, group_size in ((8, 64), (3, 64), (4, 32)):
        with pytest.raises(
            ValueError, match=rf"^\[{op}\].*w has shape \(6, 16\) and.*scales has shape \(6, 2\); allowed"
        ):
            call(op, mx.zeros((1, 128)), matrix.arrays, bits=bits, group_size=group_size)
    with pytest.raises(ValueError, match=rf"^\[{op}\].*scales has shape \(5, 2\); allowed"):
        call(op, mx.zeros((1, 128)), (w, scales[:5], biases[:5]))
    with pytest.raises(ValueError, match=rf"^\[{op}\].*biases has shape \(6, 1\).*allowed: equal shapes"):
        call(op, mx.zeros((1, 128)), (w, scales, biases[:, :1]))


HEADS = ("quantized_argmax", "quantized_topk")


def fit_of(op: str, x: mx.array, arrays: tuple[mx.array, ...], **options: object) -> str:
    """The formats that the error names."""
    first = mx.array([0]) if op == "quantized_embedding" else x
    extra = {"k": 1} if op == "quantized_topk" else {}
    with pytest.raises(ValueError, match=rf"^\[{op}\] ") as caught:
        call(op, first, arrays, **extra, **options)
    return str(caught.value).partition("arrays fit ")[2].removesuffix(".")


@pytest.mark.parametrize("op", [*OPS, *HEADS, "quantized_embedding"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_arrays_of_another_format(op: str, format: Format, rng: np.random.Generator):
    """The error names the format of the arrays. An embedding has no x, which would rule out the other formats."""
    matrix, x = draw(format, (6, 384), rng), mx.zeros((1, 384))
    given = f"bits={format.bits}, group_size={format.group_size}" if format.affine else f"mode='{format.mode}'"
    for other in FORMATS:
        if other == format:
            continue
        same_width = other.bits * other.group_size == format.bits * format.group_size
        if op == "quantized_embedding" and other.affine == format.affine and same_width:
            continue  # valid arrays of either format
        arrays = (*matrix.arrays, None) if len(matrix.arrays) == 2 and op != "quantized_swiglu" else matrix.arrays
        fit = fit_of(op, x, arrays, **other.options)
        given_mode = "mode='affine', " if format.affine and not other.affine else ""
        if op == "quantized_embedding":
            assert given_mode + given in fit.split(" or ")
        else:
            assert fit == given_mode + given


@pytest.mark.parametrize("op", [*OPS, *HEADS])
def test_arrays_of_no_format(op: str, matrix):
    w, scales, biases = matrix.arrays
    assert fit_of(op, mx.zeros((1, 128)), (w[:, :7], scales, biases), bits=4) == ""
    assert fit_of(op, mx.zeros((1, 128)), (w, scales, biases[:5]), bits=8) == ""
    # x has a length that no format gives these arrays: the error names all that they have without x.
    assert fit_of(op, mx.zeros((1, 100)), matrix.arrays, bits=8) == (
        "bits=4, group_size=64 or bits=2, group_size=128 or bits=8, group_size=32"
    )


def test_arrays_of_another_format_in_gradients(matrix):
    def product(x: mx.array) -> mx.array:
        return mlx_anvil.quantized_matmul(x, *matrix.arrays, bits=8).sum()

    for transform in (mx.grad, mx.compile, mx.checkpoint):
        with pytest.raises(ValueError, match=r"^\[quantized_matmul\] .* These arrays fit bits=4, group_size=64\.$"):
            transform(product)(mx.zeros((1, 128)))
    with pytest.raises(ValueError, match=r"fit bits=4, group_size=64 or"):  # K is not known
        mlx_anvil.quantized_matmul(mx.zeros((1, 6)), *matrix.arrays, transpose=False, bits=8)


def test_width_that_scales_allow(matrix):
    with pytest.raises(ValueError, match=r"allowed with bits 8 and group_size 64: w \(6, 32\) with these scales\."):
        mlx_anvil.quantized_matmul(mx.zeros((1, 128)), *matrix.arrays, bits=8)


@each_op
def test_columns_of_x(op, matrix):
    for x in (mx.zeros((2, 127)), mx.zeros((16,)), mx.zeros(())):
        with pytest.raises(
            ValueError, match=rf"^\[{op}\] x has shape \(.*\) and .*w has shape \(6, 16\); allowed.* 128"
        ):
            call(op, x, matrix.arrays)


def test_rows_of_x_without_transpose(matrix):
    with pytest.raises(ValueError, match=r"^\[quantized_matmul\] x has shape \(2, 128\).*; allowed.* 6"):
        mlx_anvil.quantized_matmul(mx.zeros((2, 128)), *matrix.arrays, transpose=False)


@each_op
def test_biases(op, matrix, rng):
    with pytest.raises(ValueError, match=rf"^\[{op}\].*biases is None; mode 'affine' needs an array"):
        call(op, mx.zeros((1, 128)), matrix.arrays[:2])
    for format in FLOAT_FORMATS:
        other = draw(format, (6, 128), rng)
        with pytest.raises(ValueError, match=rf"^\[{op}\].*biases is an array; mode '{format.mode}' allows None"):
            call(op, mx.zeros((1, 128)), (*other.arrays, other.scales), mode=format.mode)


@each_op
def test_dtypes(op, matrix, rng):
    w, scales, biases = matrix.arrays
    for wrong in (w.astype(mx.int32), w.view(mx.uint8), w.astype(mx.float32)):
        with pytest.raises(ValueError, match=rf"^\[{op}\].*w has dtype \w+; allowed: uint32"):
            call(op, mx.zeros((1, 128)), (wrong, scales, biases))
    with pytest.raises(ValueError, match=rf"^\[{op}\].*scales has dtype uint8; allowed: float32, float16"):
        call(op, mx.zeros((1, 128)), (w, scales.astype(mx.uint8), biases))
    other = draw(FLOAT_FORMATS[0], (6, 128), rng)
    with pytest.raises(ValueError, match=rf"^\[{op}\].*scales has dtype float32; allowed: uint8"):
        call(op, mx.zeros((1, 128)), (other.w, other.scales.astype(mx.float32)), mode="mxfp4")
    with pytest.raises(ValueError, match=rf"^\[{op}\] x has dtype int32; allowed: float32, float16, bfloat16"):
        call(op, mx.zeros((1, 128), mx.int32), matrix.arrays)


def test_batches_that_do_not_fit(rng):
    matrix = draw(AFFINE, (3, 6, 128), rng)
    with pytest.raises(
        ValueError, match=r"^\[quantized_matmul\] x has shape \(2, 4, 128\) and w has shape \(3, 6, 16\)"
    ):
        mlx_anvil.quantized_matmul(mx.zeros((2, 4, 128)), *matrix.arrays)


@each_op
def test_not_an_array(op, matrix):
    for bad in (None, 1.0, "x", [1.0]):
        with pytest.raises(TypeError, match=rf"^\[{op}\] x is .*allowed: mlx\.core\.array"):
            call(op, bad, matrix.arrays)
        with pytest.raises(TypeError, match=rf"^\[{op}\] .*w is .*allowed: mlx\.core\.array"):
            call(op, mx.zeros((1, 128)), (bad, *matrix.arrays[1:]))


def test_gate_and_up_that_differ(matrix, rng):
    for shape in ((5, 128), (6, 64)):
        other = draw(AFFINE, shape, rng)
        with pytest.raises(
            ValueError, match=r"^\[quantized_swiglu\] gate w has shape .* and up w has shape .*; allowed"
        ):
            mlx_anvil.quantized_swiglu(mx.zeros((1, 128)), matrix.arrays, other.arrays)
    for bad in (matrix.arrays[:1], (*matrix.arrays, matrix.scales), matrix.w, None):
        with pytest.raises((TypeError, ValueError), match=r"^\[quantized_swiglu\] up (is|has) .*allowed"):
            mlx_anvil.quantized_swiglu(mx.zeros((1, 128)), matrix.arrays, bad)


@pytest.mark.parametrize("format", FLOAT_FORMATS, ids=str)
def test_no_gradient_in_scales_that_are_codes(format, rng):
    matrix = draw(format, (6, 128), rng)

    def product(scales):
        return mlx_anvil.quantized_matmul(mx.ones((1, 128)), matrix.w, scales, **format.options)

    with pytest.raises(ValueError, match=rf"^\[quantized_matmul\] no gradient in scales of mode '{format.mode}'"):
        mx.eval(mx.vjp(product, [matrix.scales], [mx.ones((1, 6))])[1])


def test_no_gradient_in_codes(matrix):
    def product(w):
        return mlx_anvil.quantized_matmul(mx.ones((1, 128)), w, *matrix.arrays[1:])

    with pytest.raises(ValueError, match=r"^\[quantized_matmul\] no gradient in w"):
        mx.eval(mx.vjp(product, [matrix.w], [mx.ones((1, 6))])[1])
