"""causal_conv1d: its definition in MLX ops, and its entries in the registry."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64


def causal_conv1d(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    state: mx.array | None = None,
    *,
    activation: str | None = "silu",
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """``y[b, t, c] = act(bias[c] + sum_w weight[c, w] * rows[b, t + w, c])``, and the last rows.

    ``rows`` is the state and then ``x``, along time. With ``lengths``, ``y`` is 0 from ``lengths[b]`` on, and the new
    state is the rows before that place.
    """
    (batch, length, channels), width = x.shape, weight.shape[1]
    if state is None:
        state = mx.zeros((batch, width - 1, channels), x.dtype)
    rows = mx.concatenate([state, x], axis=1)
    y = rows[:, :length] * weight[:, 0]
    for w in range(1, width):
        y = y + rows[:, w : w + length] * weight[:, w]
    y = y if bias is None else y + bias
    y = y * _float64.sigmoid(y) if activation == "silu" else y
    if lengths is None:
        return y, rows[:, length:]
    ends = mx.clip(lengths.astype(mx.int32), 0, length)[:, None, None]
    kept = mx.broadcast_to(ends + mx.arange(width - 1)[None, :, None], state.shape)
    is_valid = mx.arange(length)[None, :, None] < ends
    return mx.where(is_valid, y, mx.array(0, y.dtype)), mx.take_along_axis(rows, kept, axis=1)


# ---- a shape is (batch, length, channels, width) ---------------------------------------------------------------------


def _inputs(has_bias: bool, has_state: bool) -> Callable[[tuple[int, ...], mx.Dtype], list[mx.array]]:
    def make(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
        batch, length, channels, width = shape
        arrays = [mx.random.normal((batch, length, channels)), mx.random.normal((channels, width))]
        arrays += [mx.random.normal((channels,))] if has_bias else []
        arrays += [mx.random.normal((batch, width - 1, channels))] if has_state else []
        return [x.astype(dtype) for x in arrays]

    return make


def _in_one(
    conv: Callable[..., tuple[mx.array, mx.array]], names: tuple[str, ...], **options: Any
) -> Callable[..., Any]:
    """The op as a function with one result: ``y`` plus a weighted sum of the new state's rows."""

    def function(x: mx.array, weight: mx.array, *others: mx.array, **more: Any) -> mx.array:
        y, state = conv(x, weight, **dict(zip(names, others, strict=True)), **options, **more)
        return y + mx.arange(1, state.shape[1] + 1, dtype=state.dtype)[None] @ state

    return function


_SHAPES = (
    (0, 3, 5, 4),
    (2, 0, 5, 3),
    (2, 3, 0, 4),
    (1, 1, 1, 2),
    (1, 1, 67, 8),
    (2, 70, 9, 5),
    (1, 131, 130, 4),
    (2, 3, 36, 6),
    (2, 5, 13, 4),
    (3, 7, 8, 4),
)


def _spec(variant: str, *names: str, **options: Any) -> OpSpec:
    return OpSpec(
        name="causal_conv1d",
        variant=variant,
        function=_in_one(_ext.causal_conv1d, names, **options),
        reference=_in_one(causal_conv1d, names, **options),
        make_inputs=_inputs("bias" in names, "state" in names),
        arguments=("x", "weight", *names),
        operands=("x", "weight"),
        contract_shapes=_SHAPES,
        check_shapes=((2, 131, 67, 4), (1, 512, 4096, 4)),
    )


SPECS = (
    _spec(""),
    _spec("bias, state", "bias", "state"),
    _spec("no activation", "bias", activation=None),
)
