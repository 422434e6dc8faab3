"""Tests of rope and rope_qk beyond the contract: MLX's arguments, far positions, layouts, derivatives in freqs,
errors."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.reference import DTYPES
from mlx_anvil.reference import rope as definition
from support import (
    assert_accurate,
    assert_same_bits,
    jvp_of,
    kernel_names,
    layouts,
    max_error,
    to_numpy,
    vjp_of,
    without_copies,
)

rope, rope_qk = mlx_anvil.rope, mlx_anvil.rope_qk

FAR = 10**6


def in_numpy(x, dims, *, traditional=False, base=10000.0, scale=1.0, offset=0, freqs=None) -> np.ndarray:
    """The rotation in float64, in which an angle of 10^6 has ten digits after the point."""
    values = to_numpy(x)
    pairs = dims // 2
    frequencies = 1 / to_numpy(freqs) if freqs is not None else base ** (-np.arange(pairs) / pairs)
    offsets = np.broadcast_to(np.array(offset), values.shape[:1])[:, None, None]
    angles = ((offsets + np.arange(values.shape[-2])[:, None]) * (scale * frequencies))[:, None]
    cos, sin = np.cos(angles), np.sin(angles)
    a = slice(0, dims, 2) if traditional else slice(0, pairs)
    b = slice(1, dims, 2) if traditional else slice(pairs, dims)
    out = values.copy()
    out[..., a] = values[..., a] * cos - values[..., b] * sin
    out[..., b] = values[..., a] * sin + values[..., b] * cos
    return out


def error(result: mx.array, exact: np.ndarray) -> float:
    return float(np.abs(to_numpy(result) - exact).max() / np.abs(exact).max())


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("dims", "head_dim"), [(2, 2), (16, 16), (10, 13), (64, 64), (32, 96), (66, 70), (256, 256)])
def test_every_size_near_and_far(traditional, dims, head_dim):
    x = mx.random.normal((2, 3, 5, head_dim))
    freqs = mx.random.uniform(1.0, 100.0, (dims // 2,))
    offsets = 0, FAR, -3, 2**31 - 3, mx.array([7, FAR])
    for offset, given, scale in itertools.product(offsets, (None, freqs), (1.0, 0.125)):
        base = 500.0 if given is None else None
        options = {"traditional": traditional, "base": base, "scale": scale, "offset": offset, "freqs": given}
        # Float32 positions would be off by 1e-2 at 10^6. Frequencies that are float32 have 48 bits once divided.
        far = offset == 2**31 - 3 if isinstance(offset, int) else False
        assert error(rope(x, dims, **options), in_numpy(x, dims, **options)) <= (
            1e-4 if far and given is not None else 1e-6
        )


def in_integers(x, dims, offsets, freqs=None) -> np.ndarray:
    """The rotation with positions and turns as Python integers. ``BASE ** (-j / pairs)`` is a power of two, so it is
    exact."""
    pairs = dims // 2
    one_turn = 1 / (2 * math.pi)
    frequencies = [one_turn * 2.0**-j if freqs is None else one_turn / to_numpy(freqs)[j] for j in range(pairs)]
    turns = [int(f % 1 * 2**64) for f in frequencies]
    positions = [[offset + i for i in range(x.shape[-2])] for offset in offsets]
    angles = [[[p * t % 2**64 / 2**64 * 2 * math.pi for t in turns] for p in of_row] for of_row in positions]
    cos, sin = (np.expand_dims(function(np.array(angles)), 1) for function in (np.cos, np.sin))
    a, b = to_numpy(x)[..., :pairs], to_numpy(x)[..., pairs:dims]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, to_numpy(x)[..., dims:]], axis=-1)


BASE = 2.0**8  # with 8 pairs
FARTHER = {
    "uint32": [2**31, 2**32 - 3],
    "int64": [2**31 - 2, -(2**40)],
    "uint64": [2**63 - 1, 2**64 - 2],
    "int32": [-(2**31), 2**31 - 1],
}


@pytest.mark.parametrize(("dtype", "offsets"), FARTHER.items(), ids=str)
def test_no_position_is_too_far(dtype, offsets):
    x = mx.random.normal((2, 3, 5, 18))
    freqs = mx.random.uniform(1.0, 100.0, (8,))
    array = mx.array(np.array(offsets, dtype))
    assert error(rope(x, 16, base=BASE, offset=array), in_integers(x, 16, offsets)) <= 1e-6
    assert error(rope_qk(x[:, :2], x, 16, base=BASE, offset=array)[1], in_integers(x, 16, offsets)) <= 1e-6
    (back,) = mx.vjp(lambda x: rope(x, 16, base=BASE, offset=array), [x], [rope(x, 16, base=BASE, offset=array)])[1]
    assert max_error(back, x) <= 1e-5
    for i, number in enumerate(offsets):
        one = rope(x[i : i + 1], 16, base=BASE, offset=number)
        assert_same_bits(one, rope(x[i : i + 1], 16, base=BASE, offset=array[i]))
    composed = mx.vmap(lambda freqs: rope(x, 16, base=None, offset=array, freqs=freqs))(mx.stack([freqs, freqs]))
    assert error(composed[1], in_integers(x, 16, offsets, freqs)) <= 1e-6


@pytest.mark.cpu_only  # a GPU divides by frequencies in 48 bits
@pytest.mark.parametrize(("dtype", "offsets"), FARTHER.items(), ids=str)
def test_no_position_is_too_far_for_frequencies(dtype, offsets):
    x, freqs = mx.random.normal((2, 3, 5, 18)), mx.random.uniform(1.0, 100.0, (8,))
    array = mx.array(np.array(offsets, dtype))
    assert error(rope(x, 16, base=None, offset=array, freqs=freqs), in_integers(x, 16, offsets, freqs)) <= 1e-6


@pytest.mark.parametrize("traditional", [False, True])
def test_matches_mlx(traditional):
    """Compares at the first positions, where MLX's angles are accurate enough."""
    for shape, offset in (((2, 7, 16), 3), ((3, 2, 5, 16), mx.array([1, 2, 4])), ((2, 3, 2, 5, 16), mx.array(6))):
        x = mx.random.normal(shape)
        for freqs in (None, mx.random.uniform(1.0, 30.0, (6,))):
            options = {"traditional": traditional, "scale": 0.5, "offset": offset, "freqs": freqs}
            base = None if freqs is not None else 100.0
            with mx.stream(mx.cpu):
                theirs = mx.fast.rope(x, 12, base=base, **options)
            assert max_error(rope(x, 12, base=base, **options), theirs) <= 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_qk_is_rope_of_each(dtype):
    for q_heads, k_heads in ((1, 1), (5, 2), (8, 1), (2, 0)):
        q = mx.random.normal((2, 9, q_heads, 40)).astype(dtype).swapaxes(1, 2)
        k = mx.random.normal((2, k_heads, 9, 40)).astype(dtype)
        options = {"dims": 24, "offset": mx.array([5, 11]), "base": 77.0}
        for ours, alone in zip(rope_qk(q, k, **options), (rope(q, **options), rope(k, **options)), strict=True):
            assert_same_bits(ours, alone)


