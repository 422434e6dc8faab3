"""nn.RoPE and nn.QuantizedEmbedding against MLX's modules."""

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_anvil
from support import assert_same_bits, max_error


@pytest.mark.parametrize("traditional", [False, True])
def test_rope(traditional):
    options = {"traditional": traditional, "base": 500.0, "scale": 0.5}
    ours, theirs = mlx_anvil.nn.RoPE(8, **options), nn.RoPE(8, **options)
    x = mx.random.normal((2, 3, 5, 12))
    for offset in (0, 7, mx.array([1, 9])):
        with mx.stream(mx.cpu):
            expected = theirs(x, offset=offset)
        assert max_error(ours(x, offset=offset), expected) <= 2e-6
    assert ours.parameters() == {}


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_quantized_embedding(mode, tmp_path):
    plain = nn.Embedding(11, 128)
    theirs = nn.QuantizedEmbedding.from_embedding(plain, mode=mode)
    ids, x = mx.array([[3, 10], [0, -1]]), mx.random.normal((2, 128))
    layer = mlx_anvil.nn.QuantizedEmbedding
    for ours in (layer.from_embedding(plain, mode=mode), layer.from_mlx(theirs)):
        assert ours.parameters().keys() == theirs.parameters().keys()
        with mx.stream(mx.cpu):
            assert max_error(ours(ids), theirs(ids)) <= (1e-6 if mode == "affine" else 0)
            assert max_error(ours.as_linear(x), theirs.as_linear(x)) <= 1e-5
        assert ours(ids).dtype == theirs(ids).dtype
    theirs.save_weights(str(tmp_path / "weights.safetensors"))
    loaded = layer(11, 128, mode=mode)
    loaded.load_weights(str(tmp_path / "weights.safetensors"))
    assert_same_bits(loaded(ids), ours(ids))
