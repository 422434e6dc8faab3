"""Attention over a sequence that is split over processes."""

from typing import Any, Literal, overload

import mlx.core as mx

from mlx_anvil import _ext

Window = int | tuple[int, int] | None
Layout = Literal["contiguous", "zigzag"]
Stream = mx.Stream | mx.Device | mx.DeviceType | None


@overload
def ring_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    group: mx.distributed.Group | None = None,
    scale: float | None = None,
    mask: Literal["causal"] | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    layout: Layout = "contiguous",
    return_lse: Literal[False] = False,
    stream: Stream = None,
) -> mx.array: ...
@overload
def ring_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    group: mx.distributed.Group | None = None,
    scale: float | None = None,
    mask: Literal["causal"] | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    layout: Layout = "contiguous",
    return_lse: Literal[True],
    stream: Stream = None,
) -> tuple[mx.array, mx.array]: ...
def ring_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    group: mx.distributed.Group | None = None,
    scale: float | None = None,
    mask: Literal["causal"] | None = None,
    window_size: Window = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    layout: Layout = "contiguous",
    return_lse: bool = False,
    stream: Stream = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over a sequence that is split over the ranks of a group, with gradients.

    Each rank has its part of the queries, keys and values, and gets its part of the result, as
    :func:`mlx_anvil.flash_attention` of the whole arrays would compute it: positions, ``"causal"``, windows and lengths
    refer to the whole sequence. Formula::

        s[i, j] = cap(scale * q[i] . k[j])            cap(x) = softcap * tanh(x / softcap)
        lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
        out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]

    Keys and values go round the ring of ranks, and each rank joins partial results by their log-sum-exp. On the CPU
    they go in pieces, each of which is received while the one before is used; a rank holds its own part and two pieces
    of others. Pieces go no further than a query needs them. For the gradients they go round once more, and theirs with
    them, in float32. On a GPU, whole parts go round. The memory of a rank is that of its part.

    All ranks have to make the call with the same shapes and options, in one order with all else that they send and
    receive. A process must not communicate on another stream at the same time.

    Args:
        q (mlx.core.array): queries ``[B, Hq, L, D]`` of this rank's part, ``L`` rows of ``n * L``; float32, float16 or
            bfloat16.
        k (mlx.core.array): keys ``[B, Hkv, L, D]``, with ``Hq`` a multiple of ``Hkv``.
        v (mlx.core.array): values ``[B, Hkv, L, Dv]``.
        group (mlx.core.distributed.Group): the ranks. Default: ``None``, all of ``mx.distributed.init()``.
        scale: factor of ``q . k``. Default: ``D ** -0.5``.
        mask: ``"causal"``, or None: every query sees every key. Default: ``None``.
        window_size: ``(left, right)``, the number of keys that a query sees before and after its own position, as for
            :func:`mlx_anvil.flash_attention`.
        softcap: bounds the scores to (-softcap, softcap). Default: ``None``.
        sinks (mlx.core.array): ``[Hq]``, one logit per head. Each rank's gradient is that of its own queries; sum it
            over the ranks, as that of any other parameter.
        lengths (mlx.core.array): ``[B]`` integers: of each whole sequence, only the first ``lengths[b]`` rows are in
            use. Rows of the result past the end are 0. Default: all.
        layout: how the sequence is split. ``"contiguous"``: rank r has part r of n. ``"zigzag"``: of 2n chunks, rank r
            has chunks r and 2n - 1 - r, one after the other; with a causal mask all ranks then have the same work.
        return_lse: also return ``lse``.
        stream: where to run. Default: ``None``, MLX's default stream.

    Returns:
        mlx.core.array or tuple: ``[B, Hq, L, Dv]`` of this rank's part; with ``return_lse`` also the natural log-sum-exp
        ``[B, Hq, L]`` in float32.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ranks, head counts or head dims do not match; ``q`` and ``k`` differ in length; the length is odd
            with ``"zigzag"``; ``mask`` or ``layout`` is another string; a length is out of range; softcap or window is
            negative.
        RuntimeError: an earlier transfer of this process failed. One that fails during the evaluation raises there, and
            names the rank, as do neighbours whose calls differ.

    After Liu et al. 2023, "Ring Attention with Blockwise Transformers"; the zig-zag layout balances the causal mask as
    the stripes of Brandon et al. 2023, "Striped Attention".
    """
    result: Any = _ext._ring_attention(
        q,
        k,
        v,
        group=group,
        scale=scale,
        mask=mask,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        lengths=lengths,
        layout=layout,
        return_lse=return_lse,
        stream=stream,
    )
    return result  # type: ignore[no-any-return]
