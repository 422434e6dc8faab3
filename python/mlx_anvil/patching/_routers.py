"""Routers of mlx-lm's models, which ``softmax_topk`` computes in one kernel.

Rules say which statements those are, in a method or in a function of the model's module such as
``group_expert_select``. A function is replaced by its copy, in which the rules apply.
"""

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil import _ext
from mlx_anvil.patching._code import names_of_form
from mlx_anvil.patching._group_rules import FUNCTION_RULES
from mlx_anvil.patching._group_rules import RULES as GROUP_RULES
from mlx_anvil.patching._namespace import Namespace
from mlx_anvil.patching._router_rules import RULES as OTHER_RULES
from mlx_anvil.patching._rules import calls_of, rewritten

Function = Callable[..., Any]
RULES = (*OTHER_RULES, *GROUP_RULES)
NAME = "mlx_anvil_route"  # of ``route``, in rules

_MODULES = "mlx_lm.models."


def route(
    logits: mx.array,
    k: int,
    norm: Any,
    scoring: Any = "softmax",
    bias: mx.array | None = None,
    groups: tuple[int, int] = (1, 1),
    factor: float = 1.0,
    *,
    masked_score: float | None = None,
    group_scoring: str = "top2",
) -> tuple[mx.array, mx.array]:
    """The experts of each token, from the best to the worst, and their weights.

    Args:
        logits: the output of the router's projection.
        k: experts of a token.
        norm: whether to divide the weights by their sum.
        scoring: as for ``softmax_topk``; or a layer or method of the model that computes the scores.
        bias: added to the scores for the choice alone.
        groups: how many groups there are, and how many of them to choose from.
        factor: of the weights.
        masked_score: as for ``softmax_topk``.
        group_scoring: as for ``softmax_topk``.
    """
    n_group, topk_group = groups if groups[0] > 1 else (1, 1)
    weights, indices = _ext.softmax_topk(
        logits,
        k,
        norm=bool(norm),
        scoring=_scoring(scoring),
        e_score_correction_bias=bias,
        n_group=n_group,
        topk_group=topk_group,
        masked_score=masked_score if bias is not None else None,
        group_scoring=group_scoring,
        routed_scaling_factor=factor,
    )
    return mx.stop_gradient(indices), weights  # models may read arrays by them


def route_by_ops(
    logits: mx.array,
    k: int,
    norm: Any,
    scoring: Any = "softmax",
    bias: mx.array | None = None,
    groups: tuple[int, int] = (1, 1),
    factor: float = 1.0,
    *,
    masked_score: float | None = None,
    group_scoring: str = "top2",
) -> tuple[mx.array, mx.array]:
    """The same in MLX ops, for what ``softmax_topk`` does not take."""
    scores = _scores(logits, scoring)
    ranking = mx.stop_gradient(scores if bias is None else scores + bias)
    n_group, topk_group = groups
    if n_group > topk_group:
        ranking = mx.unflatten(ranking, axis=-1, shape=(n_group, -1))
        best = mx.topk(ranking, 2 if group_scoring == "top2" else 1, axis=-1).sum(axis=-1, keepdims=True)
        left = mx.argpartition(best, kth=n_group - topk_group - 1, axis=-2)[..., : n_group - topk_group, :]
        value = mx.array(-mx.inf if masked_score is None else masked_score, ranking.dtype)
        ranking = mx.flatten(mx.put_along_axis(ranking, left, value, axis=-2), -2, -1)
    indices = mx.stop_gradient(mx.argpartition(-ranking, kth=k - 1, axis=-1)[..., :k])
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if norm:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return indices, weights if isinstance(factor, int | float) and factor == 1 else weights * factor


def _scores(logits: mx.array, scoring: Any) -> mx.array:
    if callable(scoring):
        scores: mx.array = scoring(logits)
        return scores
    if scoring == "softmax":
        return mx.softmax(logits, axis=-1, precise=True)
    return mx.sigmoid(logits) if scoring == "sigmoid" else mx.sqrt(nn.softplus(logits))


def _scoring(scoring: Any) -> str:
    if isinstance(scoring, str):
        return scoring
    names = {nn.Softmax: "softmax", nn.Sigmoid: "sigmoid"}
    if type(scoring) in names:
        return names[type(scoring)]
    function = getattr(scoring, "__func__", None)
    if isinstance(function, FunctionType) and names_of_form(function, _of_laguna) is not None:
        return str(scoring.__self__.score_func)
    raise ValueError(f"[softmax_topk] scoring is {scoring!r}; allowed: a softmax or sigmoid.")


def _of_laguna(self: Any, logits: mx.array) -> mx.array:
    if self.score_func == "sigmoid":
        return mx.sigmoid(logits)
    if self.score_func == "sqrtsoftplus":
        return mx.sqrt(nn.softplus(logits))
    raise ValueError(f"Unknown moe_router_score_func: {self.score_func!r}")


# ---- functions of modules --------------------------------------------------------------------------------------------


def is_router(value: Any) -> bool:
    """True for a function, or a result of ``mx.compile``, that is a router as a whole."""
    code = getattr(value, "__code__", None)
    if code is None or "argpartition" not in code.co_names or getattr(value, "__globals__", {}).get("mx") is not mx:
        return False
    return bool(calls_of(value, FUNCTION_RULES))


def swapped(router: Function) -> Function:
    """The router with ``softmax_topk`` in its statements. The result is not compiled: it is one kernel."""
    function: Any = router
    namespace = Namespace.of(function.__globals__)
    namespace[NAME] = route
    ours = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    ours.__kwdefaults__ = function.__kwdefaults__
    return rewritten(function, ours, FUNCTION_RULES)


def routers() -> Iterator[tuple[str, Function]]:
    """The functions of the modules of mlx-lm that were imported, each with its name and that of its module."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(_MODULES):
            for own, value in list(vars(module).items()):
                if getattr(value, "__module__", None) == name and is_router(value):
                    yield f"{own} of {name.rpartition('.')[2]}", value
