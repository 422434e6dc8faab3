"""Helpers of tests/<op>/checked.py: calls for the checked simulator that also compare their results."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_anvil.reference import DTYPES, OPS
from support import GRADIENT_FACTOR, Arrays, assert_accurate, jvp_of, vjp_of


@dataclass(frozen=True)
class Checked:
    run: Callable[[], None]  # fails if a result is wrong
    matrix_units: bool = False  # of the GPU
    group_products: bool = False


def any_dtype(rng: np.random.Generator, dtypes: tuple[mx.Dtype, ...] = DTYPES) -> mx.Dtype:
    """All dtypes share one kernel template, so one of them is enough."""
    return dtypes[rng.integers(len(dtypes))]


def each_way(
    rng: np.random.Generator,
    entry: str,
    shape: tuple[int, ...],
    layout: Callable[[mx.array], mx.array] = lambda x: x,
) -> Iterator[Checked]:
    """Calls the function of a registry entry, its gradients and its tangents. ``layout`` is applied to all arrays."""
    spec, dtype = OPS[entry], any_dtype(rng)
    count, tolerance = len(spec.arguments), spec.float32_tolerance

    def like(arrays: Arrays) -> Arrays:
        return [layout(mx.random.normal(x.shape).astype(dtype)) for x in arrays]

    def draw() -> Arrays:
        return [layout(x) for x in spec.make_inputs(shape, dtype)]

    def forward() -> None:
        assert_accurate(spec.function, spec.reference, draw(), float32_tolerance=tolerance)

    def derivatives(of: Callable[..., Callable[..., Arrays]], more: Callable[[Arrays], Arrays]) -> None:
        arrays = draw()
        ours, exact = of(spec.function, count), of(spec.reference, count)
        given = [*arrays, *more(arrays)]
        assert_accurate(ours, exact, given, factor=GRADIENT_FACTOR, float32_tolerance=tolerance)

    yield Checked(forward)
    yield Checked(partial(derivatives, vjp_of, lambda arrays: like([spec.function(*arrays)])))
    yield Checked(partial(derivatives, jvp_of, like))
