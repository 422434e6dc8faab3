"""softmax_topk: its definition in MLX ops, and its entries in the registry."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._op_spec import OpSpec
from mlx_anvil.reference import _float64


def softmax_topk(
    logits: mx.array,
    k: int,
    *,
    norm: bool = True,
    scoring: str = "softmax",
    sorted: bool = True,
) -> tuple[mx.array, mx.array]:
    """The ``k`` largest of ``softmax(logits)`` or ``sigmoid(logits)`` per row, and their indices, both ``[..., k]``.

    With ``norm``, they are divided by their sum.
    """
    # MLX's sort is stable and puts NaN last. It sorts the reversed row, so that of equal logits the lowest index wins.
    order = mx.argsort(mx.stop_gradient(logits)[..., ::-1], axis=-1)[..., ::-1]
    indices = (logits.shape[-1] - 1 - order)[..., :k].astype(mx.uint32)
    if not sorted:
        indices = mx.sort(indices, axis=-1)
    scores = _float64.softmax(logits) if scoring == "softmax" else _float64.sigmoid(logits)
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if norm:
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    return weights, indices


def _spaced_logits(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Logits in random order, so far apart that the steps of finite differences do not change the choice of experts.

    The largest are near 0, where the sigmoid is steep.
    """
    ranks = mx.argsort(mx.random.uniform(shape=shape), axis=-1).astype(mx.float32)
    logits = 0.3 * (ranks - shape[-1] + 4) + mx.random.uniform(-0.05, 0.05, shape)
    return [logits.astype(dtype)]


def _weights_of(router: Callable[..., tuple[mx.array, mx.array]], **options: Any) -> Callable[..., mx.array]:
    return lambda logits, **more: router(logits, **options, **more)[0]


def _spec(variant: str, shapes: tuple[tuple[int, ...], ...], check: tuple[int, ...], **options: Any) -> OpSpec:
    return OpSpec(
        name="softmax_topk",
        variant=variant,
        function=_weights_of(_ext.softmax_topk, **options),
        reference=_weights_of(softmax_topk, **options),
        make_inputs=_spaced_logits,
        arguments=("logits",),
        operands=("logits",),
        contract_shapes=shapes,
        check_shapes=(check,),
    )


_FEW_SHAPES = ((0, 9), (3, 130), (7, 3, 13), (2, 5, 11))

SPECS = (
    _spec("", ((0, 9), (3, 0, 8), (4,), (1, 1, 257), (3, 1031), (7, 3, 13), (2, 5, 11)), check=(512, 128), k=4),
    _spec("all experts", _FEW_SHAPES, check=(512, 64), k=2, norm=False),
    _spec("sigmoid", _FEW_SHAPES, check=(512, 256), k=8, scoring="sigmoid"),
)
