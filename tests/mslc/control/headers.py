"""What each kernel header of the wheel needs before it, as MLX's build or JIT supplies it."""

_GEMM = ["steel/utils.h", "steel/gemm/gemm.h"]
_CONV = ["steel/defines.h", "steel/utils.h", "steel/conv/params.h", *_GEMM, "steel/conv/conv.h"]
_REDUCE = ["atomic.h", "reduction/ops.h", "reduce_utils.h"]
_QUANTIZED = [*_GEMM, "quantized_utils.h"]
_GEMM_NAX = ["steel/gemm/gemm_nax.h"]
_QUANTIZED_NAX = [*_GEMM_NAX, "quantized_utils.h"]
_INDEX = ["atomic.h", "indexing/indexing.h", "reduction/ops.h"]

PREREQUISITES: dict[str, list[str]] = {
    "fp_quantized.h": [*_QUANTIZED, "fp4.h", "fp8.h"],
    "quantized.h": _QUANTIZED,
    "fp_quantized_nax.h": _QUANTIZED_NAX,
    "quantized_nax.h": _QUANTIZED_NAX,
    "steel/gemm/kernels/steel_gemm_fused_nax.h": _GEMM_NAX,
    "steel/gemm/kernels/steel_gemm_gather_nax.h": _GEMM_NAX,
    "steel/gemm/kernels/steel_gemm_segmented_nax.h": _GEMM_NAX,
    "steel/gemm/kernels/steel_gemm_splitk_nax.h": _GEMM_NAX,
    "steel/gemm/kernels/steel_gemm_thin_nax.h": _GEMM_NAX,
    "reduction/ops.h": ["atomic.h"],
    "reduce_utils.h": ["atomic.h"],
    "reduce.h": _REDUCE,
    "reduction/reduce_all.h": _REDUCE,
    "reduction/reduce_col.h": _REDUCE,
    "reduction/reduce_row.h": _REDUCE,
    "reduction/reduce_init.h": _REDUCE,
    "indexing/scatter.h": _INDEX,
    "indexing/scatter_axis.h": _INDEX,
    "searchsorted.h": ["sort.h"],
    "steel/conv/loader.h": _CONV[:-1],
    "steel/conv/loaders/loader_channel_l.h": ["steel/defines.h", "steel/utils.h", "steel/conv/params.h"],
    "steel/conv/loaders/loader_channel_n.h": ["steel/defines.h", "steel/utils.h", "steel/conv/params.h"],
    "steel/conv/loaders/loader_general.h": ["steel/defines.h", "steel/utils.h", "steel/conv/params.h"],
    "steel/conv/kernels/steel_conv.h": _CONV,
    "steel/conv/kernels/steel_conv_3d.h": _CONV,
    "steel/conv/kernels/steel_conv_general.h": _CONV,
    "steel/gemm/kernels/steel_gemm_fused.h": _GEMM,
    "steel/gemm/kernels/steel_gemm_gather.h": _GEMM,
    "steel/gemm/kernels/steel_gemm_masked.h": _GEMM,
    "steel/gemm/kernels/steel_gemm_segmented.h": _GEMM,
    "steel/gemm/kernels/steel_gemm_splitk.h": _GEMM,
}


# These use Apple's MetalPerformancePrimitives, which are part of Metal 4.
METAL_4 = "nax"


def defines(header: str) -> dict[str, object]:
    """What MLX's build or JIT defines for a header."""
    return {"MLX_METAL_JIT": 1, **({"__METAL_VERSION__": 400} if METAL_4 in header else {})}
