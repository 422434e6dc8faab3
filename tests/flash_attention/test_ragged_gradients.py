"""Gradients of ragged batches in the Metal kernels, which read the lengths as the forward's do."""

import contextlib
import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _ext, flash_attention
from support import assert_same_bits
from tests.flash_attention.cases import Case, gradients_of
from tests.flash_attention.test_ragged import FORMS, ragged, sequences_of
from tests.flash_attention.test_ragged_kernels import (
    GPUS,
    PROMPTS,
    TOLERANCES,
    kernels_that_read_lengths,
    spoiled,
)

pytestmark = pytest.mark.cpu_only

FEATURES = ("none", "causal", "window", "window+causal", "softcap", "sinks", "additive mask")


def with_spoiled_padding(form: str, case: Case, lengths: tuple[tuple[int, int], ...]) -> Case:
    """The case with NaN in every row of no sequence, in the cotangents too."""
    d_out = np.full(case.d_out.shape, np.nan, np.float32)
    for sequence in sequences_of(form, lengths):
        place = (sequence.batch, slice(None), sequence.queries)
        d_out[place] = np.array(case.d_out.astype(mx.float32))[place]
    other = spoiled(form, case, lengths)
    other.d_out = mx.array(d_out).astype(case.d_out.dtype)
    return other