def test_tables_are_renewed():
    """More positions than one table of cosines has, and batch rows with different offsets."""
    x = mx.random.normal((3, 2, 300, 32))
    for offset in (9, mx.array([0, 300, 0]), mx.array([4, 4, 5])):
        assert error(rope(x, 32, offset=offset), in_numpy(x, 32, offset=offset)) <= 1e-6


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_share_a_table(dtype, traditional):
    """The CPU rotates several heads at a time, and then the remaining ones."""
    x = mx.random.normal((2, 6, 9, 128)).astype(dtype)
    options = {"traditional": traditional, "offset": FAR}
    together = rope(x, 128, **options)
    for head in range(x.shape[1]):
        assert_same_bits(together[:, head : head + 1], rope(x[:, head : head + 1], 128, **options))
    half_a_step = {mx.float32: 1e-6, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
    assert error(together, in_numpy(x, 128, **options)) <= 1.01 * half_a_step


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("dims", "dtype", "limit"), [(128, mx.float32, 1e-6), (48, mx.float32, 1e-6), (128, mx.bfloat16, 1.01 * 2**-8)]
)
def test_large_arrays_are_written_past_the_cache(dims, dtype, limit):
    x = mx.random.normal((1, 33, 2048, 128)).astype(dtype)
    some = slice(2, None, 10)  # heads, the last among them
    for traditional in (False, True):
        options = {"traditional": traditional, "offset": FAR}
        assert error(rope(x, dims, **options)[:, some], in_numpy(x[:, some], dims, **options)) <= limit


