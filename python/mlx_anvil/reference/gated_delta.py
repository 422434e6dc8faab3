"""gated_delta: its definition in MLX ops, and its entries in the registry."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    *,
    return_states: list[int] | tuple[int, ...] | mx.array | None = None,
    lengths: mx.array | None = None,
    normalize_eps: float | None = None,
) -> tuple[mx.array, ...]:
    """``S = g S; S = S + beta (v - S k) k^T; y = S q`` for each step and each head of ``v``.

    ``q`` and ``k`` are ``[batch, T, Hk, Dk]``, ``v`` is ``[batch, T, Hv, Dv]``, ``g`` and ``beta`` are ``[batch, T,
    Hv]`` or, with a factor per channel, ``g`` is ``[batch, T, Hv, Dk]``. Returns ``y``, the state, and the states after
    the steps of ``return_states``. States have the dtype of the arithmetic.
    """
    batch, steps, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    if normalize_eps is not None:
        q, k = (x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + normalize_eps) for x in (q, k))
        q = q * key_dim**-0.5
    q, k = (mx.repeat(x, heads // key_heads, axis=2) for x in (q, k))
    if state is None:
        state = mx.zeros((batch, heads, value_dim, key_dim), mx.result_type(q, v, g, beta))
    outputs, states = [], []
    for t in range(steps):
        decayed = state * (g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None, :])
        key = k[:, t, :, None]
        change = (v[:, t] - (decayed * key).sum(axis=-1)) * beta[:, t, :, None]
        after = decayed + change[..., None] * key
        y = (after * q[:, t, :, None]).sum(axis=-1)
        if lengths is not None:
            counts = (lengths > t)[:, None, None]
            y, after = mx.where(counts, y, 0), mx.where(counts[..., None], after, state)
        state = after
        outputs.append(y)
        states.append(state)
    result = mx.stack(outputs, axis=1) if outputs else mx.zeros(v.shape, v.dtype)
    results = (result.astype(q.dtype), state)
    if return_states is None:
        return results
    return *results, states_at(return_states, mx.stack(states, axis=1))


def states_at(positions: list[int] | tuple[int, ...] | mx.array, states: mx.array) -> mx.array:
    """Those after the steps at ``positions``, ``[n]`` or ``[batch, n]``, of the states after all steps."""
    at = positions if isinstance(positions, mx.array) else mx.array(positions, mx.int32)
    rows = mx.broadcast_to(at if at.ndim == 2 else at[None], (len(states), at.shape[-1]))
    return mx.take_along_axis(states, rows[..., None, None, None], axis=1)


def gated_delta_gates(
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """``g = exp(-exp(A_log) softplus(a + dt_bias))``, or ``exp(lower_bound sigmoid(exp(A_log) (a + dt_bias)))``, and
    ``beta = sigmoid(b)``, or twice that. ``a`` is ``[..., H]`` or ``[..., H, D]``, ``b`` is ``[..., H]``."""
    speed = _float64.exp(A_log.reshape(-1))
    speed = speed[:, None] if a.ndim > b.ndim else speed
    x = a + dt_bias
    if lower_bound is not None:
        g = _float64.exp(lower_bound * _float64.sigmoid(speed * x))
    else:
        g = _float64.exp(-speed * _float64.softplus(x))
    return g, _float64.sigmoid(b) * (2 if allow_neg_eigval else 1)


# ---- a shape is (batch, T, heads of k, heads of v, dim of k, dim of v) -----------------------------------------------


def _inputs(per_channel: bool, shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Keys of length 1 and rates up to 1, with which the state neither grows nor shrinks fast."""
    batch, steps, key_heads, heads, key_dim, value_dim = shape
    gates = (batch, steps, heads)
    arrays = [
        mx.random.normal((batch, steps, key_heads, key_dim)) / math.sqrt(key_dim),
        mx.random.normal((batch, steps, key_heads, key_dim)) / math.sqrt(key_dim),
        mx.random.normal((*gates, value_dim)),
        mx.random.uniform(0.6, 1.0, (*gates, key_dim) if per_channel else gates),
        mx.random.uniform(0.1, 1.0, gates),
        mx.random.normal((batch, heads, value_dim, key_dim)),
    ]
    return [x.astype(dtype) for x in arrays]


