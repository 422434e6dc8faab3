"""moe_permute and moe_combine: the definitions in MLX ops, and the entries in the registry."""

import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64


def moe_permute(x: mx.array, ids: mx.array, num_experts: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The rows of the tokens ``x [..., columns]`` sorted by expert, the first place of each expert, the pair of each
    place, and the place of each pair. A pair is an element of ``ids [..., k]``."""
    flat = ids.flatten().astype(mx.int64)
    expert = mx.clip(mx.where(flat < 0, flat + num_experts, flat), 0, num_experts - 1)
    order = mx.argsort(expert * max(flat.size, 1) + mx.arange(flat.size))  # unique keys: a stable sort
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = _taken(tokens, order // max(ids.shape[-1], 1))
    offsets = (expert[None] < mx.arange(num_experts + 1)[:, None]).sum(axis=1)
    inverse = mx.argsort(order).reshape(ids.shape)
    return rows, offsets.astype(mx.int32), order.astype(mx.int32), inverse.astype(mx.int32)


def moe_combine(
    y: mx.array,
    weights: mx.array | None,
    inverse: mx.array,
    *,
    residual: mx.array | None = None,
    shared: mx.array | None = None,
    shared_gate: mx.array | None = None,
) -> mx.array:
    """The weighted sum of the rows of each token, ``y[inverse]``, plus a residual and a gated shared expert."""
    rows = _taken(y, inverse if weights is None else inverse.reshape(weights.shape))
    out = (rows if weights is None else rows * weights[..., None]).sum(axis=-2)
    if residual is not None:
        out = out + residual
    if shared is not None:
        out = out + (shared if shared_gate is None else _float64.sigmoid(shared_gate) * shared)
    dtypes = [x.dtype for x in (y, residual, shared) if x is not None]
    same = all(dtype == dtypes[0] for dtype in dtypes)
    return out.astype(dtypes[0] if same else mx.float32)


def _taken(rows: mx.array, index: mx.array) -> mx.array:
    # MLX has no gradient of rows taken from none, and no forward mode of the gradient of rows[index].
    if rows.size == 0 or index.size == 0:
        return mx.zeros((*index.shape, rows.shape[-1]), rows.dtype)
    return mx.unflatten(mx.take_along_axis(rows, index.reshape(-1, 1), axis=0), 0, index.shape)


# ---- the registry ----------------------------------------------------------------------------------------------------


@cache
def _ids(shape: tuple[int, ...], experts: int) -> mx.array:
    """Random ids. Some experts have no token, and some ids are negative."""
    draw = random.Random(repr((shape, experts)))
    used = [e for e in range(-experts, experts) if e % 3 != 1] or [0]
    return mx.array([draw.choice(used) for _ in range(math.prod(shape))], mx.int32).reshape(shape)


@cache
def _places(shape: tuple[int, ...]) -> mx.array:
    places = list(range(math.prod(shape)))
    random.Random(repr(shape)).shuffle(places)
    return mx.array(places, mx.int32).reshape(shape)


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    return [mx.random.normal(shape).astype(dtype)]


def _combine_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Of (tokens.., k, columns)."""
    *tokens, k, columns = shape
    shapes = ((math.prod(shape[:-1]), columns), (*tokens, k), (*tokens, columns), (*tokens, columns), (*tokens, 1))
    return [x for of in shapes for x in _inputs(of, dtype)]


def _rows_of(permute: Callable[..., Any], k: int, experts: int) -> Callable[..., mx.array]:
    """The rows of moe_permute, as a function of ``x``."""

    def rows(x: mx.array, **more: Any) -> mx.array:
        shape = (*x.shape[:-1], k) if isinstance(x, mx.array) else (k,)
        sorted_rows: mx.array = permute(x, _ids(shape, experts), experts, **more)[0]
        return sorted_rows

    return rows


def _combined(combine: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """moe_combine as a function of its floating-point arguments."""

    def of_floats(y: mx.array, weights: mx.array, *terms: mx.array, **more: Any) -> mx.array:
        shape = weights.shape if isinstance(weights, mx.array) else (1,)
        named = dict(zip(_TERMS, terms, strict=False))
        return combine(y, weights, _places(tuple(shape)), **named, **more)

    return of_floats


_TERMS = ("residual", "shared", "shared_gate")


def _permute_spec(variant: str, k: int, experts: int, check: tuple[int, ...]) -> OpSpec:
    """A shape is (tokens.., columns). The ids are constants of a compiled graph, so the last two have equal tokens."""
    return OpSpec(
        name="moe_permute",
        variant=variant,
        function=_rows_of(_ext.moe_permute, k, experts),
        reference=_rows_of(moe_permute, k, experts),
        make_inputs=_inputs,
        arguments=("x",),
        operands=("x",),
        contract_shapes=((1, 1), (0, 5), (3, 0), (4,), (2, 3, 7), (37, 64), (5, 13), (5, 31)),
        check_shapes=((7, 33), check),
    )


def _combine_spec(variant: str, terms: tuple[str, ...]) -> OpSpec:
    """A shape is (tokens.., k, columns). The places are constants of a compiled graph."""
    arguments = ("y", "weights", *terms)

    def make_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
        return _combine_inputs(shape, dtype)[: len(arguments)]

    return OpSpec(
        name="moe_combine",
        variant=variant,
        function=_combined(_ext.moe_combine),
        reference=_combined(moe_combine),
        make_inputs=make_inputs,
        arguments=arguments,
        operands=("y",),
        contract_shapes=(
            *((1, 1, 1), (0, 2, 5), (3, 2, 0), (2, 5), (2, 3, 3, 7)),
            *((5, 8, 64), (3, 11, 33), (4, 2, 13), (4, 2, 31)),
        ),
        check_shapes=((3, 2, 33), (512, 8, 1024)),
    )


SPECS = (
    _permute_spec("", k=2, experts=5, check=(512, 1024)),
    _permute_spec("many experts", k=4, experts=64, check=(512, 512)),
    _combine_spec("", ()),
    _combine_spec("all terms", _TERMS),
)