def test_frequencies_that_are_none():
    """Frequencies 0 and NaN give NaN. An infinite frequency, which models use, gives no rotation."""
    freqs = mx.array([1.0, 0.0, math.inf, math.nan])
    x = mx.random.normal((1, 1, 3, 8))
    result = to_numpy(rope(x, 8, base=None, freqs=freqs))
    assert np.isnan(result[..., [1, 3, 5, 7]]).all()
    np.testing.assert_array_equal(result[..., [2, 6]], to_numpy(x)[..., [2, 6]])
    np.testing.assert_allclose(result[..., [0, 4]], in_numpy(x[..., ::4], 2, freqs=freqs[:1]), atol=1e-6)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_heads_of_a_fused_projection_are_read_in_place():
    both = mx.random.normal((2, 65, 3 * 4 * 64))
    q, k = (both[..., i * 256 : (i + 1) * 256].reshape(2, 65, 4, 64).swapaxes(1, 2) for i in range(2))
    results = without_copies(lambda q, k: rope_qk(q, k, 64), q, k)
    assert error(results[1], in_numpy(k, 64)) <= 1e-6


def test_layouts_of_both():
    q, k = mx.random.normal((2, 3, 5, 20)), mx.random.normal((2, 1, 5, 20))
    expected = rope_qk(q, k, 16, traditional=True)
    for (_, q_view), (_, k_view) in zip(layouts(q), list(layouts(k))[::-1], strict=True):
        for ours, want in zip(rope_qk(q_view, k_view, 16, traditional=True), expected, strict=True):
            assert_same_bits(ours, want)


def test_one_kernel():
    q, k = mx.random.normal((1, 4, 3, 16)), mx.random.normal((1, 2, 3, 16))
    with mlx_anvil.trace() as trace, mlx_anvil.strict():
        mx.eval(mx.grad(lambda q, k: sum((x**2).sum() for x in rope_qk(q, k, 16)), argnums=(0, 1))(q, k))
    assert kernel_names(trace) == ["rope_qk_float32"] * 2


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traditional", [False, True])
def test_derivatives_in_freqs(traditional):
    x, freqs = mx.random.normal((2, 3, 5, 14)), mx.random.uniform(1.0, 20.0, (5,))
    options = {"dims": 10, "traditional": traditional, "offset": mx.array([2, 60])}

    def ours(x, freqs):
        return rope(x, base=None, freqs=freqs, **options)

    def exact(x, freqs):
        return definition(x, freqs=freqs, **options)

    cotangent = mx.random.normal(x.shape)
    assert_accurate(vjp_of(ours, 2), vjp_of(exact, 2), [x, freqs, cotangent], float32_tolerance=1e-4)
    assert_accurate(jvp_of(ours, 2), jvp_of(exact, 2), [x, freqs, cotangent, freqs], float32_tolerance=1e-4)