_ARRAYS = ("q", "k", "v", "g", "beta", "state")


def _of_arrays(function: Callable[..., Any], **options: Any) -> Callable[..., mx.array]:
    """The op as a function of its arrays: each y plus each row of the last state, and of the one other state."""

    def of_arrays(*arrays: mx.array, **more: Any) -> mx.array:
        y, state, *others = function(*arrays, **options, **more)
        total = y[..., None] + mx.expand_dims(state, 1).astype(y.dtype)
        for states in others:
            total = total + states.astype(y.dtype)
        return cast(mx.array, total)

    return of_arrays


SHAPES = (
    (0, 2, 1, 2, 16, 5),
    (1, 3, 2, 6, 32, 17),
    (1, 7, 1, 2, 40, 4),
    (2, 2, 1, 3, 20, 3),
    (1, 3, 2, 2, 16, 6),
)


def _spec(
    variant: str,
    *,
    small: tuple[tuple[int, ...], ...],
    shapes: tuple[tuple[int, ...], ...],
    per_channel: bool = False,
    **options: Any,
) -> OpSpec:
    return OpSpec(
        name="gated_delta",
        variant=variant,
        function=_of_arrays(_ext.gated_delta, **options),
        reference=_of_arrays(gated_delta, **options),
        make_inputs=partial(_inputs, per_channel),
        arguments=_ARRAYS,
        operands=_ARRAYS[:5],
        contract_shapes=(*small, *SHAPES),
        check_shapes=shapes,
        # Numbers that the steps do not multiply until they overflow.
        special_values=(math.nan, 2.0, -2.0, 0.0, -0.0),
    )


# ---- of gates, a shape is (batch, T, heads, channels) or (batch, T, heads) -------------------------------------------


def _gates_inputs(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    arrays = [
        mx.random.normal(shape),
        mx.random.normal(shape[:3]),
        0.5 * mx.random.normal(shape[2:3]),
        mx.random.normal(shape[2:]),
    ]
    return [x.astype(dtype) for x in arrays]


def _sum_of_gates(function: Callable[..., Any], **options: Any) -> Callable[..., mx.array]:
    def of_arrays(*arrays: mx.array, **more: Any) -> mx.array:
        a, b = arrays[:2]
        g, beta = function(*arrays, **options, **more)
        beta = beta[..., None] if a.ndim > b.ndim else beta
        return cast(mx.array, (g + beta).astype(a.dtype))

    return of_arrays


def _gates_spec(variant: str, shapes: tuple[tuple[int, ...], ...], **options: Any) -> OpSpec:
    return OpSpec(
        name="gated_delta_gates",
        variant=variant,
        function=_sum_of_gates(_ext.gated_delta_gates, **options),
        reference=_sum_of_gates(gated_delta_gates, **options),
        make_inputs=_gates_inputs,
        arguments=("a", "b", "A_log", "dt_bias"),
        operands=("a", "b", "A_log", "dt_bias"),
        contract_shapes=shapes,
        check_shapes=(tuple(3 * n + 1 for n in shapes[-1]), (1, 512, 32, *((128,) if len(shapes[-1]) == 4 else ()))),
    )


SPECS = (
    _spec(
        "",
        small=((1, 1, 1, 1, 1, 1), (2, 0, 1, 2, 16, 5)),
        shapes=((2, 5, 1, 3, 24, 11), (1, 64, 4, 8, 128, 128)),
    ),
    _spec(
        "channels",
        small=((1, 2, 1, 1, 8, 1),),  # a normalised number alone has no gradient
        shapes=((1, 6, 2, 2, 40, 9), (1, 64, 4, 4, 128, 128)),
        per_channel=True,
        normalize_eps=1e-6,
        return_states=(1,),
    ),
    _gates_spec("", ((1, 1, 1), (0, 2, 3), (2, 0, 3), (1, 3, 31), (2, 5, 4), (3, 7, 5))),
    _gates_spec(
        "channels",
        ((1, 1, 1, 1), (0, 2, 3, 4), (1, 3, 2, 33), (2, 3, 4, 5), (1, 4, 3, 7)),
        lower_bound=-5.0,
        allow_neg_eigval=True,
    ),
)
