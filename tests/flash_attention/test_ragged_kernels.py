"""Ragged batches in the Metal kernels, which read the lengths themselves: no mask array is made, and nothing past a
sequence's end is read. The checked simulator runs them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import flash_attention
from support import assert_same_bits
from tests.flash_attention.cases import Case
from tests.flash_attention.test_ragged import FORMS, ragged, sequences_of

pytestmark = pytest.mark.cpu_only

GPUS = {"apple": {}, "matrix units": {"matrix_units": True}, "group products": {"group_products": True}}
PROMPTS = ((5, 40), (1, 1), (97, 170), (0, 9), (17, 0), (64, 64))
DECODES = ((1, 900), (3, 2000), (1, 1), (0, 7), (2, 0), (2, 300))
TOLERANCES = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> dict[str, Any]:
    return GPUS[request.param]


def spoiled(form: str, case: Case, lengths: tuple[tuple[int, int], ...]) -> Case:
    """The case with NaN in every row of no sequence."""

    def spoil(x: mx.array, side: str) -> mx.array:
        values = np.full(x.shape, np.nan, np.float32)
        for sequence in sequences_of(form, lengths):
            place = (sequence.batch, slice(None), getattr(sequence, side))
            values[place] = np.array(x.astype(mx.float32))[place]
        return mx.array(values).astype(x.dtype)

    q, k, v = spoil(case.q, "queries"), spoil(case.k, "keys"), spoil(case.v, "keys")
    return Case(q, k, v, case.d_out, case.options)


def results(case: Case, **more: Any) -> list[mx.array]:
    found = flash_attention(case.q, case.k, case.v, return_lse=True, **case.options, **more)
    mx.eval(found)
    return list(found)


@contextlib.contextmanager
def kernels_that_read_lengths(**gpu: Any) -> Iterator[None]:
    """Checks that no mask array is bound."""
    with mlx_anvil.simulate(checked=True, **gpu), mlx_anvil.strict(), mlx_anvil.trace() as trace:
        yield
    assert trace.events
    for event in trace.events:
        reads_rows = any(word in event.kernel for word in ("combine", "_delta_", "d_sinks"))
        assert reads_rows or "_c11t" in event.kernel, event.kernel
        assert not any(binding.startswith("bool") for binding in event.bindings)


def assert_like(found: list[mx.array], expected: list[mx.array]) -> None:
    for result, exact in zip(found, expected, strict=True):
        limit = TOLERANCES[found[0].dtype]
        assert mx.allclose(result, exact, rtol=limit, atol=limit)


@pytest.mark.slow
@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("feature", ["none", "window+causal", "softcap", "sinks"])
@pytest.mark.parametrize("lengths", [PROMPTS, DECODES], ids=["prompts", "decodes"])
@pytest.mark.parametrize("form", FORMS)
def test_nan_outside_of_sequences_stays_out(form, lengths, feature, dtype, gpu):
    case = ragged(form, dtype, feature, lengths)
    expected = results(case)
    with kernels_that_read_lengths(**gpu):
        found = results(spoiled(form, case, lengths))
    assert_like(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_with_a_mask_array(form):
    for lengths in (PROMPTS, DECODES):
        case = ragged(form, mx.float32, "additive mask", lengths)
        expected = results(case)
        with mlx_anvil.simulate(checked=True), mlx_anvil.strict():
            assert_like(results(case), expected)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lengths", [PROMPTS, DECODES], ids=["prompts", "decodes"])
@pytest.mark.parametrize("form", FORMS)
def test_codes(form, lengths, bits, gpu):
    case = ragged(form, mx.float16, "causal", lengths)
    case.k, case.v = (tuple(mx.quantize(x, group_size=64, bits=bits)) for x in (case.k, case.v))
    expected = results(case, kv_bits=bits)
    every = sequences_of(form, lengths)

    def spoil(x: mx.array) -> mx.array:
        values = np.full(x.shape, np.nan, np.float32)
        for s in every:
            values[s.batch, :, s.keys] = np.array(x.astype(mx.float32))[s.batch, :, s.keys]
        return mx.array(values).astype(x.dtype)

    case.k, case.v = ((codes, *map(spoil, factors)) for codes, *factors in (case.k, case.v))
    with kernels_that_read_lengths(**gpu):
        found = results(case, kv_bits=bits)
    assert_like(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 3, 40])
def test_many_packed_sequences(rows, gpu):
    """Blocks find their sequence among many, some of them empty, with rows of none at either end."""
    counts = np.array(mx.random.randint(0, 70, (41,)))
    counts[[0, 7, 8, 9, 40]] = 0
    counts[20:24] = 64
    ends = np.concatenate([[rows], rows + np.cumsum(counts)])
    x = mx.random.normal((1, 1, int(ends[-1]) + rows, 64)).astype(mx.float16)
    case = Case(x, x, x, x, {"cu_seqlens_q": mx.array(ends), "mask": "causal"})
    expected = results(case)
    with kernels_that_read_lengths(**gpu):
        found = results(case)
    assert_like(found, expected)


def test_wide_heads_of_a_packed_batch():
    """The kernels for many queries take them, also if there are few."""
    case = ragged("packed", mx.float32, "causal", ((2, 30), (1, 7), (3, 9)), dims=(320, 320))
    expected = results(replace_rows(case, 6))
    with mlx_anvil.simulate(checked=True), mlx_anvil.strict():
        assert_like(results(replace_rows(case, 6)), expected)


def replace_rows(case: Case, rows: int) -> Case:
    return Case(case.q[:, :, :rows], case.k, case.v, case.d_out, case.options)


def test_results_do_not_depend_on_the_gradient():
    case = ragged("padded", mx.float32, "causal", PROMPTS)
    with mlx_anvil.simulate():
        plain = flash_attention(case.q, case.k, case.v, **case.options)
        (out,), _ = mx.vjp(lambda q: [flash_attention(q, case.k, case.v, **case.options)], [case.q], [case.d_out])
        assert_same_bits(plain, out)


@pytest.mark.parametrize("used", [256, 1024])
def test_bytes_read_grow_with_the_lengths(used):
    """A cache has room for many keys, and a decode reads those in use."""
    q, k = mx.random.normal((2, 8, 1, 64)), mx.random.normal((2, 2, 4096, 64))
    with mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(flash_attention(q, k, k, lengths=mx.array([used, used // 2])))
    read = sum(use.bytes_read for launch in profiles for use in launch.buffers if use.memory == "device")
    of_keys = 2 * 2 * (used + used // 2) * 64 * 4  # keys and values of two heads
    assert of_keys <= read <= 1.06 * of_keys