def test_gradient_of_one_of_both():
    q, k = mx.random.normal((1, 2, 3, 8)), mx.random.normal((1, 1, 3, 8))
    for index, x in enumerate((q, k)):
        gradient = mx.grad(lambda q, k, index=index: (rope_qk(q, k, 8, offset=5)[index] ** 2).sum(), argnums=index)(
            q, k
        )
        assert max_error(gradient, 2 * x) <= 1e-6  # a rotation keeps lengths
        tangents = [mx.zeros_like(q), mx.zeros_like(k)]
        tangents[index] = x
        results = mx.jvp(lambda q, k: list(rope_qk(q, k, 8, offset=5)), [q, k], tangents)[1]
        assert max_error(results[index], rope(x, 8, offset=5)) <= 1e-6


def test_vmap_of_every_array():
    x = mx.random.normal((3, 2, 4, 5, 8))
    offset = mx.array([[1, 2], [30, 40], [500, FAR]])
    freqs = mx.random.uniform(1.0, 9.0, (3, 4))
    for axes in itertools.product((0, None), repeat=3):
        if axes == (None, None, None):
            continue
        arrays = [a if axis == 0 else a[0] for a, axis in zip((x, offset, freqs), axes, strict=True)]
        mapped = mx.vmap(lambda x, o, f: rope(x, 8, base=None, offset=o, freqs=f), in_axes=axes)(*arrays)
        for i in range(3):
            a, o, f = (v[i] if axis == 0 else v for v, axis in zip(arrays, axes, strict=True))
            assert error(mapped[i], in_numpy(a, 8, offset=o, freqs=f)) <= 2e-5
    scalars = mx.vmap(lambda o: rope(x[0], 8, offset=o))(mx.array([4, FAR]))
    assert error(scalars[1], in_numpy(x[0], 8, offset=FAR)) <= 1e-6


def test_vmap_of_both():
    q, k = mx.random.normal((2, 3, 5, 8, 4)), mx.random.normal((2, 1, 5, 8))
    mapped = mx.vmap(lambda q, k: rope_qk(q, k, 8), in_axes=(4, None))(q, k)
    for i in range(4):
        assert error(mapped[0][i], in_numpy(q[..., i], 8)) <= 1e-6
        assert error(mapped[1][i], in_numpy(k, 8)) <= 1e-6


def test_decoding_step_compiled_once():
    """The position is an array, so one compiled step works for every position."""
    step = mx.compile(lambda x, offset: rope(x, 16, offset=offset))
    x = mx.random.normal((1, 2, 1, 16))
    for position in (0, 1, FAR):
        assert error(step(x, mx.array(position)), in_numpy(x, 16, offset=position)) <= 1e-6


def test_shapeless_graph_for_smaller_heads():
    compiled = mx.compile(lambda x: rope(x, 16), shapeless=True)
    mx.eval(compiled(mx.zeros((1, 1, 2, 16))))
    with pytest.raises(
        ValueError, match=r"^\[rope\] dims is 16 and x has shape \(1, 1, 2, 8\); allowed: dims up to the last axis\."
    ):
        mx.eval(compiled(mx.zeros((1, 1, 2, 8))))


# ---- bad input -------------------------------------------------------------------------------------------------------

X = (2, 3, 4, 8)


