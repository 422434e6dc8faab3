"""``composed()``: the ops as graphs of MLX ops, which any MLX can run."""

from mlx_anvil import _ext
from mlx_anvil._block import Block


def composed() -> Block[None]:
    """Inside the block, ops of this thread (or asyncio task) are graphs of MLX ops instead of fused kernels.

    For ``mx.export_function`` and ``mx.exporter``, which write MLX's own primitives only: the file then needs MLX, not
    mlx-anvil, and runs at the speed of MLX. Outside the block they raise ValueError for a function with ops of mlx-anvil. To
    ``trace()`` and ``strict()`` such a graph is a fall-back. A function of ``mx.compile`` stays what it was when it was traced.

    Returns:
        Block: for ``with composed():``, or as a decorator.

    Raises:
        RuntimeError: one block is entered twice.

    Example:
        >>> with mlx_anvil.composed():
        ...     mx.export_function("gate.mlxfn", mlx_anvil.silu_gate, gate, up)
    """
    return Block("composed", lambda: (_ext._enter_composed(), None))
