"""``reduce_gradients``: sums over processes that run while the backward pass still computes."""

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

BUCKET_BYTES = 8 << 20
_NAME = "[reduce_gradients]"
_streams = threading.local()


def reduce_gradients(
    gradients: Any,
    group: mx.distributed.Group | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    stream: mx.Stream | None = None,
) -> Any:
    """The mean of the gradients over the processes of ``group``, reduced as the gradients are made.

    The result is that of ``mlx.nn.average_gradients``. The difference is when the processes communicate: MLX orders the
    graph of that function such that every sum comes after the whole backward pass. Here a sum depends on the one before
    it, and they begin with the last layers, whose gradients are ready first. So a sum runs while earlier layers compute,
    and all processes issue their sums in the same order. Evaluate the result together with the loss, in one ``mx.eval``.

    Args:
        gradients: a tree of arrays, of the same shapes and dtypes in all processes.
        group: the processes; the global group of ``mx.distributed.init()`` if None. Of one process: ``gradients`` is
            returned.
        bucket_bytes: gradients of one dtype are joined until they have this size, and summed in one call. Small buckets
            overlap better; each costs the latency of one more sum.
        stream: where the processes communicate. Default: on the CPU a stream of its own, since sums on that of the
            backward pass would wait for it; on a GPU the default of the backend.

    Returns:
        A tree like ``gradients``.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """
    check_bucket_bytes(bucket_bytes, _NAME)
    group = group or mx.distributed.init()
    flat = flattened(gradients)
    if group.size() == 1 or not flat:
        return gradients
    arrays = [array for _, array in flat]
    chain, reduced = Chain(group, stream), list(arrays)
    for bucket in buckets(arrays, bucket_bytes):
        total = chain.all_sum(joined([arrays[index] for index in bucket])) / group.size()
        for index, part in zip(bucket, parted(total, [arrays[index] for index in bucket]), strict=True):
            reduced[index] = part
    return tree_unflatten([(path, array) for (path, _), array in zip(flat, reduced, strict=True)])


class Chain:
    """Communication in one order, that of the calls, whatever the order in which MLX evaluates the graph."""

    def __init__(self, group: mx.distributed.Group, stream: mx.Stream | None = None) -> None:
        self.group = group
        self._stream = stream or _communication_stream()
        self._last: mx.array | None = None

    def all_sum(self, array: mx.array) -> mx.array:
        return self._record(mx.distributed.all_sum(self._after(array), group=self.group, stream=self._stream))

    def all_gather(self, array: mx.array) -> mx.array:
        return self._record(mx.distributed.all_gather(self._after(array), group=self.group, stream=self._stream))

    def sum_scatter(self, array: mx.array) -> mx.array:
        return self._record(mx.distributed.sum_scatter(self._after(array), group=self.group, stream=self._stream))

    def _after(self, array: mx.array) -> mx.array:
        return array if self._last is None else mx.depends([array], [self._last])[0]

    def _record(self, array: mx.array) -> mx.array:
        self._last = array
        return array


def _communication_stream() -> mx.Stream | None:
    if mx.default_device().type != mx.DeviceType.cpu:
        return None
    if not hasattr(_streams, "own"):  # one for each thread: MLX's streams belong to threads
        _streams.own = mx.new_stream(mx.cpu)
    own: mx.Stream = _streams.own
    return own


def buckets(arrays: Sequence[mx.array], bucket_bytes: int) -> list[list[int]]:
    """Indices of arrays that are communicated together, all of one dtype. The last arrays come first."""
    complete: list[list[int]] = []
    growing: dict[mx.Dtype, list[int]] = {}
    nbytes: dict[mx.Dtype, int] = {}
    for index in reversed(range(len(arrays))):
        dtype = arrays[index].dtype
        growing.setdefault(dtype, []).append(index)
        nbytes[dtype] = nbytes.get(dtype, 0) + arrays[index].nbytes
        if nbytes[dtype] >= bucket_bytes:
            complete.append(growing.pop(dtype))
            del nbytes[dtype]
    return complete + list(growing.values())


def joined(arrays: Sequence[mx.array], size: int | None = None) -> mx.array:
    """One vector of the elements of arrays, padded with zeros to ``size``."""
    vectors = [array.reshape(-1) for array in arrays]
    padding = 0 if size is None else size - sum(array.size for array in arrays)
    if padding:
        vectors.append(mx.zeros(padding, arrays[0].dtype))
    return vectors[0] if len(vectors) == 1 else mx.concatenate(vectors)


def parted(vector: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """Inverts :func:`joined`. The arrays have the shapes of ``like``."""
    ends = [0]
    for array in like:
        ends.append(ends[-1] + array.size)
    return [vector[begin:end].reshape(a.shape) for begin, end, a in zip(ends[:-1], ends[1:], like, strict=True)]


def flattened(tree: Any) -> list[tuple[str, mx.array]]:
    flat: list[tuple[str, mx.array]] = tree_flatten(tree)  # type: ignore[assignment]
    return flat


def check_bucket_bytes(bucket_bytes: int, name: str) -> None:
    if bucket_bytes <= 0:
        raise ValueError(f"{name} bucket_bytes is {bucket_bytes}; allowed: positive numbers.")
