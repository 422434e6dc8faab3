"""Calls that launch every kernel of the op, and the calls that models make (tests/metal_launches)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import mlx.core as mx

import mlx_anvil
from mlx_anvil.reference import DTYPES
from tests.metal_launches.inputs import (
    MODEL_DTYPES,
    Call,
)

GROUPS = {"n_group": 4, "topk_group": 2}
STEERED = ({"has_bias": True}, GROUPS, {"has_bias": True} | GROUPS)


def every_kernel() -> Iterator[Call]:
    for dtype, experts in product(DTYPES, (8, 200, 600)):
        logits, cotangent = mx.zeros((3, experts), dtype), mx.zeros((3, 2), dtype)
        for norm, scoring, in_order in product((False, True), ("softmax", "sigmoid"), (False, True)):
            options = {"k": 2, "norm": norm, "scoring": scoring, "sorted": in_order}
            router = partial(lambda x, **o: mlx_anvil.softmax_topk(x, **o)[0], **options)
            yield lambda f=router, x=logits, c=cotangent: mx.vjp(f, [x], [c])
        bias = mx.zeros(experts)
        for norm, scoring, steer in product((False, True), ("softmax", "sqrtsoftplus"), (*STEERED, {})):
            options = {"k": 2, "norm": norm, "scoring": scoring} | steer
            if options.pop("has_bias", False):
                options["e_score_correction_bias"] = bias
            router = partial(lambda x, **o: mlx_anvil.softmax_topk(x, **o)[0], **options)
            yield lambda f=router, x=logits, c=cotangent: mx.vjp(f, [x], [c])


def of_models() -> Iterator[Call]:
    for dtype in (*MODEL_DTYPES, mx.float32):
        # Mixtral and Qwen 3; Qwen 3 without renormalised weights; DeepSeek V3.
        for experts, norm, scoring in ((8, True, "softmax"), (128, False, "softmax"), (256, True, "sigmoid")):
            logits = mx.zeros((4, experts), dtype)
            yield partial(mlx_anvil.softmax_topk, logits, k=4, norm=norm, scoring=scoring)
    # DeepSeek V3 in full and GLM 4.5, which compute scores in float32.
    for experts, groups, kept in ((256, 8, 4), (128, 1, 1)):
        options = {"e_score_correction_bias": mx.zeros(experts), "n_group": groups, "topk_group": kept}
        yield partial(mlx_anvil.softmax_topk, mx.zeros((4, experts)), k=8, scoring="sigmoid", **options)
