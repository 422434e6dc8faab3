"""selective_scan: its definition in MLX ops, and its entries in the registry."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec


def selective_scan(
    x: mx.array,
    dt: mx.array,
    A: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array | None = None,
    z: mx.array | None = None,
    state: mx.array | None = None,
    *,
    dt_softplus: bool = False,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The recurrence step by step, as mlx-lm's Mamba runs it, in the dtypes that MLX's promotion gives."""
    batch, steps, _ = x.shape
    if dt_softplus:
        dt = mx.logaddexp(dt, mx.array(0, dt.dtype))
    h = mx.zeros((batch, *A.shape)) if state is None else state
    rows = []
    for t in range(steps):
        step = dt[:, t, :, None]
        new = mx.exp(step * A) * h + step * x[:, t, :, None] * B[:, t, None]
        y = (new * C[:, t, None]).sum(axis=-1)
        if D is not None:
            y = y + D * x[:, t]
        if z is not None:
            y = y * (z[:, t] * mx.sigmoid(z[:, t]))
        if lengths is not None:
            counts = (lengths > t)[:, None]
            y, new = mx.where(counts, y, 0), mx.where(counts[..., None], new, h)
        rows.append(y)
        h = new
    dtype = (x[:0] + dt[:0]).dtype
    return mx.stack(rows, axis=1).astype(dtype) if rows else mx.zeros(x.shape, dtype), h


# ---- a shape is (batch, steps, channels, states) ---------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, steps, channels, states = shape
    x = mx.random.normal((batch, steps, channels))
    dt = mx.random.uniform(
        0.01, 0.1, (batch, steps, channels)
    )  # states last: their slope changes little in a small step
    rates = -mx.random.uniform(0.1, 2.0, (channels, states))
    b, c = (mx.random.normal((batch, steps, states)) for _ in range(2))
    return [array.astype(dtype) for array in (x, dt, rates, b, c)]


def _inputs_of_models(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, steps, channels, _ = shape
    x, dt, *rest = _inputs(shape, dtype)
    d = mx.random.normal((channels,)).astype(dtype)
    z = mx.random.normal((batch, steps, channels)).astype(dtype)
    return [x, mx.log(mx.exp(dt.astype(mx.float32)) - 1).astype(dtype), *rest, d, z]


def _inputs_with_state(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, _, channels, states = shape
    return [*_inputs(shape, dtype), mx.random.normal((batch, channels, states)).astype(dtype)]


def _both_results(
    scan: Callable[..., tuple[mx.array, mx.array]], names: tuple[str, ...], **fixed: Any
) -> Callable[..., mx.array]:
    """y and the state, as one array that depends on both."""

    def function(*arrays: mx.array, **options: Any) -> mx.array:
        y, state = scan(**dict(zip(names, arrays, strict=True)), **fixed, **options)
        return y + mx.expand_dims(mx.sum(state, axis=-1), 1).astype(y.dtype)

    return function


_SHAPES = (
    (1, 1, 1, 1),
    (0, 3, 5, 2),
    (2, 0, 3, 2),
    (1, 17, 33, 3),
    (2, 5, 7, 16),
    (1, 33, 70, 5),
    (1, 7, 13, 11),
    (2, 19, 5, 4),
)
_ROWS = ("x", "dt", "A", "B", "C")


def _spec(
    variant: str,
    make_inputs: Callable[[tuple[int, ...], mx.Dtype], list[mx.array]],
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    **options: Any,
) -> OpSpec:
    return OpSpec(
        name="selective_scan",
        variant=variant,
        function=_both_results(_ext.selective_scan, names, **options),
        reference=_both_results(selective_scan, names, **options),
        make_inputs=make_inputs,
        arguments=names,
        operands=_ROWS,
        contract_shapes=_SHAPES,
        check_shapes=shapes,
        special_values=(0.0, -0.0),
    )


_MODEL = (1, 64, 2048, 16)

SPECS = (
    _spec("", _inputs, _ROWS, ((2, 13, 21, 5), _MODEL)),
    _spec("models", _inputs_of_models, (*_ROWS, "D", "z"), ((1, 9, 17, 16), _MODEL), dt_softplus=True),
    _spec("state", _inputs_with_state, (*_ROWS, "state"), ((3, 4, 19, 7), (1, 1, 2048, 16))),
)
