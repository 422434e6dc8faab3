"""``composed()``: ops as graphs of MLX ops, which run without this package."""

from mlx_anvil import _ext
from mlx_anvil._block import Block


def composed() -> Block[None]:
    """Inside the block, this thread (or asyncio task) builds graphs of MLX ops instead of launching fused kernels.

    Use it with ``mx.export_function`` and ``mx.exporter``, which can write only MLX's own primitives. The exported file
    needs MLX but not mlx-anvil, and runs at the speed of MLX. Outside the block, both raise ValueError for a function
    that calls mlx-anvil. ``trace()`` and ``strict()`` count such a graph as a fallback. A function that ``mx.compile``
    traced outside the block keeps its kernels.

    Returns:
        Block: use it as ``with composed():``, or as a decorator.

    Raises:
        RuntimeError: the same block is entered twice.

    Examples:
        >>> with mlx_anvil.composed():
        ...     mx.export_function("gate.mlxfn", mlx_anvil.silu_gate, gate, up)
    """
    return Block("composed", lambda: (_ext._enter_composed(), None))
