"""Attention over keys that are split over the ranks of a group, for queries that every rank has."""

import contextlib
from typing import Any, Literal, overload

import mlx.core as mx

from mlx_anvil import _ext
from mlx_anvil.distributed._merge import merge_attention

_NAME = "[decode_attention]"
Stream = Any


@overload
def decode_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    group: mx.distributed.Group | None = None,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    positions: mx.array | None = None,
    offset: int | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    return_lse: Literal[False] = False,
    stream: Stream = None,
) -> mx.array: ...


@overload
def decode_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    group: mx.distributed.Group | None = None,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    positions: mx.array | None = None,
    offset: int | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    return_lse: Literal[True],
    stream: Stream = None,
) -> tuple[mx.array, mx.array]: ...


def decode_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    group: mx.distributed.Group | None = None,
    scale: float | None = None,
    mask: str | mx.array | None = None,
    positions: mx.array | None = None,
    offset: int | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    lengths: mx.array | None = None,
    return_lse: bool = False,
    stream: Stream = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention of the same queries on every rank over keys and values of which each rank holds some.

    Formula:
        That of :func:`mlx_anvil.flash_attention`, over the keys of all ranks.

    Each rank attends to its own keys. One ``all_gather`` exchanges the outputs and log-sum-exps, and
    :func:`mlx_anvil.distributed.merge_attention` merges them, so that every rank returns the same bits. A rank sends
    ``B * Hq * Lq * (Dv + 1)`` numbers, however many keys there are. All ranks call it with equal queries and options.

    The result is for inference: the gradient of ``q`` is that of the rank's own keys alone.

    Args:
        q (array): queries ``[B, Hq, Lq, D]``, the same on every rank.
        k (array): the rank's keys ``[B, Hkv, Lk, D]``. ``Lk`` may differ between ranks, and be 0.
        v (array): the rank's values ``[B, Hkv, Lk, Dv]``.
        group (mx.distributed.Group, optional): Default: ``mx.distributed.init()``.
        scale (float, optional): factor of ``q . k``. Default: ``D ** -0.5``.
        mask (str or array, optional): ``"causal"``: a query sees keys up to its own position; or an array over the
            rank's own keys, ``[B, Hq, Lq, Lk]`` or what broadcasts with it. Default: every query sees every key.
        positions (array, optional): ``[Lk]`` integers, the positions of the rank's keys in the sequence. For
            ``"causal"`` and ``window_size``.
        offset (int, optional): the position of the first query; the others follow it. Also for those.
        window_size (int, optional): a query at position ``p`` sees keys at positions greater than
            ``p - window_size``; with ``"causal"`` these are at most ``window_size`` keys.
        softcap (float, optional): see :func:`mlx_anvil.flash_attention`.
        sinks (array, optional): ``[Hq]``, likewise. Every rank passes them; they count once.
        lengths (array, optional): ``[B]`` integers: of each batch, only the first ``lengths[b]`` of the rank's keys are
            keys.
        return_lse (bool): also return the log-sum-exp. Default: ``False``.
        stream (Stream or Device, optional): where to run. Default: ``None``, MLX's default stream.

    Returns:
        array or tuple[array, array]: ``[B, Hq, Lq, Dv]`` in the promoted dtype of ``q``, ``k`` and ``v``; with
        ``return_lse`` also ``[B, Hq, Lq]`` in float32.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes or dtypes do not match; ``"causal"`` or ``window_size`` come without ``positions`` and
            ``offset``, or with a mask array.

    After Dao et al. 2023, "Flash-Decoding for long-context inference", across processes.
    """
    group = group or mx.distributed.init()
    if mask is not None and not isinstance(mask, mx.array) and mask != "causal":
        raise ValueError(f'{_NAME} mask is {mask!r}; allowed: None, "causal" or an array.')
    if isinstance(mask, str) or window_size is not None:
        mask = _by_position(q, k, mask, positions, offset, window_size)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": own_sinks(sinks, group)}
    with contextlib.nullcontext() if stream is None else mx.stream(stream):
        out, lse = _ext.flash_attention(q, k, v, mask=mask, lengths=lengths, return_lse=True, **options)
        out, lse = gather_and_merge(out, lse, group)
    return (out, lse) if return_lse else out


def own_sinks(sinks: mx.array | None, group: mx.distributed.Group) -> mx.array | None:
    """The sinks on the first rank, so that they count once. The others have some, too: all check the same call."""
    if not isinstance(sinks, mx.array) or group.rank() == 0:
        return sinks
    return mx.full(sinks.shape, -mx.inf, sinks.dtype)


def visible(positions: mx.array, offset: int, queries: int, window_size: int | None, causal: bool = True) -> mx.array:
    """A bool mask ``[queries, keys]`` of keys at these positions, for queries from ``offset`` on."""
    rows, columns = mx.arange(offset, offset + queries)[:, None], positions[None]
    mask = columns <= rows if causal else mx.ones((queries, positions.size), mx.bool_)
    return mask if window_size is None else mask & (columns > rows - window_size)


def gather_and_merge(out: mx.array, lse: mx.array, group: mx.distributed.Group) -> tuple[mx.array, mx.array]:
    """Merges the partial results of all ranks: ``[B, H, L, D]`` and, in float32, ``[B, H, L]``."""
    if group.size() == 1:
        return out, lse
    # One message instead of two: the bits of a float32 fill one or two columns of the output's dtype.
    packed = mx.concatenate([out, lse[..., None].view(out.dtype)], axis=-1)
    parts = mx.distributed.all_gather(packed[None], group=group)
    dim = out.shape[-1]
    return merge_attention(parts[..., :dim], parts[..., dim:].view(mx.float32)[..., 0], return_lse=True)


def _by_position(q: mx.array, k: mx.array, mask: Any, positions: Any, offset: Any, window_size: int | None) -> mx.array:
    if isinstance(mask, mx.array):
        raise ValueError(f'{_NAME} window_size comes with a mask array; allowed: mask None or "causal".')
    if window_size is not None and (type(window_size) is not int or window_size < 1):
        raise ValueError(f"{_NAME} window_size is {window_size!r}; allowed: an int of at least 1, or None.")
    if not isinstance(positions, mx.array) or type(offset) is not int:
        given = f"{type(positions).__name__} and {type(offset).__name__}"
        raise ValueError(
            f'{_NAME} positions and offset are {given}; allowed with "causal" or window_size: an array and an int.'
        )
    if positions.shape != (k.shape[2],):
        raise ValueError(f"{_NAME} positions has shape {positions.shape}; allowed: {(k.shape[2],)}, one of each key.")
    return visible(positions, offset, q.shape[2], window_size, causal=mask is not None)
