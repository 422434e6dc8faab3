"""Products of row-sharded matrices, summed over the processes of a group while the next rows are computed.

All communication stays on the stream on which ``mx.distributed.all_sum`` runs anyway. On the CPU it is the products that
move to another stream. Sums are therefore sent in the order of the graph, which is the same in every process, and never
mix with other communication.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_anvil import _ext

Product = Callable[[mx.array], mx.array]

MAX_CHUNKS = 4
MIN_ROWS = 512  # of a chunk: products and sums of fewer rows take longer a row
MIN_BYTES = 1 << 20  # of a chunk: sums of fewer bytes are short beside the product


def matmul_all_sum(
    x: mx.array, w: mx.array, *, group: mx.distributed.Group | None = None, chunks: int | None = None
) -> mx.array:
    """``all_sum(x w^T)``: the product of a row-sharded projection, summed over the processes of a group.

    A process holds some columns of the whole matrix, and the same columns of the whole input. The rows of ``x`` are
    split into chunks; the sum of one is sent while the next is computed. Gradients are those of
    ``mx.distributed.all_sum(x @ w.T)``: that of ``x`` and ``w`` is of the process's own part.

    Args:
        x (array): ``[..., K]``, the process's own columns. K may differ between processes.
        w (array): ``[N, K]``.
        group (mx.distributed.Group): the processes. Default: ``mx.distributed.init()``.
        chunks (int): into how many chunks the rows are split, the same in every process. At most one a row is used.
            Default: one for few rows, up to 4 for many.

    Returns:
        array: ``[..., N]``, the same in every process, in the dtype of ``x @ w.T``.

    Raises:
        ValueError: the shapes do not fit, or ``chunks`` is less than 1. A process that raises leaves the others waiting.

    Source: ``mlx.nn.ShardedToAllLinear``; the overlap follows Wang et al., "Overlap Communication with Dependent
    Computation via Decomposition" (ASPLOS 2023).
    """
    if w.ndim != 2 or x.ndim == 0 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"[matmul_all_sum] x is {x.shape} and w {w.shape}; allowed: [..., K] and [N, K].")
    _check_chunks("matmul_all_sum", chunks)
    return product_all_sum(lambda rows: rows @ w.T, x, w.shape[0], group=group, chunks=chunks)


def quantized_matmul_all_sum(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    group: mx.distributed.Group | None = None,
    chunks: int | None = None,
) -> mx.array:
    """``all_sum(x w^T)`` with a quantized ``w``, see :func:`matmul_all_sum` and :func:`mlx_anvil.quantized_matmul`.

    Args:
        x (array): ``[..., K]``, the process's own columns, which are whole groups of the quantization.
        w (array): ``[N, K * bits / 32]``, the codes.
        scales (array): ``[N, K / group_size]``.
        biases (array): as ``scales``; None in modes without biases.
        group_size (int): see ``mx.quantize``.
        bits (int): see ``mx.quantize``.
        mode (str): see ``mx.quantize``.
        group (mx.distributed.Group): see :func:`matmul_all_sum`.
        chunks (int): see :func:`matmul_all_sum`.

    Returns:
        array: ``[..., N]``, the same in every process, in the dtype of ``x``.

    Raises:
        ValueError: the shapes do not fit (as ``[quantized_matmul]``), or ``chunks`` is less than 1.

    Source: ``mlx.nn.QuantizedShardedToAllLinear``.
    """
    _check_chunks("quantized_matmul_all_sum", chunks)
    options: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}

    def product(rows: mx.array) -> mx.array:
        return _ext.quantized_matmul(rows, w, scales, biases, **options)

    return product_all_sum(product, x, w.shape[0], group=group, chunks=chunks)


def product_all_sum(
    product: Product, x: mx.array, outputs: int, *, group: mx.distributed.Group | None = None, chunks: int | None = None
) -> mx.array:
    """``all_sum(product(x))`` for a product of each row by itself, which has ``outputs`` columns."""
    group = mx.distributed.init() if group is None else group
    rows = x.size // x.shape[-1] if x.size else 0
    if group.size() == 1:
        return product(x)
    # Every process has to arrive at the same number, so it comes from the size of the sum, not of the process's part.
    count = min(chunks or default_chunks(rows, outputs * x.dtype.size), max(rows, 1))
    if count == 1:
        return mx.distributed.all_sum(product(x), group=group)
    flat = x.flatten(0, -2)
    edges = [rows * i // count for i in range(1, count)]
    parts = mx.split(flat, edges, axis=0)
    # The stream is only where the products run. The sums, and what follows, keep the default stream.
    with mx.stream(_products_stream()):
        products = [product(part) for part in parts]
    sums = [mx.distributed.all_sum(part, group=group) for part in products]
    return mx.concatenate(sums, axis=0).reshape(*x.shape[:-1], outputs)


def default_chunks(rows: int, bytes_of_row: int) -> int:
    """The number of chunks of a sum of that many rows."""
    return max(1, min(MAX_CHUNKS, rows // MIN_ROWS, rows * bytes_of_row // MIN_BYTES))


def _products_stream() -> Any:
    """The stream of the products: another one of the CPU, or the GPU's own, which no communication of the CPU blocks.

    With a backend that communicates on the GPU, products and sums take turns.
    """
    device = mx.default_device()
    return _other_stream() if device == mx.Device(mx.cpu) else mx.default_stream(device)


@functools.cache
def _other_stream() -> Any:
    """A second stream of the CPU for each thread."""
    return mx.new_thread_local_stream(mx.cpu)


def _check_chunks(name: str, chunks: int | None) -> None:
    if chunks is not None and chunks < 1:
        raise ValueError(f"[{name}] chunks is {chunks}; allowed: at least 1, or None.")
