"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    MODEL_DTYPES,
    PROMPT,
    WIDTH,
    Call,
    projected_heads,
)


def _norm_gradients(function: Callable[..., object], arrays: dict[str, mx.array]) -> Call:
    def loss(*given: mx.array) -> mx.array:
        result = function(**dict(zip(arrays, given, strict=True)))
        return sum((y.sum() for y in result), mx.zeros(())) if isinstance(result, tuple) else result.sum()

    return lambda: mx.grad(loss, argnums=tuple(range(len(arrays))))(*arrays.values())


def every_kernel() -> Iterator[Call]:
    functions = (mlx_anvil.rms_norm, ("residual", "gate")), (mlx_anvil.layer_norm, ("residual", "bias"))
    for dtype, columns, (function, extras) in product(DTYPES, (64, 67, 4096, 8200), functions):
        for weight_dtype, with_weight, *with_extra in product({dtype, mx.float32}, *((False, True),) * 3):
            arrays = {"x": mx.zeros((2, columns), dtype)}
            if with_weight:
                arrays["weight"] = mx.zeros((columns,), weight_dtype)
            for name, wanted in zip(extras, with_extra, strict=True):
                if wanted:
                    of_columns = name == "bias"
                    shape = (columns,) if of_columns else (2, columns)
                    arrays[name] = mx.zeros(shape, weight_dtype if of_columns else dtype)
            yield lambda f=function, a=arrays: f(**a)
            yield _norm_gradients(function, arrays)


def of_models() -> Iterator[Call]:
    for dtype in MODEL_DTYPES:
        x, weight = mx.zeros((8, WIDTH), dtype), mx.ones((WIDTH,), dtype)
        yield partial(mlx_anvil.rms_norm, x, weight)
        yield partial(mlx_anvil.rms_norm, x, weight, residual=x)
        yield partial(mlx_anvil.layer_norm, x, weight, weight)
        yield partial(mlx_anvil.layer_norm, x, weight, weight, residual=x)
        yield partial(mlx_anvil.layer_norm, x, weight)  # Cohere
        for dim in (64, 128, 256):  # of queries and keys: Qwen 3, Gemma 3
            yield partial(mlx_anvil.rms_norm, projected_heads(dtype, 4, PROMPT, dim), mx.ones((dim,), dtype))
        # Trained: adapters alone, all weights.
        for trained in ([x], [x, weight]):
            given = [x, weight][len(trained) :]
            yield partial(mx.vjp, lambda *arrays, g=given: mlx_anvil.rms_norm(*arrays, *g), trained, [x])
            with_residual = partial(lambda *arrays, g, r: mlx_anvil.rms_norm(*arrays, *g, residual=r), g=given, r=x)
            yield partial(mx.vjp, with_residual, trained, [x, x])
    # In float32 in some models, whatever their weights are.
    yield partial(mlx_anvil.rms_norm, mx.zeros((8, WIDTH)), mx.ones((WIDTH,)))
