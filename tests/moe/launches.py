"""Calls that launch every kernel of the ops, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import MODEL_DTYPES, PROMPT, WIDTH, Call

SHARED, GATED = ("shared",), ("shared", "shared_gate")
TERMS = ((), ("residual",), SHARED, GATED, ("residual", *GATED))


def ids_of(tokens: int, k: int, experts: int) -> mx.array:
    return (mx.arange(tokens * k) % experts).reshape(tokens, k)


def inverse_of(tokens: int, k: int) -> mx.array:
    return mx.arange(tokens * k).reshape(tokens, k)


def block(x: mx.array, ids: mx.array, experts: int) -> mx.array:
    return mlx_anvil.moe_permute(x, ids, experts)[0]


def combine(tokens: int, k: int, columns: int, terms: tuple[str, ...], dtype: mx.Dtype, factors: mx.Dtype | None):
    """The op as a function of its arrays, and the arrays. Without ``factors`` there are no weights."""
    shapes = {"residual": (tokens, columns), "shared": (tokens, columns), "shared_gate": (tokens, 1)}
    arrays = {"y": mx.zeros((tokens * k, columns), dtype)}
    if factors:
        arrays["weights"] = mx.zeros((tokens, k), factors)
    for name in terms:
        arrays[name] = mx.zeros(shapes[name], factors if factors and name == "shared_gate" else dtype)
    names, inverse = list(arrays), inverse_of(tokens, k)

    def function(*given: mx.array) -> mx.array:
        return mlx_anvil.moe_combine(**({"weights": None} | dict(zip(names, given, strict=True))), inverse=inverse)

    return function, list(arrays.values())


def every_kernel() -> Iterator[Call]:
    for dtype, columns in product(DTYPES, (16, 13)):
        for tokens in (3, 700):  # few pairs, and more than those
            x, ids = mx.zeros((tokens, columns), dtype), ids_of(tokens, 2, 7)
            rows = mx.zeros((2 * tokens, columns), dtype)
            yield lambda x=x, i=ids, c=rows: mx.vjp(partial(block, ids=i, experts=7), [x], [c])
            yield lambda x=x, i=ids: mx.jvp(partial(block, ids=i, experts=7), [x], [x])
            yield lambda x=x[:, :0], i=ids: mlx_anvil.moe_permute(x, i, 7)  # the sort alone
        for terms, factors in product(TERMS, (None, dtype, mx.float32)):
            function, arrays = combine(3, 2, columns, terms, dtype, factors)
            cotangent = mx.zeros((3, columns), dtype)
            yield lambda f=function, a=arrays, c=cotangent: mx.vjp(f, a, [c])


def of_models() -> Iterator[Call]:
    for dtype in MODEL_DTYPES:
        # Qwen 3: a token, and a prompt.
        for tokens, experts, k in ((1, 128, 8), (PROMPT, 128, 8)):
            yield partial(mlx_anvil.moe_permute, mx.zeros((tokens, WIDTH), dtype), ids_of(tokens, k, experts), experts)
            # Mixtral and Qwen 3, with the residual; Qwen 2, whose shared expert has a gate; DeepSeek V3, whose weights
            # are float32 and whose shared expert has none.
            for terms, factors in (
                *(((), dtype), (("residual",), dtype), (GATED, dtype), (("residual", *GATED), dtype)),
                *(((), mx.float32), (SHARED, mx.float32), (("residual", *SHARED), mx.float32)),
            ):
                function, arrays = combine(tokens, k, WIDTH, terms, dtype, factors)
                yield partial(function, *arrays)
