"""More than one process: what MLX's distributed engine (``mx.distributed``) lacks.

Every function takes a group, as ``mx.distributed.init()`` returns it, of any backend of MLX.
"""

from mlx_anvil._overlap import matmul_all_sum, quantized_matmul_all_sum
from mlx_anvil.distributed._check_ranks import check_ranks
from mlx_anvil.distributed._decode import decode_attention
from mlx_anvil.distributed._generate import generate, prefill
from mlx_anvil.distributed._merge import merge_attention
from mlx_anvil.distributed._reduce import reduce_gradients
from mlx_anvil.distributed._ring_attention import ring_attention
from mlx_anvil.distributed._shard import shard
from mlx_anvil.distributed._sharded_cache import ShardedKVCache, make_sharded_cache
from mlx_anvil.distributed._sharded_optimizer import ShardedOptimizer
from mlx_anvil.distributed._watch import watch

__all__ = [
    "ShardedKVCache",
    "ShardedOptimizer",
    "check_ranks",
    "decode_attention",
    "generate",
    "make_sharded_cache",
    "matmul_all_sum",
    "merge_attention",
    "prefill",
    "quantized_matmul_all_sum",
    "reduce_gradients",
    "ring_attention",
    "shard",
    "watch",
]
