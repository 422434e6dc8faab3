"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx

from mlx_anvil import ssd_scan
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import FEW_TOKENS, MODEL_DTYPES, PROMPT, Call


def _arrays(steps: int, heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype) -> dict[str, mx.array]:
    """As models have them: x, B and C are slices of one array."""
    (groups, x_heads), (columns, dim) = heads, dims
    sizes = (x_heads * dim, groups * columns, groups * columns)
    mixed = mx.zeros((1, steps, sum(sizes)), dtype)
    x, b, c = mx.split(mixed, [sizes[0], sizes[0] + sizes[1]], axis=-1)
    return {
        "x": x.reshape(1, steps, x_heads, dim),
        "dt": mx.zeros((1, steps, x_heads), dtype),
        "A": mx.zeros((x_heads,)),
        "B": b.reshape(1, steps, groups, columns),
        "C": c.reshape(1, steps, groups, columns),
        "D": mx.zeros((x_heads,)),
        "z": mx.zeros((1, steps, x_heads, dim), dtype),
        "state": mx.zeros((1, x_heads, dim, columns)),
        "dt_bias": mx.zeros((x_heads,)),
    }


def _calls(arrays: dict[str, mx.array], **options: Any) -> Iterator[Call]:
    """The op, and its gradients."""

    def loss(*given: mx.array) -> mx.array:
        results = ssd_scan(**dict(zip(arrays, given, strict=True)), **options)
        return sum((x.sum() for x in results), mx.zeros(()))

    yield partial(ssd_scan, **arrays, **options)
    yield lambda: mx.grad(loss, argnums=tuple(range(len(arrays))))(*arrays.values())


def _without(arrays: dict[str, mx.array], *names: str) -> dict[str, mx.array]:
    return {name: x for name, x in arrays.items() if name not in names}


def every_kernel() -> Iterator[Call]:
    for dtype, columns in product(DTYPES, (48, 64, 128, 256)):
        yield from _calls(_arrays(20, (1, 2), (columns, 24), dtype))
    for dtype in DTYPES:
        arrays = _arrays(3, (1, 2), (64, 24), dtype)
        for absent in product(*((None, name) for name in ("D", "z", "state"))):
            given = _without(arrays, *filter(None, absent))
            for lengths, positions in product((None, mx.array([2])), (None, [1])):
                yield from _calls(given, lengths=lengths, return_states=positions)
        for bias, softplus, lengths in product((True, False), (True, False), (None, mx.array([2]))):
            given = arrays if bias else _without(arrays, "dt_bias")
            yield partial(ssd_scan, **given, dt_softplus=softplus, lengths=lengths)


def of_models() -> Iterator[Call]:
    """Mamba-2, Nemotron-H, Granite 4, Falcon-H1: a step, drafted tokens, a prompt, and a step of training. The gate
    is a norm's in most models, and so absent here."""
    sizes = (((1, 32), (128, 64)), ((8, 32), (128, 80)), ((1, 32), (256, 64)))
    for dtype, (heads, dims), gated in product(MODEL_DTYPES, sizes, (False, True)):
        options = {"dt_softplus": True, "dt_limit": (0.0, 100.0)}
        absent = () if gated else ("z",)
        for steps, more in (
            (1, {}),
            (FEW_TOKENS, {"return_states": list(range(FEW_TOKENS))}),
            (PROMPT, {"lengths": mx.array([77])}),
        ):
            yield partial(ssd_scan, **_without(_arrays(steps, heads, dims, dtype), *absent), **options, **more)
        yield from _calls(_without(_arrays(PROMPT, heads, dims, dtype), "state", *absent), **options)
