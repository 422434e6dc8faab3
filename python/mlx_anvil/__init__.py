"""mlx-anvil: fused kernels for MLX that stay fused under ``mx.grad``.

Ops are functions of ``mlx.core`` arrays and compose with MLX's lazy graphs, ``mx.grad``, ``mx.vmap``, ``mx.compile``
and ``mx.checkpoint``::

    import mlx.core as mx
    import mlx_anvil

    y = mlx_anvil.silu_gate(gate, up)

``patch(model)`` puts the ops into an existing model, in place. ``trace()`` shows which kernels ran, ``strict()`` raises
on a fallback, and ``composed()`` is for ``mx.export_function``. ``info()`` describes the installation.
"""

from mlx_anvil import _build_info, _compat

_mx = _compat.import_mlx()
_compat.check(
    built_mlx=_build_info.MLX_VERSION,
    built_tag=_build_info.NANOBIND_TAG,
    installed_mlx=_mx.__version__,
    installed_tags=_compat.installed_nanobind_tags(),
)

from mlx_anvil import _calls, _cuda, _ext, _tuning, distributed, lm, nn, reference  # noqa: E402  (the check comes first)
from mlx_anvil._composed import composed  # noqa: E402
from mlx_anvil._ext import (  # noqa: E402
    AttentionPlan,
    causal_conv1d,
    flash_attention,
    gated,
    gated_delta,
    gated_delta_gates,
    gather_matmul,
    gather_quantized_matmul,
    kv_append,
    layer_norm,
    mla_decode,
    moe_combine,
    moe_permute,
    quantized_argmax,
    quantized_embedding,
    quantized_experts,
    quantized_gemv,
    quantized_matmul,
    quantized_swiglu,
    quantized_topk,
    rms_norm,
    rope,
    rope_and_cache,
    rope_qk,
    selective_scan,
    sigmoid_gate,
    silu_gate,
    softmax_topk,
    ssd_scan,
)
from mlx_anvil._huge_pages import use_huge_pages  # noqa: E402
from mlx_anvil._info import __version__, info  # noqa: E402
from mlx_anvil._plan import attention_plan  # noqa: E402
from mlx_anvil._prebuild import Prebuilt, prebuild  # noqa: E402
from mlx_anvil._simulate import simulate  # noqa: E402
from mlx_anvil._trace import Event, Trace, strict, trace  # noqa: E402
from mlx_anvil._tree import Tree  # noqa: E402
from mlx_anvil.patching import patch, unpatch  # noqa: E402

__all__ = [
    "AttentionPlan",
    "Event",
    "Prebuilt",
    "Trace",
    "Tree",
    "__version__",
    "attention_plan",
    "causal_conv1d",
    "composed",
    "distributed",
    "flash_attention",
    "gated",
    "gated_delta",
    "gated_delta_gates",
    "gather_matmul",
    "gather_quantized_matmul",
    "info",
    "kv_append",
    "layer_norm",
    "lm",
    "mla_decode",
    "moe_combine",
    "moe_permute",
    "nn",
    "patch",
    "prebuild",
    "quantized_argmax",
    "quantized_embedding",
    "quantized_experts",
    "quantized_gemv",
    "quantized_matmul",
    "quantized_swiglu",
    "quantized_topk",
    "reference",
    "rms_norm",
    "rope",
    "rope_and_cache",
    "rope_qk",
    "selective_scan",
    "sigmoid_gate",
    "silu_gate",
    "simulate",
    "softmax_topk",
    "ssd_scan",
    "strict",
    "trace",
    "unpatch",
    "use_huge_pages",
]

_compat.check_isa(_ext._supported_isas(), _ext._left_out_isas())
_calls.register()
_cuda.register()
_tuning.forget()
