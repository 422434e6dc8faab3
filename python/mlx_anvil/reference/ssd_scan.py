"""ssd_scan: its definition in MLX ops, and its entries in the registry."""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64
from mlx_anvil.reference.gated_delta import SHAPES, states_at


def ssd_scan(
    x: mx.array,
    dt: mx.array,
    A: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array | None = None,
    z: mx.array | None = None,
    state: mx.array | None = None,
    *,
    dt_bias: mx.array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    lengths: mx.array | None = None,
    return_states: list[int] | tuple[int, ...] | mx.array | None = None,
) -> tuple[mx.array, ...]:
    """``S = exp(dt A) S + (dt x) B^T; y = S C + D x; y = y silu(z)`` for each step and each head of ``x``.

    ``x`` and ``z`` are ``[batch, T, H, P]``, ``dt`` is ``[batch, T, H]``, ``A``, ``D`` and ``dt_bias`` are ``[H]``, and
    ``B`` and ``C`` are ``[batch, T, G, N]``. Returns ``y``, the state ``[batch, H, P, N]``, and the states after the
    steps of ``return_states``. States have the dtype of the arithmetic.
    """
    batch, steps, heads, dim = x.shape
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = _float64.softplus(dt)
    if dt_limit is not None:
        dt = mx.clip(dt, *dt_limit)
    B, C = (mx.repeat(rows, heads // rows.shape[2], axis=2) for rows in (B, C))
    decays = _float64.exp(dt * A)
    if state is None:
        state = mx.zeros((batch, heads, dim, B.shape[-1]), mx.result_type(x, dt, B))
    outputs, states = [], []
    for t in range(steps):
        change = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        after = decays[:, t, :, None, None] * state + change
        y = (after * C[:, t, :, None]).sum(axis=-1)
        if D is not None:
            y = y + D[:, None] * x[:, t]
        if z is not None:
            y = y * (z[:, t] * _float64.sigmoid(z[:, t]))
        if lengths is not None:
            counts = (lengths > t)[:, None, None]
            y, after = mx.where(counts, y, 0), mx.where(counts[..., None], after, state)
        state = after
        outputs.append(y)
        states.append(state)
    result = mx.stack(outputs, axis=1) if outputs else mx.zeros(x.shape, x.dtype)
    results = (result.astype(x.dtype), state)
    if return_states is None:
        return results
    return *results, states_at(return_states, mx.stack(states, axis=1))


# ---- a shape is (batch, T, groups, heads, states, dim) ---------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Steps with which the state neither grows nor shrinks fast."""
    batch, steps, groups, heads, states, dim = shape
    arrays = [
        mx.random.normal((batch, steps, heads, dim)),
        mx.random.uniform(0.1, 0.8, (batch, steps, heads)),
        -mx.random.uniform(0.1, 1.0, (heads,)),
        mx.random.normal((batch, steps, groups, states)),
        mx.random.normal((batch, steps, groups, states)),
    ]
    return [array.astype(dtype) for array in arrays]


def _inputs_of_models(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    batch, steps, _, heads, states, dim = shape
    more = [
        mx.random.normal((heads,)),
        mx.random.normal((batch, steps, heads, dim)),
        mx.random.normal((batch, heads, dim, states)),
        mx.random.normal((heads,)),
    ]
    return [*_inputs(shape, dtype), *(array.astype(dtype) for array in more)]


_ROWS = ("x", "dt", "A", "B", "C")


def _of_arrays(function: Callable[..., Any], names: tuple[str, ...], **fixed: Any) -> Callable[..., mx.array]:
    """The op as a function of its arrays: y plus the sums of each row of the last state, and of the one other state."""

    def of_arrays(*arrays: mx.array, **options: Any) -> mx.array:
        y, *states = function(**dict(zip(names, arrays, strict=True)), **fixed, **options)
        for state in states:
            rows = state.sum(axis=-1).astype(y.dtype)
            y = y + (rows if rows.ndim == y.ndim else mx.expand_dims(rows, 1))
        return cast(mx.array, y)

    return of_arrays


def _spec(
    variant: str,
    make_inputs: Callable[[tuple[int, ...], mx.Dtype], list[mx.array]],
    names: tuple[str, ...],
    small: tuple[tuple[int, ...], ...],
    shapes: tuple[tuple[int, ...], ...],
    **options: Any,
) -> OpSpec:
    return OpSpec(
        name="ssd_scan",
        variant=variant,
        function=_of_arrays(_ext.ssd_scan, names, **options),
        reference=_of_arrays(ssd_scan, names, **options),
        make_inputs=make_inputs,
        arguments=names,
        operands=_ROWS,
        contract_shapes=(*small, *SHAPES),
        check_shapes=shapes,
        special_values=(0.0, -0.0),
    )


_MODEL = (1, 64, 1, 32, 128, 64)

SPECS = (
    _spec("", _inputs, _ROWS, ((1, 1, 1, 1, 1, 1), (2, 0, 1, 2, 16, 5)), ((2, 5, 1, 3, 24, 11), _MODEL)),
    _spec(
        "models",
        _inputs_of_models,
        (*_ROWS, "D", "z", "state", "dt_bias"),
        ((1, 2, 1, 1, 1, 1),),
        ((1, 6, 2, 4, 40, 9), _MODEL),
        dt_softplus=True,
        dt_limit=(0.001, 100.0),
        return_states=(1,),
    ),
)