def assert_gradients_like(case: Case, found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    for name, result in found.items():
        limit = 4 * TOLERANCES[case.q.dtype]
        scale = max(1.0, mx.abs(expected[name]).max().item())
        assert mx.allclose(result, expected[name], rtol=limit, atol=limit * scale), name


def assert_padding_stays_out(gpu: str, form: str, case: Case) -> None:
    _, expected = gradients_of(case)
    with kernels_that_read_lengths(**GPUS[gpu]):
        _, found = gradients_of(with_spoiled_padding(form, case, PROMPTS))
        mx.eval(found)
    assert_gradients_like(case, found, expected)


@pytest.mark.slow
@pytest.mark.alike("dtype")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpu", GPUS)
def test_nan_outside_of_sequences_stays_out(gpu, form, feature, dtype):
    assert_padding_stays_out(gpu, form, ragged(form, dtype, feature, PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpu", GPUS)
def test_nan_of_a_causal_batch_stays_out(gpu, form):
    """The quick run's share of the test above: gradients of the mask too, whose padding is zeros."""
    for feature in ("causal", "additive mask"):
        assert_padding_stays_out(gpu, form, ragged(form, mx.float16, feature, PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(32, 32), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_head_dim(gpu, form, dims):
    assert_padding_stays_out(gpu, form, ragged(form, mx.float16, "causal", PROMPTS, dims=dims))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", ["causal", "window"])
def test_chunks_give_the_same_bits(feature, form):
    """Stored weights for few queries at a time, and for all: sums go on from one chunk to the next."""
    lengths = ((5, 40), (150, 200), (1, 1), (70, 70), (0, 9))
    case = ragged(form, mx.float16, feature, lengths, heads=(2, 2))
    _, expected = gradients_of(case)
    results = []
    try:
        for choices in ({"flash_attention.stored_kb": 1}, {"flash_attention.stored_kb": 40}, {}):
            _ext._force_choices(choices)
            with kernels_that_read_lengths():
                _, found = gradients_of(with_spoiled_padding(form, case, lengths))
                mx.eval(found)
            results.append(found)
    finally:
        _ext._force_choices({})
    assert_gradients_like(case, results[0], expected)
    for name, gradient in results[0].items():
        for other in results[1:]:
            assert_same_bits(gradient, other[name])


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "count", "longest"), [(0, 29, 70), (3, 29, 70), (70, 80, 30), (3, 1100, 2)])
@pytest.mark.parametrize("gpu", GPUS)
def test_many_packed_sequences(gpu, rows, count, longest):
    """Blocks of queries and of keys find their sequence among many, with rows of none at either end. The lanes of a
    block look at 32 sequences at once, so these take one round or several."""
    counts = np.array(mx.random.randint(0, longest + 1, (2, count)))
    counts[:, [0, 7, 8, count - 1]] = 0
    counts[0, 11:13], counts[1, 14:16] = 0, 0
    counts[:, 20:24] = 64
    queries, keys = ([rows, *(rows + np.cumsum(side)).tolist()] for side in counts)
    q, d_out = (mx.random.normal((1, 2, queries[-1] + rows, 64)).astype(mx.float16) for _ in range(2))
    k, v = (mx.random.normal((1, 1, keys[-1] + rows, 64)).astype(mx.float16) for _ in range(2))
    options = {"cu_seqlens_q": mx.array(queries), "cu_seqlens_k": mx.array(keys), "mask": "causal"}
    case = Case(q, k, v, d_out, options)
    _, expected = gradients_of(case)
    with kernels_that_read_lengths(**GPUS[gpu]):
        _, found = gradients_of(case)
        mx.eval(found)
    assert_gradients_like(case, found, expected)


@pytest.mark.parametrize("spoiler", [math.inf, math.nan])
@pytest.mark.parametrize("feature", ["causal", "window", "softcap"])
@pytest.mark.parametrize("gpu", [None, *GPUS])
def test_sequences_with_their_own_keys(gpu, feature, spoiler):
    """Every query of such a sequence sees a key, so the cotangents are not cleared: kernels skip rows of no sequence."""
    ends, total = [5, 42, 42, 140], 150
    q, d_out = (mx.random.normal((1, 4, total, 32)).astype(mx.float16) for _ in range(2))
    k, v = (mx.random.normal((1, 2, total, 32)).astype(mx.float16) for _ in range(2))
    options = {"causal": {"mask": "causal"}, "window": {"window_size": 9}, "softcap": {"softcap": 2.0}}[feature]
    case = Case(q, k, v, d_out, {"cu_seqlens_q": mx.array(ends), **options})
    _, expected = gradients_of(case)
    place = mx.arange(total)[:, None]
    outside = (place < ends[0]) | (place >= ends[-1])
    spoiled_case = Case(*(mx.where(outside, spoiler, x) for x in (q, k, v, d_out)), case.options)
    with contextlib.nullcontext() if gpu is None else kernels_that_read_lengths(**GPUS[gpu]):
        _, found = gradients_of(spoiled_case)
        mx.eval(found)
    assert_gradients_like(case, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpu", GPUS)
def test_gradient_of_the_log_sum_exp(gpu, form):
    case = ragged(form, mx.float32, "sinks", PROMPTS)
    arrays = [case.q, case.k, case.v, case.options["sinks"]]
    fixed = {name: x for name, x in case.options.items() if name != "sinks"}

    def gradients() -> list[mx.array]:
        def loss(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> mx.array:
            out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True, **fixed)
            return (out * case.d_out).sum() + lse.square().sum()

        found = mx.grad(loss, argnums=range(4))(*arrays)
        mx.eval(found)
        return found

    expected = gradients()
    with kernels_that_read_lengths(**GPUS[gpu]):
        found = gradients()
    assert_gradients_like(case, dict(enumerate(found)), dict(enumerate(expected)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpu", GPUS)
def test_work_grows_with_the_lengths(gpu, form):
    """The products and the bytes of an array's padding are not there. A mask array has both."""

    def profile(used: int, room: int) -> tuple[int, int]:
        lengths = ((used, used), (used // 2, used // 2))
        case = ragged(form, mx.float16, "causal", lengths)
        more = ((room, room),) if form == "packed" else ((room, room), (room, room))
        larger = ragged(form, mx.float16, "causal", more)
        larger.options = case.options
        if form == "left-padded":
            larger.options = case.options | {"starts": larger.k.shape[2] - mx.array([used, used // 2])}
        with mlx_anvil.simulate(profiled=True, **GPUS[gpu]) as profiles:
            _, gradients = gradients_of(larger)
            mx.eval(gradients)
        own = [launch for launch in profiles if "_backward_" in launch.kernel]
        read = sum(use.bytes_read for launch in own for use in launch.buffers if use.memory == "device")
        return sum(launch.matrix_multiplies for launch in own), read

    (few, few_read), (many, many_read) = profile(128, 192), profile(128, 704)
    assert many == few
    assert few_read <= many_read <= 1.05 * few_read
