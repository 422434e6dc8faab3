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
    e_score_correction_bias: mx.array | None = None,
    n_group: int = 1,
    topk_group: int | None = None,
    group_scoring: str = "top2",
    masked_score: float | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """The scores of the ``k`` best experts per row, and their indices, both ``[..., k]``.

    Those are the largest scores plus biases within the ``topk_group`` best groups. With ``norm``, the scores are divided
    by their sum.
    """
    scores = _SCORES[scoring](logits)
    ranking = mx.stop_gradient(logits)  # without a bias: scores increase with the logits, but may round to the same
    if e_score_correction_bias is not None:
        ranking = mx.stop_gradient(scores + e_score_correction_bias.astype(scores.dtype))
    if topk_group is not None and topk_group < n_group:
        has_sums = e_score_correction_bias is not None or group_scoring == "max"
        of_groups = ranking if has_sums else mx.stop_gradient(scores)
        kept = _best_groups(of_groups, n_group, topk_group, group_scoring)
        has_zero = masked_score == 0 and e_score_correction_bias is not None
        ranking = mx.where(kept, ranking, 0.0 if has_zero else -mx.inf)
    indices = _descending(ranking)[..., :k].astype(mx.uint32)
    if not sorted:
        indices = mx.sort(indices, axis=-1)
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if norm:
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    return (weights if routed_scaling_factor == 1 else weights * routed_scaling_factor), indices


def _sqrt_softplus(x: mx.array) -> mx.array:
    # In float16, softplus underflows to 0 so early that the slope of its root would be NaN.
    wide = x if x.dtype == mx.float64 else x.astype(mx.float32)
    return mx.sqrt(mx.maximum(wide, 0) + mx.log1p(_float64.exp(-mx.abs(wide)))).astype(x.dtype)


_SCORES = {"softmax": _float64.softmax, "sigmoid": _float64.sigmoid, "sqrtsoftplus": _sqrt_softplus}


def _descending(x: mx.array) -> mx.array:
    """The order of a row: NaN first, the lowest index first of equal numbers."""
    # MLX's sort is stable and puts NaN last. It sorts the reversed row, so that of equal numbers the lowest index wins.
    return x.shape[-1] - 1 - mx.argsort(x[..., ::-1], axis=-1)[..., ::-1]


def _best_groups(scores: mx.array, n_group: int, topk_group: int, group_scoring: str) -> mx.array:
    """True for the experts of the best groups."""
    groups = mx.unflatten(scores, -1, (n_group, -1))
    best = mx.sort(groups, axis=-1)[..., -1 if group_scoring == "max" else -2 :].sum(axis=-1)
    places = mx.argsort(_descending(best), axis=-1)
    return mx.flatten(mx.broadcast_to((places < topk_group)[..., None], groups.shape), -2)


def _spaced_logits(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Logits in random order, so far apart that the steps of finite differences do not change the choice of experts.

    The largest are near 0, where the sigmoid is steep.
    """
    ranks = mx.argsort(mx.random.uniform(shape=shape), axis=-1).astype(mx.float32)
    logits = 0.3 * (ranks - shape[-1] + 4) + mx.random.uniform(-0.05, 0.05, shape)
    return [logits.astype(dtype)]


def _steered_logits(shape: tuple[int, ...], dtype: mx.Dtype) -> list[mx.array]:
    """Logits and biases from -36 to 36 that are farther apart than scores are, and so are those of four groups."""
    experts = shape[-1]
    size = max(experts // 4, 1)
    groups = mx.random.permutation(4)
    order = mx.concatenate([size * groups[i] + mx.random.permutation(size) for i in range(4)])
    bias = 72 * (order[:experts] + 0.5) / max(experts, 1) - 36
    return [mx.random.uniform(-2, 2, shape).astype(dtype), bias.astype(dtype)]


def _weights_of(router: Callable[..., tuple[mx.array, mx.array]], **options: Any) -> Callable[..., mx.array]:
    def weights(logits: mx.array, bias: mx.array | None = None, **more: Any) -> mx.array:
        return router(logits, **({} if bias is None else {"e_score_correction_bias": bias}), **options, **more)[0]

    return weights


def _spec(variant: str, shapes: tuple[tuple[int, ...], ...], check: tuple[int, ...], **options: Any) -> OpSpec:
    has_bias = options.pop("has_bias", False)
    return OpSpec(
        name="softmax_topk",
        variant=variant,
        function=_weights_of(_ext.softmax_topk, **options),
        reference=_weights_of(softmax_topk, **options),
        make_inputs=_steered_logits if has_bias else _spaced_logits,
        arguments=("logits", "e_score_correction_bias") if has_bias else ("logits",),
        operands=("logits",),
        without_gradient=("e_score_correction_bias",),
        contract_shapes=shapes,
        check_shapes=(check,),
    )


_FEW_SHAPES = ((0, 9), (3, 130), (7, 3, 13), (2, 5, 11))
_GROUPED = ((0, 8), (3, 24), (7, 3, 12), (2, 5, 20))
_DEEPSEEK_V3: dict[str, Any] = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

SPECS = (
    _spec("", ((0, 9), (3, 0, 8), (4,), (1, 1, 257), (3, 1031), (7, 3, 13), (2, 5, 11)), check=(512, 128), k=4),
    _spec("all experts", _FEW_SHAPES, check=(512, 64), k=2, norm=False),
    _spec("sigmoid", _FEW_SHAPES, check=(512, 256), k=8, scoring="sigmoid"),
    _spec("sqrtsoftplus", _FEW_SHAPES, check=(512, 256), k=8, scoring="sqrtsoftplus"),
    _spec("bias and groups", _GROUPED, check=(512, 128), has_bias=True, k=4, **_DEEPSEEK_V3),
    _spec("groups", _GROUPED, check=(512, 160), k=3, norm=False, n_group=4, topk_group=2, group_scoring="max"),
    _spec("bias", _GROUPED, check=(512, 64), has_bias=True, k=4, norm=False),
)
