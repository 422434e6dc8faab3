"""Derivatives of flash_attention: rows that see no key, infinite gradients, forward mode over reverse mode."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
import support
from mlx_anvil import flash_attention, reference
from mlx_anvil.reference import DTYPES
from support import Arrays, assert_same_bits, to_numpy
from tests.flash_attention.cases import FLOAT32_TOLERANCE

# ---- rows that see no key ----------------------------------------------------------------------------------------------


def rows_seeing(kind: str, dtype: mx.Dtype) -> tuple[mx.array, dict[str, Any]]:
    """A mask or window for 40 queries and 21 keys, and which queries see a key; at most 23 see none."""
    sees = mx.arange(40) >= (17 if kind == "window" else 23)
    visible = mx.broadcast_to(sees[:, None], (40, 21))
    if kind == "window":  # row i sees keys from i - 21 to i - 17
        return sees, {"window_size": (2, 2)}
    return sees, {"mask": visible if kind == "bool" else mx.where(visible, 0.0, -mx.inf).astype(dtype)}


def squares_of_lse(kind: str, head_dim: int, dtype: mx.Dtype, attention: Callable[..., Any]) -> Callable[[bool], Any]:
    """A loss of attention in which at most 23 of 40 rows see no key, and its arguments. It includes the squares of all
    lse, or only of the finite ones."""
    heads, lengths = (4, 2, 2), (40, 21, 21)
    arrays = [mx.random.normal((1, h, n, head_dim)).astype(dtype) for h, n in zip(heads, lengths, strict=True)]
    sees, options = rows_seeing(kind, dtype)
    seeing = 40 - int(sees.sum().item())

    def loss_of(every_row: bool) -> tuple[Callable[..., mx.array], list[mx.array]]:
        def loss(*arrays: mx.array) -> mx.array:
            out, lse = attention(*arrays, **options, return_lse=True)
            return out.astype(mx.float32).sum() + mx.square(lse[..., 0 if every_row else seeing :]).sum()

        return loss, arrays

    return loss_of


@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("route", ["kernels", "composed", "large heads", "definition"])
def test_infinite_gradients_of_rows_that_see_nothing(route: str, kind: str, dtype: mx.Dtype):
    """The gradient of lse^2 is -inf for such rows. They must not contribute to any gradient."""
    definition = reference.flash_attention if route == "definition" else flash_attention
    loss_of = squares_of_lse(kind, 260 if route == "large heads" else 64, dtype, definition)
    gradients = []
    for every_row in (True, False):
        loss, arrays = loss_of(every_row)
        with mlx_anvil.composed() if route == "composed" else nullcontext():
            gradients.append(mx.grad(loss, argnums=(0, 1, 2))(*arrays))
            mx.eval(gradients)
    for ours, expected in zip(*gradients, strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
@pytest.mark.parametrize("route", ["kernels", "composed"])
def test_second_derivatives_with_rows_that_see_nothing(route: str, kind: str):
    loss_of = squares_of_lse(kind, 64, mx.float32, flash_attention)
    products = []
    for every_row in (True, False):
        loss, arrays = loss_of(every_row)
        with mlx_anvil.composed() if route == "composed" else nullcontext():
            gradients = mx.grad(loss, argnums=(0, 1, 2))
            reverse = mx.grad(lambda *xs, of=gradients: sum(g.sum() for g in of(*xs)), argnums=(0, 1, 2))(*arrays)
            forward = mx.jvp(gradients, arrays, arrays)[1]
            products.append([*reverse, *forward])
            mx.eval(products)
    for ours, expected in zip(*products, strict=True):
        assert np.isfinite(to_numpy(ours)).all()
        assert support.max_error(ours, expected) <= FLOAT32_TOLERANCE


def block_of(route: str) -> AbstractContextManager[Any]:
    return mlx_anvil.composed() if route == "composed" else nullcontext()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [mx.inf, mx.nan])
@pytest.mark.parametrize("route", ["kernels", "composed", "large heads"])
def test_gradients_that_are_not_finite_of_rows_that_see_nothing(
    route: str, value: float, kind: str, dtype: mx.Dtype, with_sinks: bool
):
    """The output of such a row is 0 for any arrays, so the gradient of its norm is NaN."""
    dim = 260 if route == "large heads" else 64
    arrays = [mx.random.normal((1, h, n, dim)).astype(dtype) for h, n in ((4, 40), (2, 21), (2, 21))]
    sees, options = rows_seeing(kind, dtype)
    names = ["q", "k", "v"]
    if with_sinks:
        names.append("sinks")
        arrays.append(mx.random.normal((4,)).astype(dtype))
    if kind == "additive":
        names.append("mask")
        arrays.append(options["mask"])

    def attention(*given: mx.array) -> mx.array:
        return flash_attention(**options | dict(zip(names, given, strict=True)))

    with block_of(route):
        d_out = mx.random.normal((1, 4, 40, dim)).astype(dtype)
        gradients = [
            mx.vjp(attention, arrays, [mx.where(sees[:, None], d_out, mx.array(of_others, dtype))])[1]
            for of_others in (value, 0.0)
        ]
        mx.eval(gradients)
    for ours, expected in zip(*gradients, strict=True):
        assert np.isfinite(to_numpy(ours)).all()
        assert_same_bits(ours, expected)


def with_sinks_of(kind: str, dim: int, dtype: mx.Dtype) -> tuple[Callable[..., Any], dict[str, mx.array], mx.array]:
    """Attention with its lse of the arrays that it returns too, of which the third head has no sink; and which of 40
    queries see any key."""
    heads_and_lengths = {"q": (4, 40), "k": (2, 21), "v": (2, 21)}
    arrays = {name: mx.random.normal((1, *shape, dim)).astype(dtype) for name, shape in heads_and_lengths.items()}
    arrays["sinks"] = mx.where(mx.arange(4) == 2, -mx.inf, mx.random.normal((4,))).astype(dtype)
    sees, options = rows_seeing(kind, dtype)
    if kind == "additive":
        arrays["mask"] = options["mask"]

    def attention(*given: mx.array) -> tuple[mx.array, mx.array]:
        return flash_attention(**options | dict(zip(arrays, given, strict=True)), return_lse=True)

    return attention, arrays, sees


@pytest.mark.parametrize("value", [mx.inf, -mx.inf, mx.nan])
@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("route", ["kernels", "composed", "large heads"])
def test_gradients_of_lse_that_are_not_finite_are_those_of_the_sinks(
    route: str, dtype: mx.Dtype, kind: str, value: float
):
    """The lse of a row that sees no key is its sink. Nothing else has a gradient from it."""
    attention, arrays, sees = with_sinks_of(kind, 260 if route == "large heads" else 64, dtype)
    with block_of(route):
        d_out, d_lse = mx.random.normal((1, 4, 40, arrays["v"].shape[-1])).astype(dtype), mx.random.normal((1, 4, 40))
        some = ~sees & (mx.arange(4) > 0)[:, None]  # rows of all heads but the first
        ours, expected = (
            mx.vjp(attention, list(arrays.values()), [d_out, mx.where(some, of_some, d_lse)])[1]
            for of_some in (value, 0.0)
        )
        mx.eval(ours, expected)
    for name, x, finite in zip(arrays, ours, expected, strict=True):
        assert np.isfinite(to_numpy(finite)).all()
        if name == "sinks":
            assert to_numpy(finite)[2] == 0
            finite = mx.where((mx.arange(4) == 1) | (mx.arange(4) == 3), mx.array(value, dtype), finite)
        assert_same_bits(x, finite)


@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
@pytest.mark.parametrize("route", ["kernels", "composed", "large heads"])
def test_an_infinite_gradient_of_lse_is_not_that_of_an_absent_sink(route: str, kind: str):
    """A sink of -inf has no weight in rows that see keys either."""
    attention, arrays, _ = with_sinks_of(kind, 260 if route == "large heads" else 64, mx.float32)
    cotangents = [mx.random.normal((1, 4, 40, arrays["v"].shape[-1])), mx.random.normal((1, 4, 40))]
    cotangents[1][0, 1:3, 30] = mx.inf
    with block_of(route):
        gradient = to_numpy(mx.vjp(attention, list(arrays.values()), cotangents)[1][list(arrays).index("sinks")])
    assert np.isfinite(gradient[[0, 3]]).all()
    assert gradient[1] == np.inf
    assert gradient[2] == 0


@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
@pytest.mark.parametrize("route", ["kernels", "composed", "large heads"])
def test_infinite_tangents_of_queries_that_see_nothing(route: str, kind: str):
    attention, arrays, sees = with_sinks_of(kind, 260 if route == "large heads" else 64, mx.float32)
    tangents = [mx.random.normal(x.shape) for x in arrays.values()]
    with block_of(route):
        (d_out, d_lse), expected = (
            mx.jvp(attention, list(arrays.values()), [mx.where(sees[:, None], tangents[0], of_others), *tangents[1:]])[
                1
            ]
            for of_others in (mx.inf, 0.0)
        )
        mx.eval(d_out, d_lse, expected)
    for x, finite in zip((d_out, d_lse), expected, strict=True):
        assert np.isfinite(to_numpy(finite)).all()
        assert_same_bits(x, finite)
    blind = ~np.array(sees)
    assert not to_numpy(d_out)[..., blind, :].any()
    wanted = np.where(np.arange(4) == 2, 0.0, to_numpy(tangents[3]))
    np.testing.assert_allclose(to_numpy(d_lse)[0][:, blind], np.broadcast_to(wanted[:, None], (4, blind.sum())), 1e-6)


@pytest.mark.parametrize("route", ["kernels", "composed"])
def test_gradients_without_keys(route: str):
    """The output is 0 whatever the sinks are, and each lse is its sink."""
    arrays = [mx.random.normal(shape) for shape in ((1, 4, 3, 16), (1, 2, 0, 16), (1, 2, 0, 16), (4,))]
    d_lse = mx.random.normal((1, 4, 3))
    d_lse[0, 1, 2] = mx.inf

    def attention(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> tuple[mx.array, mx.array]:
        return flash_attention(q, k, v, sinks=sinks, return_lse=True)

    with block_of(route):
        gradients = mx.vjp(attention, arrays, [mx.full((1, 4, 3, 16), mx.inf), d_lse])[1]
        mx.eval(gradients)
    assert not to_numpy(gradients[0]).any()
    np.testing.assert_allclose(to_numpy(gradients[3]), to_numpy(d_lse)[0].sum(-1), 1e-5)


@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"window_size": 4}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("route", ["kernels", "composed", "large heads"])
def test_an_infinite_gradient_stays_where_the_definition_has_it(route: str, options: dict[str, Any]):
    dim = 260 if route == "large heads" else 64
    arrays = [mx.random.normal((1, h, n, dim)) for h, n in ((4, 45), (2, 70), (2, 70))]
    d_out = mx.random.normal((1, 4, 45, dim))
    d_out[0, 1, 20, 3] = mx.inf
    wanted = mx.vjp(lambda *xs: reference.flash_attention(*xs, **options), arrays, [d_out])[1]
    with block_of(route):
        ours = mx.vjp(lambda *xs: flash_attention(*xs, **options), arrays, [d_out])[1]
        mx.eval(ours)
    for x, definition in zip(map(to_numpy, ours), map(to_numpy, wanted), strict=True):
        finite = np.isfinite(definition)
        assert finite.any()
        assert not finite.all()
        np.testing.assert_allclose(
            x[finite], definition[finite], atol=FLOAT32_TOLERANCE * np.abs(definition[finite]).max()
        )
        assert not np.isfinite(x[np.isinf(definition)]).any()


# ---- forward mode over reverse mode ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": "causal"},
        {"softcap": 2.0, "window_size": (2, 1)},
        {"sinks": True},
        {"bias": True, "sinks": True, "softcap": 3.0, "return_lse": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ["kernels", "composed", "large heads"])
def test_vmap_of_the_forward_mode_of_gradients(route: str, options: dict[str, Any]):
    """Over each subset of tangents, so that only some factors of a product have the batch axis."""
    dim, options = 260 if route == "large heads" else 8, dict(options)
    shapes = {"q": (1, 4, 3, dim), "k": (1, 2, 5, dim), "v": (1, 2, 5, dim)}
    shapes |= {"mask": (3, 5)} if options.pop("bias", False) else {}
    shapes |= {"sinks": (4,)} if options.pop("sinks", False) else {}
    primals = [mx.random.normal(shape) for shape in shapes.values()]
    tangents = [mx.random.normal((2, *shape)) for shape in shapes.values()]

    def product_with(attention: Callable[..., Any], xs: Arrays) -> Callable[..., Arrays]:
        """The second derivative times tangents."""

        def loss(*arrays: mx.array) -> mx.array:
            outputs = attention(**dict(zip(shapes, arrays, strict=True)), **options)
            return sum((y * y).sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))

        gradient = mx.grad(loss, argnums=list(range(len(xs))))
        return lambda *ts: list(mx.jvp(lambda *arrays: list(gradient(*arrays)), xs, list(ts))[1])

    for axes in itertools.product((0, None), repeat=len(primals)):
        if all(axis is None for axis in axes):
            continue
        given = [t if axis == 0 else t[0] for t, axis in zip(tangents, axes, strict=True)]
        with block_of(route):
            ours = mx.vmap(product_with(flash_attention, primals), in_axes=axes)(*given)
            mx.eval(ours)
        with mx.stream(mx.cpu):
            exact = product_with(reference.flash_attention, [x.astype(mx.float64) for x in primals])
            elements = [
                exact(*((t[i] if axis == 0 else t).astype(mx.float64) for t, axis in zip(given, axes, strict=True)))
                for i in range(2)
            ]
            wanted = [mx.stack(xs) for xs in zip(*elements, strict=True)]
        for x, definition in zip(ours, wanted, strict=True):
            assert support.max_error(x, definition) <= 2 * FLOAT32_TOLERANCE
