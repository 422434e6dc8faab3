"""Products that keep 8 or 16 bits of their input (activation_bits): their error beside llama.cpp's scheme, which
products take them, and that derivatives do not."""

import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil.reference import DTYPES
from quantized_numpy import FORMATS, Format, Matrix, draw, exact_product, normal
from support import to_numpy

pytestmark = pytest.mark.cpu_only

BLOCK = 32  # of llama.cpp's Q8_0
AFFINE4 = Format("affine", 64, 4)


def multiplies_bytes() -> bool:
    """Other instruction sets keep all bits."""
    return _ext._current_isa() in ("avx2", "avx512_bf16", "amx", "dotprod", "i8mm")


def in_blocks_of_8_bits(x: np.ndarray) -> np.ndarray:
    """What llama.cpp makes of the input of a product: 8-bit integers and a float16 scale for each 32 elements."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    codes = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0))
    return (codes * scales.astype(np.float16).astype(np.float64)).reshape(x.shape)


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def test_error_of_8_bits_is_that_of_llama_cpp(instruction_set, rng):
    for format in FORMATS:
        columns = max(format.group_size, BLOCK) * int(rng.integers(3, 12))
        matrix = draw(format, (67, columns), rng)
        x = normal((24, columns))
        exact = exact_product(x, matrix)
        theirs = root_mean_square(in_blocks_of_8_bits(to_numpy(x)) @ matrix.weights.T - exact)
        for rows in (1, 2, 8, 24):  # each of which may have a kernel of its own

            def error(bits: int | None, rows: int = rows) -> float:
                parts = [multiply(x[i : i + rows], matrix, activation_bits=bits) for i in range(0, 24, rows)]  # noqa: B023
                return root_mean_square(to_numpy(mx.concatenate(parts)) - exact)  # noqa: B023

            what = f"{format}, {rows} rows"
            assert error(8) <= 1.1 * theirs, what
            assert error(16) <= 0.01 * theirs, what
            assert error(None) <= 1e-3 * theirs, what
            if multiplies_bytes() and format.mode != "mxfp8":
                assert error(8) >= 0.3 * theirs, what  # or nothing was rounded
                assert error(16) >= 3 * error(None), what


def multiply(x: mx.array, matrix: Matrix, **options: object) -> mx.array:
    return mlx_anvil.quantized_matmul(x, *matrix.arrays, **matrix.format.options, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 16])
def test_rows_have_the_same_bits_for_each_number_of_rows(bits, dtype, rng):
    for format in (AFFINE4, Format("affine", 32, 6), Format("nvfp4", 16, 4)):
        matrix = draw(format, (35, 7 * 64), rng, dtype)
        x = normal((40, 7 * 64), dtype)
        for most in (8, 40):
            alone = [multiply(x[i : i + 1], matrix, activation_bits=bits) for i in range(8)]
            together = multiply(x[:most], matrix, activation_bits=bits)
            if most == 8:
                assert mx.array_equal(mx.concatenate(alone), together)
            else:
                assert mx.array_equal(together[3:14], multiply(x[3:14], matrix, activation_bits=bits))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bits_are_what_16_bit_dtypes_have(dtype, rng):
    matrix, x = draw(AFFINE4, (40, 256), rng, dtype), normal((3, 256), dtype)
    assert mx.array_equal(multiply(x, matrix, activation_bits=16), multiply(x, matrix))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e-30, 0.0])
def test_numbers_that_have_no_scale(value, rng):
    matrix = draw(AFFINE4, (40, 256), rng)
    for rows in (1, 4, 12):
        x = np.array(normal((rows, 256)))
        x[rows - 1, :64] = value
        x[rows - 1, 200] = value
        result = to_numpy(multiply(mx.array(x), matrix, activation_bits=8))
        all_bits = to_numpy(multiply(mx.array(x), matrix))
        np.testing.assert_array_equal(np.isfinite(result), np.isfinite(all_bits))
        for row in range(rows):
            if np.isfinite(all_bits[row]).all():
                assert np.abs(result[row] - all_bits[row]).max() <= 0.05 * np.abs(all_bits[row]).max()
            else:
                np.testing.assert_array_equal(result[row], all_bits[row])


def test_all_ops_that_take_it(rng):
    """Each rounds as the product of one row does, so that they agree with it."""
    options = {**AFFINE4.options, "activation_bits": 8}
    gate, up = (draw(AFFINE4, (96, 128), rng) for _ in range(2))
    x = normal((2, 128))
    of_gate, of_up = multiply(x, gate, activation_bits=8), multiply(x, up, activation_bits=8)
    assert mx.array_equal(mlx_anvil.quantized_gemv(x, *gate.arrays, **options), of_gate)
    hidden = mlx_anvil.quantized_swiglu(x, gate.arrays, up.arrays, **options)
    np.testing.assert_allclose(to_numpy(hidden), to_numpy(nn.silu(of_gate) * of_up), rtol=1e-5, atol=1e-6)
    assert mx.array_equal(mlx_anvil.quantized_argmax(x, *gate.arrays, **options), mx.argmax(of_gate, axis=-1))
    _, values = mlx_anvil.quantized_topk(x, *gate.arrays, k=3, **options)
    assert mx.array_equal(values[:, 0], of_gate.max(axis=-1))
    stacked = [mx.stack(pair) for pair in zip(gate.arrays, up.arrays, strict=True)]
    experts = mlx_anvil.gather_quantized_matmul(x[:, None], *stacked, rhs_indices=mx.array([0, 1]), **options)
    assert mx.array_equal(experts[0, 0], of_gate[0])
    assert mx.array_equal(experts[1, 0], of_up[1])
    down = draw(Format("affine", 32, 4), (64, 96), rng)
    sides = [[array[None] for array in matrix.arrays] for matrix in (gate, up, down)]
    ids, weights = mx.zeros((2, 1), mx.int32), mx.ones((2, 1))
    both = mlx_anvil.quantized_experts(x, ids, weights, *sides, down_group_size=32, **options)
    np.testing.assert_allclose(
        to_numpy(both), to_numpy(multiply(hidden, down, activation_bits=8)), rtol=1e-5, atol=1e-5
    )


def test_derivatives_keep_all_bits(rng):
    matrix = draw(AFFINE4, (64, 256), rng)
    x, cotangent = normal((3, 256)), normal((3, 64))
    for activation_bits in (None, 8):
        product = lambda x: multiply(x, matrix, activation_bits=activation_bits)  # noqa: B023, E731
        _, (gradient,) = mx.vjp(product, [x], [cotangent])
        np.testing.assert_allclose(to_numpy(gradient), to_numpy(cotangent) @ matrix.weights, rtol=1e-4, atol=1e-4)
        _, (tangent,) = mx.jvp(product, [x], [x])
        np.testing.assert_allclose(to_numpy(tangent), exact_product(x, matrix), rtol=1e-4, atol=1e-4)


def test_transforms_keep_the_option(rng):
    matrix, x = draw(AFFINE4, (40, 256), rng), normal((5, 2, 256))
    product = lambda x: multiply(x, matrix, activation_bits=8)  # noqa: E731
    rows = product(x.reshape(10, 256)).reshape(5, 2, 40)
    assert mx.array_equal(mx.vmap(product)(x), rows)
    assert mx.array_equal(mx.compile(product, shapeless=True)(x[0]), product(x[0]))
    assert mx.array_equal(multiply(x[0], matrix), product(x[0])) != multiplies_bytes()


@pytest.mark.parametrize("bits", [0, 4, 32, -8])
def test_errors(bits, rng):
    matrix, x = draw(AFFINE4, (40, 256), rng), normal((2, 256))
    with pytest.raises(ValueError, match=rf"^\[quantized_matmul\] activation_bits is {bits}; allowed: None, 8, 16\.$"):
        multiply(x, matrix, activation_bits=bits)
    with pytest.raises(TypeError, match=r"^\[quantized_matmul\] activation_bits is a float; allowed: None, or an int"):
        multiply(x, matrix, activation_bits=8.0)
    with pytest.raises(ValueError, match=r"^\[patch\] activation_bits is"):
        mlx_anvil.patch(nn.Linear(2, 2), activation_bits=bits)


# ---- a model ---------------------------------------------------------------------------------------------------------


def trained_llama(text: mx.array, steps: int) -> nn.Module:
    """A small Llama over bytes that has learned something of the text."""
    llama = pytest.importorskip("mlx_lm.models.llama")
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=128, num_hidden_layers=1, intermediate_size=256, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=256, tie_word_embeddings=False,
        )
    )  # fmt: skip
    mlx_anvil.patch(model)
    optimizer = optim.AdamW(2e-3)
    step = nn.value_and_grad(model, perplexity_log)
    for _ in range(steps):
        starts = np.random.default_rng().integers(0, text.size - 65, 8)
        batch = mx.stack([text[s : s + 65] for s in starts.tolist()])
        _, gradients = step(model, batch)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
    mlx_anvil.unpatch(model)
    return model


def perplexity_log(model: nn.Module, batch: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="mean")


def test_perplexity_of_a_trained_model():
    """8 bits change its perplexity by less than 0.2 %."""
    text = mx.array(list((mlx_anvil.__doc__ or "").encode() + mlx_anvil.nn.__doc__.encode() + source().encode()))
    model = trained_llama(text, steps=100)
    batch = mx.stack([text[s : s + 65] for s in range(0, 24 * 65, 65)])
    full = perplexity_log(model, batch).item()
    assert full < 3  # from log(256) = 5.5
    nn.quantize(model, group_size=64, bits=4)
    losses = {}
    for bits in (None, 16, 8):
        mlx_anvil.patch(model, activation_bits=bits)
        losses[bits] = perplexity_log(model, batch).item()
    assert abs(losses[8] - losses[None]) < 0.002
    assert abs(losses[16] - losses[None]) < 1e-4
    assert losses[8] != losses[None] or not multiplies_bytes()


def source() -> str:
    import inspect

    return inspect.getsource(mlx_anvil.nn)


def test_layers_take_it(rng):
    linear = nn.Linear(256, 64)
    ours = mlx_anvil.nn.QuantizedLinear.from_mlx(linear.to_quantized(64, 4))
    x = normal((2, 256))
    before = ours(x)
    ours.activation_bits = 8
    matrix = ours["weight"], ours["scales"], ours["biases"]
    rounded = mlx_anvil.quantized_matmul(x, *matrix, activation_bits=8) + ours["bias"]
    assert mx.array_equal(ours(x), rounded)
    assert mx.array_equal(before, rounded) != multiplies_bytes()
    assert "activation_bits" not in dict(tree_flatten(ours.parameters()))
    theirs = nn.QuantizedLinear.from_linear(linear, 64, 4)
    theirs.update(tree_unflatten(tree_flatten(ours.parameters())))
    mlx_anvil.patch(theirs, activation_bits=8)
    assert mx.array_equal(theirs(x), rounded)
    mlx_anvil.patch(theirs)
    assert mx.array_equal(theirs(x), before)
