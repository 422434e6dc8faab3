"""Weights of a GGUF file, which `mx.load` maps to affine formats in groups of 32: Q4_0 and Q4_1 to 4 bits, Q8_0 to 8
bits."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from quantized_numpy import assert_rounded, dense_factor
from support import to_numpy

gguf = pytest.importorskip("gguf")

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
SHAPE = (37, 96)


@pytest.fixture
def blocks(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights in the blocks of each type."""
    types = gguf.GGMLQuantizationType
    weights = rng.standard_normal(SHAPE).astype(np.float32)
    return {name: gguf.quants.quantize(weights, types[name]) for name in BITS}


@pytest.fixture
def loaded(blocks: dict[str, np.ndarray], tmp_path: Path) -> dict[str, mx.array]:
    """The arrays that `mx.load` reads from a file with these blocks."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, data in blocks.items():
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with mx.stream(mx.cpu):
        arrays = mx.load(str(path))
        mx.eval(arrays)
    return arrays


def arrays_of(loaded: dict[str, mx.array], name: str) -> list[mx.array]:
    return [loaded[f"{name}.{part}"] for part in ("weight", "scales", "biases")]


def exact_weights(name: str, blocks: np.ndarray, scales: mx.array, biases: mx.array) -> np.ndarray:
    """The file's weights as the gguf package reads them. It computes `scale * (code - 8)`, where MLX stores `-8 *
    scale` as a bias rounded to float16. That rounding is applied here too, since it is not an error of the product."""
    types = gguf.GGMLQuantizationType
    plain = gguf.quants.dequantize(blocks, types[name]).astype(np.float64)
    ideal = {"Q4_0": -8, "Q8_0": -128}
    if name in ideal:
        plain += np.repeat(to_numpy(biases) - ideal[name] * to_numpy(scales), 32, axis=-1)
    return plain


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("name", BITS)
def test_product(name, dtype, loaded, blocks):
    arrays = arrays_of(loaded, name)
    weights = exact_weights(name, blocks[name], *arrays[1:])
    for rows in (1, 5, 8, 40):
        x = mx.random.normal((rows, SHAPE[1])).astype(dtype)
        result = mlx_anvil.quantized_matmul(x, *arrays, group_size=32, bits=BITS[name])
        assert_rounded(result, to_numpy(x) @ weights.T, dtype, factor=dense_factor(rows))


def test_swiglu(loaded, blocks):
    gate, up = arrays_of(loaded, "Q4_0"), arrays_of(loaded, "Q4_1")
    x = mx.random.normal((3, SHAPE[1])) * 0.1
    result = mlx_anvil.quantized_swiglu(x, tuple(gate), tuple(up), group_size=32, bits=4)
    g, u = (
        to_numpy(x) @ exact_weights(name, blocks[name], *arrays[1:]).T
        for name, arrays in (("Q4_0", gate), ("Q4_1", up))
    )
    assert_rounded(result, g / (1 + np.exp(-g)) * u, mx.float32)


def test_gradient_in_x(loaded, blocks):
    arrays = arrays_of(loaded, "Q8_0")
    x, dy = mx.random.normal((3, SHAPE[1])), mx.random.normal((3, SHAPE[0]))
    (gradient,) = mx.vjp(lambda x: mlx_anvil.quantized_matmul(x, *arrays, group_size=32, bits=8), [x], [dy])[1]
    assert_rounded(gradient, to_numpy(dy) @ exact_weights("Q8_0", blocks["Q8_0"], *arrays[1:]), mx.float32)
