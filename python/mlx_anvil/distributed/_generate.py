"""``prefill`` and ``generate``: a prompt and the tokens after it, over a sharded cache."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_anvil.distributed._order import ORDER
from mlx_anvil.distributed._sharded_cache import ShardedKVCache, make_sharded_cache

Sampler = Callable[[mx.array], mx.array]


def prefill(
    model: nn.Module,
    tokens: mx.array | Sequence[int],
    cache: Sequence[ShardedKVCache],
    *,
    step_size: int = 2048,
) -> mx.array:
    """Runs a prompt through a model on all ranks of a group together.

    Each step takes ``step_size`` tokens per rank: rank r computes the r-th part, and stores its keys and values. Its
    queries see the tokens of this step by ring attention. To see those of earlier steps, queries travel to the ranks
    that hold the keys. A last step may be shorter. It is padded to equal parts, and the padding is not stored. The last
    token runs on every rank, so that every rank has its logits.

    Every rank calls it with the same tokens.

    Args:
        model (mlx.nn.Module): a model of mlx-lm after :func:`mlx_anvil.patch`.
        tokens (array or sequence of int): ``[T]`` or ``[B, T]``, prompts of one length, with at least one token.
        cache (sequence of ShardedKVCache): of :func:`mlx_anvil.distributed.make_sharded_cache`. It may hold earlier
            tokens.
        step_size (int): tokens of a rank in a step. More of them take more memory. Default: 2048.

    Returns:
        array: ``[B, vocabulary]``, the logits of the last token.

    Raises:
        TypeError: ``tokens`` are not integers, or ``cache`` is not of ``ShardedKVCache``.
        ValueError: there is no token, or ``step_size`` is less than 1.
    """
    name = "[prefill]"
    rows = _rows(tokens, name)
    group = _group_of(cache, name)
    _check_step_size(step_size, name)
    ranks, rank = group.size(), group.rank()
    split = rows.shape[1] - 1
    for begin in range(0, split, step_size * ranks):
        count = min(step_size * ranks, split - begin)
        part = -(-count // ranks)  # one size for all: ring attention takes equal parts
        first, end = (begin + min(count, r * part) for r in (rank, rank + 1))
        own = mx.pad(rows[:, first:end], [(0, 0), (0, part - (end - first))])
        _step(model, own, cache, count)
    logits: mx.array = model(rows[:, split:], cache=cache)
    return logits[:, -1]


def _step(model: nn.Module, own: mx.array, cache: Sequence[ShardedKVCache], count: int) -> None:
    """Runs the rank's part of ``count`` tokens."""
    for layer in cache:
        layer.split_next(count)
    try:
        model(own, cache=cache)
    finally:
        for layer in cache:
            layer.split_next(None)
    mx.eval([layer.state for layer in cache])
    for layer in cache:
        layer.settle()
    ORDER.settle()  # so that the last layer's attention, which nobody reads, does not run


def generate(
    model: nn.Module,
    tokens: mx.array | Sequence[int],
    *,
    cache: Sequence[ShardedKVCache] | None = None,
    group: mx.distributed.Group | None = None,
    step_size: int = 2048,
    sampler: Sampler | None = None,
    **options: Any,
) -> Iterator[int]:
    """Generates the tokens that follow a prompt, on all ranks of a group together.

    A prefill as :func:`mlx_anvil.distributed.prefill` makes it, then mlx-lm's ``generate_step``. Each token is the one
    that the first rank chose: machines of different kinds may round differently. Every rank calls it with the same
    arguments, and stops after the same token.

    Args:
        model (mlx.nn.Module): a model of mlx-lm after :func:`mlx_anvil.patch`.
        tokens (array or sequence of int): ``[T]``, at least one.
        cache (sequence of ShardedKVCache, optional): may hold earlier tokens. Default: a new one.
        group (mx.distributed.Group, optional): of a new cache. Default: ``mx.distributed.init()``.
        step_size (int): see :func:`mlx_anvil.distributed.prefill`.
        sampler (callable, optional): takes log probabilities ``[1, vocabulary]`` and returns a token, as those of
            mlx-lm. Default: the likeliest.
        **options: ``max_tokens`` and ``logits_processors`` of ``generate_step``.

    Yields:
        int: a token.

    Raises:
        ImportError: mlx-lm is not installed.
        TypeError: ``tokens`` are not integers, or ``cache`` is not of ``ShardedKVCache``.
        ValueError: ``tokens`` is empty or a batch; ``step_size`` is less than 1; another option is given.
    """
    name = "[generate]"
    rows = _rows(tokens, name)
    if rows.shape[0] != 1:
        raise ValueError(f"{name} tokens is a batch of {rows.shape[0]}; allowed: one prompt.")
    if unknown := options.keys() - {"max_tokens", "logits_processors"}:
        raise ValueError(f"{name} options has {sorted(unknown)}; allowed: max_tokens, logits_processors.")
    _check_step_size(step_size, name)
    layers = make_sharded_cache(model, group) if cache is None else list(cache)
    sampler = same_token(sampler or _likeliest, _group_of(layers, name))
    return _steps(model, rows, layers, step_size, sampler, options)


def _steps(
    model: nn.Module,
    rows: mx.array,
    cache: list[ShardedKVCache],
    step_size: int,
    sampler: Sampler,
    options: dict[str, Any],
) -> Iterator[int]:
    from mlx_lm.generate import generate_step

    if rows.shape[1] > 1:
        mx.eval(prefill(model, rows[:, :-1], cache, step_size=step_size))
    try:
        for token, _ in generate_step(rows[0, -1:], model, prompt_cache=cache, sampler=sampler, **options):
            yield int(token)
    finally:
        ORDER.wait()  # generate_step begins a token more


def same_token(sampler: Sampler, group: mx.distributed.Group) -> Sampler:
    """A sampler whose tokens are those of the first rank, on every rank."""
    if group.size() == 1:
        return sampler

    def of_first_rank(logprobs: mx.array) -> mx.array:
        token = mx.distributed.all_gather(sampler(logprobs)[None], group=group)[0]
        ORDER.set_last(token)
        return token

    return of_first_rank


def _likeliest(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _rows(tokens: mx.array | Sequence[int], name: str) -> mx.array:
    rows = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
    if rows.size == 0 or rows.ndim not in (1, 2):
        raise ValueError(f"{name} tokens has shape {rows.shape}; allowed: [T] or [B, T], at least one token.")
    if not mx.issubdtype(rows.dtype, mx.integer):
        raise TypeError(f"{name} tokens has dtype {rows.dtype}; allowed: integers.")
    return rows[None] if rows.ndim == 1 else rows


def _check_step_size(step_size: Any, name: str) -> None:
    if type(step_size) is not int or step_size < 1:
        raise ValueError(f"{name} step_size is {step_size!r}; allowed: an int of at least 1.")


def _group_of(cache: Sequence[ShardedKVCache], name: str) -> mx.distributed.Group:
    for layer in cache:
        if not isinstance(layer, ShardedKVCache):
            raise TypeError(f"{name} cache has a {type(layer).__name__}; allowed: ShardedKVCache.")
    if not cache:
        raise ValueError(f"{name} cache is empty; allowed: one ShardedKVCache for each layer.")
    return cache[0].group
