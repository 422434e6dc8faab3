"""``attention_plan``: what attention derives from lengths and pages, made once for all layers of a step."""

from typing import Any

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil._ext import AttentionPlan


def attention_plan(
    *,
    q_len: int,
    kv_len: int | None = None,
    lengths: mx.array | None = None,
    q_lengths: mx.array | None = None,
    starts: mx.array | None = None,
    cu_seqlens_q: mx.array | None = None,
    cu_seqlens_k: mx.array | None = None,
    block_table: mx.array | None = None,
    page_size: int | None = None,
    stream: Any = None,
) -> AttentionPlan:
    """Prepares the lengths and pages of a step for ``plan=`` of :func:`mlx_anvil.flash_attention`.

    Every layer of a model attends with the same lengths and the same table of pages. A call with a plan neither checks
    nor converts them again. Under ``mx.compile`` a plan is a constant, as every array that a function captures.

    Args:
        q_len (int): the length of ``q`` in the calls, ``q.shape[2]``; of a packed batch, of all its sequences.
        kv_len (int, optional): that of ``k`` and ``v``, without ``block_table``.
        lengths (array, optional): see :func:`mlx_anvil.flash_attention`.
        q_lengths (array, optional): likewise.
        starts (array, optional): likewise.
        cu_seqlens_q (array, optional): likewise.
        cu_seqlens_k (array, optional): likewise.
        block_table (array, optional): likewise.
        page_size (int, optional): tokens of a page, with ``block_table``.
        stream (Stream or Device, optional): where the calls run. Default: ``None``, MLX's default stream.

    Returns:
        AttentionPlan: the plan.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no lengths are given, or they are out of range; ``kv_len`` or ``page_size`` is missing, or is not
            for such a call.
    """
    return _ext._attention_plan(
        q_len, kv_len, lengths, q_lengths, starts, cu_seqlens_q, cu_seqlens_k, block_table, page_size, stream
    )
