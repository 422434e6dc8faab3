"""The definition of every op in MLX ops, and the registry of ops for the check, the tests and the benchmarks.

A definition takes the arguments of its op. On float64 arrays on the CPU it is the reference that errors are measured
against. In a lower precision it is what a user would write without this package.

Each module defines the ops of one folder, and lists them in ``SPECS``. Adding a module registers its ops in ``OPS``.
"""

from importlib import import_module
from pkgutil import iter_modules

from mlx_anvil._op_spec import DTYPES, OpSpec
from mlx_anvil.reference.causal_conv1d import causal_conv1d
from mlx_anvil.reference.experts import quantized_experts
from mlx_anvil.reference.flash_attention import flash_attention
from mlx_anvil.reference.gated import gated
from mlx_anvil.reference.gated_delta import gated_delta, gated_delta_gates
from mlx_anvil.reference.gather_matmul import gather_matmul, gather_quantized_matmul
from mlx_anvil.reference.kv_append import kv_append
from mlx_anvil.reference.mla_decode import mla_decode
from mlx_anvil.reference.moe import moe_combine, moe_permute
from mlx_anvil.reference.norm import layer_norm, rms_norm
from mlx_anvil.reference.quantized_embedding import quantized_embedding
from mlx_anvil.reference.quantized_head import quantized_argmax, quantized_topk
from mlx_anvil.reference.quantized_matmul import quantized_matmul, quantized_swiglu
from mlx_anvil.reference.rope import rope, rope_and_cache
from mlx_anvil.reference.selective_scan import selective_scan
from mlx_anvil.reference.sigmoid_gate import sigmoid_gate
from mlx_anvil.reference.silu_gate import silu_gate
from mlx_anvil.reference.softmax_topk import softmax_topk
from mlx_anvil.reference.ssd_scan import ssd_scan

__all__ = [
    "DTYPES",
    "OPS",
    "OpSpec",
    "causal_conv1d",
    "flash_attention",
    "gated",
    "gated_delta",
    "gated_delta_gates",
    "gather_matmul",
    "gather_quantized_matmul",
    "kv_append",
    "layer_norm",
    "mla_decode",
    "moe_combine",
    "moe_permute",
    "quantized_argmax",
    "quantized_embedding",
    "quantized_experts",
    "quantized_matmul",
    "quantized_swiglu",
    "quantized_topk",
    "rms_norm",
    "rope",
    "rope_and_cache",
    "selective_scan",
    "sigmoid_gate",
    "silu_gate",
    "softmax_topk",
    "ssd_scan",
]


def _registered() -> dict[str, OpSpec]:
    """The entries of all public modules, in alphabetical order of the modules."""
    names = sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))
    specs = [spec for name in names for spec in import_module(f"{__name__}.{name}").SPECS]
    return {spec.id: spec for spec in specs}


OPS = _registered()