@pytest.mark.parametrize(
    ("shape", "dims", "options", "text"),
    [
        (X, 7, {}, r"dims is 7; allowed: positive even numbers\."),
        (X, 0, {}, r"dims is 0; allowed: positive even numbers\."),
        (X, -2, {}, r"dims is -2; allowed: positive even numbers\."),
        (X, 10, {}, r"dims is 10 and x has shape \(2, 3, 4, 8\); allowed: dims up to the last axis\."),
        ((4, 8), 8, {}, r"x has shape \(4, 8\); allowed: rank 3 or more, \[batch, \.\.\., length, head_dim\]\."),
        (X, 8, {"base": None}, r"base and freqs are None; allowed: one of them\."),
        (X, 8, {"base": None, "freqs": None}, r"base and freqs are None; allowed: one of them\."),
        (X, 8, {"base": 10000.0, "freqs": mx.ones((4,))}, r"base is 10000 and freqs is an array; allowed: one of them"),
        (X, 8, {"base": 0.0}, r"base is 0; allowed: positive finite numbers\."),
        (X, 8, {"base": math.nan}, r"base is nan; allowed: positive finite numbers\."),
        (X, 8, {"scale": math.inf}, r"scale is inf; allowed: finite numbers\."),
        (X, 8, {"offset": 2**64}, r"offset is 18446744073709551616; allowed: 64-bit ints\."),
        (X, 8, {"offset": -(2**63) - 1}, r"offset is -9223372036854775809; allowed: 64-bit ints\."),
        (
            X,
            8,
            {"offset": mx.array([1.0, 2.0])},
            r"offset has dtype float32; allowed: an int, or an array of an integer",
        ),
        (
            X,
            8,
            {"offset": mx.array([1, 2, 3])},
            r"offset has shape \(3,\); allowed: a scalar, or shape \(2,\) with one",
        ),
        (X, 8, {"offset": mx.array([[1], [2]])}, r"offset has shape \(2, 1\); allowed: a scalar, or shape \(2,\)"),
        (X, 8, {"freqs": mx.ones((3,))}, r"freqs has shape \(3,\); allowed with dims 8: \(4,\)\."),
        (X, 8, {"freqs": mx.ones((4,), mx.int32)}, r"freqs has dtype int32; allowed: float32, float16, bfloat16\."),
    ],
)
def test_bad_values(shape, dims, options, text):
    with pytest.raises(ValueError, match=r"^\[rope\] " + text):
        rope(mx.zeros(shape), dims, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dims": 8.0}, "dims is a float; allowed: an int"),
        ({"dims": True}, "dims is a bool; allowed: an int"),
        ({"traditional": 1}, "traditional is a int; allowed: a bool"),
        ({"base": "x"}, "base is a str; allowed: None, or a number"),
        ({"scale": None}, "scale is a NoneType; allowed: a number"),
        ({"offset": True}, r"offset is a bool; allowed: an int, or mlx\.core\.array"),
        ({"offset": 1.5}, r"offset is a float; allowed: an int, or mlx\.core\.array"),
        ({"freqs": [1.0]}, r"freqs is a list; allowed: mlx\.core\.array"),
    ],
)
def test_bad_types(options, text):
    with pytest.raises(TypeError, match=rf"^\[rope\] {text}"):
        rope(mx.zeros(X), **({"dims": 8} | options))


@pytest.mark.parametrize("k", [mx.zeros((2, 3, 5, 8)), mx.zeros((1, 3, 4, 8)), mx.zeros(X, mx.float16)], ids=str)
def test_q_and_k_that_differ(k):
    with pytest.raises(
        ValueError, match=r"^\[rope_qk\] q has shape .*; allowed: one dtype, batch, length and head_dim\."
    ):
        rope_qk(mx.zeros(X), k, 8)


@pytest.mark.parametrize("op", ["rope", "rope_qk"])
@pytest.mark.parametrize("base", [None, 10000.0, 500])
@pytest.mark.parametrize("freqs", [None, mx.ones((4,))], ids=["no freqs", "freqs"])
def test_base_and_freqs_as_in_mlx(op, base, freqs):
    """Exactly one of base and freqs may be given, as in MLX. Here base has a default."""
    x = mx.zeros(X)
    arguments = [x] if op == "rope" else [x, x]
    function = {"rope": rope, "rope_qk": rope_qk}[op]
    try:
        mx.fast.rope(x, 8, traditional=False, scale=1.0, offset=0, base=base, freqs=freqs)
    except ValueError:
        with pytest.raises(ValueError, match=rf"^\[{op}\] base .*; allowed: one of them"):
            function(*arguments, 8, base=base, freqs=freqs)
    else:
        function(*arguments, 8, base=base, freqs=freqs)
    function(*arguments, 8, freqs=freqs)


def test_no_gradient_in_offset():
    with pytest.raises(ValueError, match=r"^\[rope\] offset has no gradient, because it counts positions\."):
        mx.vjp(lambda o: rope(mx.zeros(X), 8, offset=o), [mx.array(1)], [mx.zeros(X)])
