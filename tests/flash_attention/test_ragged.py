"""Ragged batches: padded to one length, or packed one after the other. Each sequence must have the results that it has
in a call of its own, and padding must have none."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import flash_attention
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import flash_attention as definition
from support import GRADIENT_FACTOR, assert_same_bits, to_numpy
from tests.flash_attention.cases import (
    FEATURES,
    OUTPUT_FACTOR,
    Case,
    assert_close,
    assert_gradients_close,
    draw,
    gradients_of,
)
from tests.flash_attention.formulas import ROUNDING

FORMS = ("padded", "left-padded", "packed")
LENGTHS = ((5, 40), (1, 1), (33, 70), (0, 9), (17, 0))  # queries and keys; some sequences lack either


@dataclass
class Sequence:
    """Where a sequence is in the arrays of its batch."""

    batch: int
    queries: slice
    keys: slice

    def rows(self, x: mx.array) -> mx.array:
        """Its rows of q, or of what has the shape of the output."""
        return x[self.batch : self.batch + 1, :, self.queries]

    def columns(self, x: mx.array) -> mx.array:
        """Its rows of k or v."""
        return x[self.batch : self.batch + 1, :, self.keys]

    def mask(self, mask: mx.array, batch: int) -> mx.array:
        full = mx.broadcast_to(mask, (batch, *mask.shape[-3:]))
        return full[self.batch : self.batch + 1, :, self.queries, self.keys]


def sequences_of(form: str, lengths: tuple[tuple[int, int], ...]) -> list[Sequence]:
    if form == "padded":
        return [Sequence(b, slice(0, q), slice(0, k)) for b, (q, k) in enumerate(lengths)]
    if form == "left-padded":
        end = _longest(lengths)
        return [Sequence(b, slice(0, q), slice(end - k, end)) for b, (q, k) in enumerate(lengths)]
    ends = [np.concatenate([[0], np.cumsum(side)]).tolist() for side in zip(*lengths, strict=True)]
    places = zip(*(itertools.pairwise(side) for side in ends), strict=True)
    return [Sequence(0, slice(*queries), slice(*keys)) for queries, keys in places]


def _longest(lengths: tuple[tuple[int, int], ...]) -> int:
    """The length of the keys of a batch in which no sequence is as long."""
    return max(keys for _, keys in lengths) + 2


def ragged(form: str, dtype: mx.Dtype, feature: str, lengths=LENGTHS, heads=(4, 2), dims=(64, 64)) -> Case:
    """A batch whose arrays are a few rows longer than its sequences."""
    queries, keys = zip(*lengths, strict=True)
    if form != "packed":
        case = draw(heads, (max(queries) + 3, _longest(lengths)), dims, dtype, feature, batch=len(lengths))
        of_keys = {"lengths": mx.array(keys)} if form == "padded" else {"starts": _longest(lengths) - mx.array(keys)}
        case.options |= of_keys | {"q_lengths": mx.array(queries)}
    else:
        case = draw(heads, (sum(queries) + 3, sum(keys) + 2), dims, dtype, feature)
        for name, side in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
            case.options[name] = mx.array([0, *np.cumsum(side).tolist()])
    return case


def alone(case: Case, sequence: Sequence) -> Case:
    """The call of one sequence."""
    ragged_options = ("lengths", "q_lengths", "starts", "cu_seqlens_q", "cu_seqlens_k")
    options = {name: value for name, value in case.options.items() if name not in ragged_options}
    if isinstance(options.get("mask"), mx.array):
        options["mask"] = sequence.mask(options["mask"], case.q.shape[0])
    q, d_out = (sequence.rows(x) for x in (case.q, case.d_out))
    return replace(case, q=q, k=sequence.columns(case.k), v=sequence.columns(case.v), d_out=d_out, options=options)


def without(x: mx.array, places: list[tuple[slice, ...]]) -> np.ndarray:
    values = to_numpy(x).copy()
    for place in places:
        values[place] = 0
    return values


def check(form: str, case: Case, lengths=LENGTHS) -> None:
    sequences = sequences_of(form, lengths)
    out, gradients = gradients_of(case)
    _, lse = flash_attention(case.q, case.k, case.v, **case.options, return_lse=True)
    rounding = ROUNDING.get(case.q.dtype)
    sinks = np.zeros(case.q.shape[1])
    terms, composed_sinks = np.zeros_like(sinks), np.zeros_like(sinks)
    for sequence in sequences:
        own = alone(case, sequence)
        if own.q.size == 0 or own.k.size == 0:
            continue
        exact, composed = own.reference(), own.reference(round_to=rounding) if rounding else None
        assert_close("out", sequence.rows(out), exact.out, composed and composed.out, OUTPUT_FACTOR)
        np.testing.assert_allclose(to_numpy(sequence.rows(lse[..., None]))[..., 0], exact.lse, rtol=1e-4, atol=2e-2)
        found = {"q": sequence.rows(gradients["q"])} | {n: sequence.columns(gradients[n]) for n in ("k", "v")}
        if "mask" in gradients:
            found["mask"] = sequence.mask(gradients["mask"], case.q.shape[0])
        if "sinks" in gradients:
            sinks += exact.gradients["sinks"]
            terms += exact.terms["sinks"]
            composed_sinks += composed.gradients["sinks"] if composed else 0
        assert_gradients_close(found, exact, composed, own.k.shape[2])
    if "sinks" in gradients:
        rounded = composed_sinks if rounding else None
        assert_close("sinks", gradients["sinks"], sinks, rounded, GRADIENT_FACTOR, terms=terms)
    every = slice(None)
    rows = [(s.batch, every, s.queries) for s in sequences if s.keys.start != s.keys.stop]
    columns = [(s.batch, every, s.keys) for s in sequences if s.queries.start != s.queries.stop]
    assert not without(out, rows).any()
    assert not without(gradients["q"], rows).any()
    assert not without(gradients["k"], columns).any()
    assert not without(gradients["v"], columns).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("form", FORMS)
def test_against_the_formula(form: str, feature: str, dtype: mx.Dtype):
    with mlx_anvil.strict():
        check(form, ragged(form, dtype, feature))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(4, 4), (3, 1)], ids=str)
def test_other_heads(heads: tuple[int, int], form: str):
    lengths = ((129, 200), (3, 3), (40, 260))
    check(form, ragged(form, mx.float32, "causal", lengths, heads, dims=(80, 48)), lengths)


@pytest.mark.cpu_only
@pytest.mark.parametrize("feature", ["causal", "window", "sinks", "additive mask"])
@pytest.mark.parametrize("lengths", [LENGTHS, ((1, 900), (1, 3000), (1, 1))], ids=["prompts", "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_call_of_its_own(form: str, lengths: tuple[tuple[int, int], ...], feature: str):
    case = ragged(form, mx.bfloat16, feature, lengths)
    out, gradients = gradients_of(case)
    for sequence in sequences_of(form, lengths):
        own = alone(case, sequence)
        own_out, own_gradients = gradients_of(own)
        assert_same_bits(sequence.rows(out), own_out)
        assert_same_bits(sequence.rows(gradients["q"]), own_gradients["q"])
        for name in ("k", "v"):
            assert_same_bits(sequence.columns(gradients[name]), own_gradients[name])


@pytest.mark.parametrize("form", FORMS)
def test_quantized_keys_and_values(form: str):
    lengths = ((1, 170), (1, 33), (1, 1), (1, 0))
    case = ragged(form, mx.float32, "causal", lengths)
    k, v = (tuple(mx.quantize(x, group_size=32, bits=4)) for x in (case.k, case.v))
    formats = {"kv_group_size": 32, "kv_bits": 4}
    with mlx_anvil.strict():
        out = flash_attention(case.q, k, v, **case.options, **formats)
    for sequence in sequences_of(form, lengths):
        own = alone(case, sequence)
        parts = [tuple(sequence.columns(part) for part in x) for x in (k, v)]
        expected = flash_attention(own.q, *parts, **own.options, **formats)
        if support.backend == "cpu":
            assert_same_bits(sequence.rows(out), expected)
        else:
            assert mx.allclose(sequence.rows(out), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_over_quantized_keys_and_values(form: str):
    lengths = ((3, 40), (5, 7))
    case = ragged(form, mx.float32, "causal", lengths)
    k, v = (mx.quantize(x, group_size=32, bits=4) for x in (case.k, case.v))

    def gradients(call: Case, parts: list[list[mx.array]]) -> list[mx.array]:
        def loss(q: mx.array, *numbers: mx.array) -> mx.array:
            own = [(parts[i][0], *numbers[2 * i : 2 * i + 2]) for i in range(2)]
            out = flash_attention(q, *own, **call.options, kv_group_size=32, kv_bits=4)
            return (out * call.d_out).sum()

        return mx.grad(loss, argnums=tuple(range(5)))(call.q, *parts[0][1:], *parts[1][1:])

    results = gradients(case, [k, v])
    for sequence in sequences_of(form, lengths):
        own = alone(case, sequence)
        expected = gradients(own, [[sequence.columns(part) for part in x] for x in (k, v)])
        found = [sequence.rows(results[0]), *(sequence.columns(x) for x in results[1:])]
        for result, exact in zip(found, expected, strict=True):
            assert mx.allclose(result, exact, rtol=1e-4, atol=1e-4)


# ---- transformations -------------------------------------------------------------------------------------------------


def names_of(form: str) -> tuple[str, str]:
    names = {"padded": ("lengths", "q_lengths"), "left-padded": ("starts", "q_lengths")}
    return names.get(form, ("cu_seqlens_k", "cu_seqlens_q"))


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, None)], ids=str)
@pytest.mark.parametrize("maps_lengths", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_vmap(form: str, maps_lengths: bool, in_axes: tuple[int | None, ...]):
    names, count = names_of(form), 3
    case = ragged(form, mx.float32, "causal", ((3, 9), (0, 4), (7, 2)))
    stacked = [
        x if axis is None else mx.stack([x, x + 1, x * 2], axis)
        for x, axis in zip(case_arrays(case), in_axes, strict=True)
    ]
    # Other lengths for each element: shorter ones.
    lengths = [mx.stack([mx.maximum(case.options[n] - i, 0) for i in range(count)]) for n in names]
    axes = [0 if maps_lengths else None] * 2
    given = lengths if maps_lengths else [case.options[n] for n in names]

    def call(q: mx.array, k: mx.array, v: mx.array, *sizes: mx.array) -> list[mx.array]:
        options = dict(zip(names, sizes, strict=True))

        def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return flash_attention(q, k, v, mask="causal", **options).square().sum()

        return [flash_attention(q, k, v, mask="causal", **options), *mx.grad(loss, argnums=(0, 1, 2))(q, k, v)]

    results = mx.vmap(call, in_axes=(*in_axes, *axes))(*stacked, *given)
    for i in range(count):
        own = [x if axis is None else mx.take(x, i, axis) for x, axis in zip(stacked, in_axes, strict=True)]
        sizes = [x[i] if maps_lengths else x for x in given]
        for result, expected in zip(results, call(*own, *sizes), strict=True):
            assert mx.allclose(result[i], expected, rtol=1e-4, atol=1e-5)


def case_arrays(case: Case) -> tuple[mx.array, mx.array, mx.array]:
    return case.q, case.k, case.v


@pytest.mark.parametrize("form", FORMS)
def test_forward_mode_and_second_derivatives(form: str):
    case = ragged(form, mx.float32, "causal", ((3, 9), (0, 4), (7, 2)))
    tangents = [mx.random.normal(x.shape) for x in case_arrays(case)]

    def ours(*arrays: mx.array) -> mx.array:
        return flash_attention(*arrays, **case.options)

    def theirs(*arrays: mx.array) -> mx.array:
        return definition(*arrays, **case.options)

    def gradient(function: Any) -> Any:
        return mx.grad(lambda *arrays: function(*arrays).square().sum())

    for transform in (lambda f: f, gradient):
        results = [mx.jvp(transform(f), list(case_arrays(case)), tangents)[1][0] for f in (ours, theirs)]
        assert mx.allclose(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_lengths_among_the_differentiated_arguments(form: str):
    names = names_of(form)
    case = ragged(form, mx.float32, "causal", ((3, 9), (0, 4), (7, 2)))
    lengths = [case.options[n] for n in names]
    tangents = [mx.random.normal(x.shape) for x in case_arrays(case)]

    def call(q: mx.array, k: mx.array, v: mx.array, *sizes: mx.array) -> mx.array:
        return flash_attention(q, k, v, mask="causal", **dict(zip(names, sizes, strict=True)))

    still = [mx.zeros_like(x) for x in lengths]
    (tangent,) = mx.jvp(call, [*case_arrays(case), *lengths], [*tangents, *still])[1]
    (expected,) = mx.jvp(lambda *arrays: call(*arrays, *lengths), list(case_arrays(case)), tangents)[1]
    assert mx.allclose(tangent, expected, rtol=1e-5, atol=1e-6)
    gradients = mx.vjp(call, [*case_arrays(case), *lengths], [case.d_out])[1]
    for result, exact in zip(gradients, gradients_of(case)[1].values(), strict=False):
        assert mx.allclose(result, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shapeless", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_compiled(form: str, shapeless: bool):
    names = names_of(form)
    compiled = mx.compile(
        lambda q, k, v, *sizes: flash_attention(q, k, v, mask="causal", **dict(zip(names, sizes, strict=True))),
        shapeless=shapeless,
    )
    for lengths in (((3, 9), (0, 4), (7, 2)), ((5, 6), (2, 2), (1, 30))):
        case = ragged(form, mx.float32, "causal", lengths)
        result = compiled(case.q, case.k, case.v, *(case.options[n] for n in names))
        assert_same_bits(result, flash_attention(case.q, case.k, case.v, **case.options))


def test_exported(tmp_path):
    case = ragged("packed", mx.float32, "causal", ((3, 9), (0, 4), (7, 2)))
    arrays = (*case_arrays(case), case.options["cu_seqlens_q"], case.options["cu_seqlens_k"])

    def call(q: mx.array, k: mx.array, v: mx.array, *ends: mx.array) -> mx.array:
        return flash_attention(q, k, v, mask="causal", cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])

    with mlx_anvil.composed():
        mx.export_function(str(tmp_path / "packed.mlxfn"), call, *arrays)
    (result,) = mx.import_function(str(tmp_path / "packed.mlxfn"))(*arrays)
    assert mx.allclose(result, call(*arrays), rtol=1e-5, atol=1e-6)


# ---- lengths ---------------------------------------------------------------------------------------------------------


def test_lengths_of_keys_alone():
    """A cache with unequal lengths, and every query in use: each decode is aligned with its own last key."""
    q, k = mx.random.normal((3, 4, 2, 32)), mx.random.normal((3, 2, 50, 32))
    out = flash_attention(q, k, k, mask="causal", lengths=mx.array([50, 2, 17], mx.int64))
    for b, n in enumerate((50, 2, 17)):
        own = flash_attention(q[b : b + 1], k[b : b + 1, :, :n], k[b : b + 1, :, :n], mask="causal")
        assert mx.allclose(out[b : b + 1], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("q_len", [1, 3, 12])
def test_starts_and_lengths(q_len: int):
    """Padding on both sides. A start past the end leaves a sequence without keys."""
    q, k = mx.random.normal((4, 4, q_len, 32)), mx.random.normal((4, 2, 50, 32))
    starts, ends = mx.array([0, 7, 30, 20]), mx.array([50, 33, 31, 10])

    def call(q: mx.array, k: mx.array) -> mx.array:
        return flash_attention(q, k, k, mask="causal", starts=starts, lengths=ends)

    def own(q: mx.array, k: mx.array, b: int) -> mx.array:
        rows = k[b : b + 1, :, starts[b].item() : ends[b].item()]
        return flash_attention(q[b : b + 1], rows, rows, mask="causal")

    gradients = mx.grad(lambda *xs: call(*xs).square().sum(), argnums=(0, 1))(q, k)
    for b in range(4):
        assert mx.allclose(call(q, k)[b : b + 1], own(q, k, b), rtol=1e-4, atol=1e-5)
        for result, exact in zip(
            gradients, mx.grad(lambda q, k, b=b: own(q, k, b).square().sum(), argnums=(0, 1))(q, k), strict=True
        ):
            assert mx.allclose(result[b], exact[b], rtol=1e-3, atol=1e-4)


def test_a_plan_of_starts():
    q, k, starts = mx.random.normal((2, 4, 1, 32)), mx.random.normal((2, 2, 20, 32)), mx.array([0, 13])
    plan = mlx_anvil.attention_plan(q_len=1, kv_len=20, starts=starts)
    assert_same_bits(flash_attention(q, k, k, plan=plan), flash_attention(q, k, k, starts=starts))


def test_one_list_of_ends_serves_queries_and_keys():
    x, ends = mx.random.normal((1, 2, 30, 16)), mx.array([0, 4, 4, 29], mx.uint32)
    both = flash_attention(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert_same_bits(flash_attention(x, x, x, cu_seqlens_q=ends), both)


@pytest.mark.parametrize("form", FORMS)
def test_lengths_that_are_not_known_at_the_call_are_clamped(form: str):
    """No read is outside the arrays."""
    x = mx.random.normal((1, 2, 30, 16))
    unknown = mx.array([70, 2**31 - 1]) + 0
    if form == "padded":
        out = flash_attention(x, x, x, lengths=unknown[:1] * 1, q_lengths=unknown[1:] * 1)
        assert mx.allclose(out, flash_attention(x, x, x), rtol=1e-4, atol=1e-5)
    elif form == "left-padded":
        assert not flash_attention(x, x, x, starts=unknown[:1] * 1).any()
        assert mx.allclose(flash_attention(x, x, x, starts=-unknown[:1]), flash_attention(x, x, x), rtol=1e-4)
    else:
        mx.eval(flash_attention(x, x, x, cu_seqlens_q=(unknown - 60) * 1, cu_seqlens_k=-unknown))


def test_ends_that_decrease_are_raised_to_those_before_them():
    """If the call cannot know them, no row is of two sequences: each begins where all before it end."""
    x = mx.random.normal((1, 2, 50, 16))
    decreasing, raised = mx.array([0, 20, 10, 30, 25, 44]), mx.array([0, 20, 20, 30, 30, 44])
    unknown = decreasing + 0 * x[0, 0, 0, :6].astype(mx.int32)

    def results(ends: mx.array) -> list[mx.array]:
        def call(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return flash_attention(q, k, v, mask="causal", cu_seqlens_q=ends)

        gradients = mx.grad(lambda *arrays: call(*arrays).square().sum(), argnums=(0, 1, 2))(x, x, x)
        return [call(x, x, x), *gradients]

    for result, expected in zip(results(unknown), results(raised), strict=True):
        assert_same_bits(result, expected)
