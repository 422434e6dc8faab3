"""Prompts over quantized keys and values on GPUs that multiply for four SIMD groups at once. The checked simulator runs
their kernels, whose products complete there when they start. Ragged batches: test_ragged_kernels.py."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from support import assert_same_bits
from tests.flash_attention.cases import draw
from tests.flash_attention.quantized_cases import QuantizedCase, form_of, quantized

pytestmark = [pytest.mark.slow, pytest.mark.alike("dtype"), pytest.mark.usefixtures("group_products")]

each_dtype = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
GROUP = "flash_attention_quantized_forward_matrix_group_"


def check(case: QuantizedCase, *, by_group: bool = True) -> None:
    with mlx_anvil.trace() as trace:
        results = case.attend()
    assert [kernel.startswith(GROUP) for kernel in trace.kernels] == [by_group], trace.kernels
    case.assert_right(*results)


@each_dtype
@pytest.mark.parametrize("bits", list(product((4, 8), (4, 8))), ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128)], ids=str)
def test_formats(dim: int, group: int, bits: tuple[int, int], dtype: mx.Dtype):
    case = draw((4, 2), (133, 150), (dim, dim), dtype, "causal")
    check(quantized(case, form_of(bits[0], group), v_bits=bits[1]))


@each_dtype
@pytest.mark.parametrize("dims", [(32, 64), (96, 128), (128, 32), (96, 96), (128, 96)], ids=str)
def test_head_dims(dims: tuple[int, int], dtype: mx.Dtype):
    """Heads that do not fill a tile: the rest of its columns is zero."""
    for bits in (4, 8):
        check(quantized(draw((2, 1), (70, 130), dims, dtype), form_of(bits, 32)))


@each_dtype
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("feature", ["none", "window", "window+causal", "softcap", "sinks"])
def test_features(feature: str, dim: int, dtype: mx.Dtype):
    check(quantized(draw((4, 2), (150, 210), (dim, dim), dtype, feature, batch=2)))


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 128, 129])
def test_tiles_of_keys(keys: int):
    """One tile, whole tiles, and one key more."""
    check(quantized(draw((2, 1), (70, keys), (64, 64), mx.float16), form_of(8)))


def test_a_part_of_a_cache():
    """mlx-lm's caches have room for more keys than are in use; rows of other heads follow."""
    case = quantized(draw((2, 2), (80, 256), (128, 128), mx.bfloat16))
    rows = slice(7, 157)
    case.k, case.v = (tuple(part[:, :, rows] for part in x) for x in (case.k, case.v))
    case.plain.k, case.plain.v = (x[:, :, rows] for x in (case.plain.k, case.plain.v))
    check(case)


def test_an_infinite_scale_is_seen():
    """What is not finite spoils the row of every query, and no other head."""
    case = quantized(draw((2, 2), (70, 100), (64, 64), mx.float16))
    codes, scales, biases = case.k
    spoiled = (codes, mx.concatenate([scales[:, :1] * float("inf"), scales[:, 1:]], axis=1), biases)
    out, _ = case.attend(spoiled)
    expected, _ = case.attend()
    assert mx.isnan(out[:, 0]).all()
    assert_same_bits(out[:, 1], expected[:, 1])


@pytest.mark.cpu_only
def test_the_order_of_threads_does_not_matter():
    case = quantized(draw((2, 1), (140, 210), (128, 128), mx.bfloat16, "causal"))
    results = []
    for seed in (0, 1, 2):
        with mlx_anvil.simulate(checked=True, group_products=True, seed=seed):
            results.append(np.array(case.attend()[0].view(mx.uint16)))
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


def test_other_calls_take_other_kernels():
    """Few queries, other codes, float32, and mask arrays."""
    check(quantized(draw((1, 1), (64, 70), (64, 64), mx.float16)), by_group=False)
    for form in (form_of(5), form_of(2), {"mode": "mxfp8", "bits": 8, "group_size": 32}):
        check(quantized(draw((1, 1), (70, 70), (64, 64), mx.float16), form), by_group=False)
    check(quantized(draw((1, 1), (70, 70), (64, 64), mx.float32)), by_group=False)
    check(quantized(draw((1, 1), (70, 70), (64, 64), mx.float16, "bool mask")), by_group=False)
