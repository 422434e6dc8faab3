"""Errors of quantized ops in the modes of GGUF."""

import mlx.core as mx
import pytest

import mlx_anvil

X = mx.zeros((2, 256))
W = mx.zeros((5, 144), mx.uint8)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"w": W.astype(mx.uint32)}, r"w has dtype uint32; allowed in mode 'q4_k': uint8"),
        ({"w": W[:, :143]}, r"w has shape \(5, 143\); allowed in mode 'q4_k': rows of a multiple of 144 bytes"),
        ({"w": W[0]}, r"w has shape \(144,\); allowed: rank 2 or more"),
        ({"x": X[:, :200]}, r"x has shape \(2, 200\) and w has shape \(5, 144\); allowed: x \[\.\.\., 256\]"),
        ({"x": X.astype(mx.int32)}, "x has dtype int32; allowed: float32, float16, bfloat16"),
        ({"scales": mx.zeros((5, 1))}, "scales is given; allowed in the modes of GGUF: None"),
        ({"biases": mx.zeros((5, 1))}, "biases is given"),
        ({"bits": 4}, "bits is given; allowed in the modes of GGUF: None, because the mode fixes it"),
        ({"group_size": 32}, "group_size is given"),
        ({"activation_bits": 4}, "activation_bits is 4; allowed: None, 8, 16"),
        ({"mode": "q2_k"}, "mode is 'q2_k'"),
    ],
)
def test_quantized_matmul(arguments, text):
    given = {"x": X, "w": W, "mode": "q4_k"} | arguments
    if given["mode"] == "q2_k":
        given |= {"scales": mx.zeros((5, 1))}
    with pytest.raises(ValueError, match=rf"^\[quantized_matmul\] {text}"):
        mlx_anvil.quantized_matmul(given.pop("x"), given.pop("w"), **given)


def test_transposed_shapes():
    with pytest.raises(ValueError, match=r"allowed: x \[\.\.\., 5\]"):
        mlx_anvil.quantized_matmul(X, W, mode="q4_k", transpose=False)


def test_batches_that_do_not_broadcast():
    with pytest.raises(ValueError, match="leading dimensions that broadcast"):
        mlx_anvil.quantized_matmul(mx.zeros((3, 2, 256)), mx.zeros((2, 5, 144), mx.uint8), mode="q4_k")


def test_gemv_takes_eight_rows():
    with pytest.raises(ValueError, match=r"^\[quantized_gemv\] .*9 rows for one w; allowed: at most 8"):
        mlx_anvil.quantized_gemv(mx.zeros((9, 256)), W, mode="q4_k")


def test_other_modes_need_scales():
    with pytest.raises(TypeError, match="scales"):
        mlx_anvil.quantized_matmul(X, W.view(mx.uint32))


def test_embedding():
    with pytest.raises(ValueError, match=r"^\[quantized_embedding\] w has shape \(1, 5, 144\); allowed: rank 2"):
        mlx_anvil.quantized_embedding(mx.array([0]), W[None], mode="q4_k")
    ids = mx.array([5])
    mx.eval(ids)
    with pytest.raises((ValueError, IndexError), match=r"ids"):
        mlx_anvil.quantized_embedding(ids, W, mode="q4_k")
    with pytest.raises(ValueError, match="dtype is int32"):
        mlx_anvil.quantized_embedding(mx.array([0]), W, mode="q4_k", dtype=mx.int32)


def test_swiglu():
    with pytest.raises(ValueError, match=r"gate has 0 entries"):
        mlx_anvil.quantized_swiglu(X, (), (W,), mode="q4_k")
    with pytest.raises(TypeError, match=r"gate"):
        mlx_anvil.quantized_swiglu(X, W, (W,), mode="q4_k")
    with pytest.raises(ValueError, match="equal shapes of rank 2"):
        mlx_anvil.quantized_swiglu(X, (W[:4],), (W,), mode="q4_k")


def test_head():
    with pytest.raises(ValueError, match=r"k is 6 .*allowed: 1 to 5"):
        mlx_anvil.quantized_topk(X, W, k=6, mode="q4_k")


def test_no_gradient_in_w():
    with pytest.raises(ValueError, match=r"no gradient in w, which holds integers; allowed: x"):
        mx.vjp(lambda w: mlx_anvil.quantized_matmul(X, w, mode="q4_k"), [W], [mx.zeros((2, 5))])
