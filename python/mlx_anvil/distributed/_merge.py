"""``merge_attention``: partial results of attention over parts of the keys become the result over all keys."""

from collections.abc import Sequence
from typing import Literal, overload

import mlx.core as mx

_NAME = "[merge_attention]"
Arrays = mx.array | Sequence[mx.array]


@overload
def merge_attention(outputs: Arrays, lses: Arrays, *, return_lse: Literal[False] = False) -> mx.array: ...


@overload
def merge_attention(outputs: Arrays, lses: Arrays, *, return_lse: Literal[True]) -> tuple[mx.array, mx.array]: ...


def merge_attention(outputs: Arrays, lses: Arrays, *, return_lse: bool = False) -> mx.array | tuple[mx.array, mx.array]:
    """Merges partial attention over disjoint sets of keys by the log-sum-exp.

    Formula:
        ``lse = log(sum_r exp(lses[r]))``; ``out = sum_r exp(lses[r] - lse) outputs[r]``

    A part in which a query sees no key has ``lses[r] = -inf`` and counts as zero. If that is so in all parts, the output
    is 0 and the log-sum-exp -inf. The arithmetic is float32. Both results are differentiable with respect to
    ``outputs`` and ``lses``.

    Args:
        outputs (array or sequence of array): ``[n, ..., D]``, the outputs of :func:`mlx_anvil.flash_attention` for each
            of ``n`` parts; or a sequence of ``n`` arrays ``[..., D]``.
        lses (array or sequence of array): ``[n, ...]``, their log-sum-exps; or a sequence of ``n`` arrays.
        return_lse (bool): also return the merged log-sum-exp. Default: ``False``.

    Returns:
        array or tuple[array, array]: ``[..., D]`` in the dtype of ``outputs``; with ``return_lse`` also ``[...]`` in
        float32.

    Raises:
        TypeError: ``outputs`` or ``lses`` are not floating point.
        ValueError: there is no part, or the shapes do not match.

    After Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    outputs, lses = _stacked(outputs, "outputs"), _stacked(lses, "lses")
    if outputs.ndim < 2 or outputs.shape[:-1] != lses.shape:
        raise ValueError(
            f"{_NAME} outputs has shape {outputs.shape} and lses {lses.shape}; allowed: [n, ..., D] and [n, ...]."
        )
    if outputs.shape[0] == 0:
        raise ValueError(f"{_NAME} outputs has no part; allowed: at least one.")
    lses = lses.astype(mx.float32)
    is_unseen = lses == -mx.inf
    finite = mx.where(is_unseen, mx.finfo(mx.float32).min, lses)  # -inf less -inf would be NaN
    shares = mx.where(is_unseen, 0.0, mx.softmax(finite, axis=0))[..., None]
    out = (shares * outputs.astype(mx.float32)).sum(axis=0).astype(outputs.dtype)
    return (out, mx.where(is_unseen.all(axis=0), -mx.inf, mx.logsumexp(finite, axis=0))) if return_lse else out


def _stacked(parts: Arrays, name: str) -> mx.array:
    if not isinstance(parts, mx.array):
        if not len(parts):
            raise ValueError(f"{_NAME} {name} is empty; allowed: at least one part.")
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"{_NAME} {name} has arrays of shapes {sorted(shapes)}; allowed: one shape.")
        parts = mx.stack(list(parts))
    if not mx.issubdtype(parts.dtype, mx.floating):
        raise TypeError(f"{_NAME} {name} has dtype {parts.dtype}; allowed: floating point.")
    return parts
