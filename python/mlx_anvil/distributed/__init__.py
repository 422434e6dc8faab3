"""More than one process: what MLX's distributed engine (``mx.distributed``) lacks.

Every function takes a group, as ``mx.distributed.init()`` returns it, of any backend of MLX.
"""

from mlx_anvil._ext import ring_attention

__all__ = ["ring_attention"]
