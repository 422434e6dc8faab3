"""What several tests of the PTX target use."""

from pathlib import Path

import pytest

from mlx_anvil.mslc import Source, ToolchainError
from mlx_anvil.mslc.ptx import compile_ptx, find_ptxas
from tests.mslc.msl import HEAD

# The checkout, where there is one.
METAL = next((p for p in Path(__file__).resolve().parents if (p / "metal" / "silu_gate").is_dir()), None)


def has_ptxas():
    try:
        return bool(find_ptxas())
    except ToolchainError:
        return False


needs_ptxas = pytest.mark.skipif(not has_ptxas(), reason="needs ptxas (PyPI nvidia-cuda-nvcc)")


def ptx(text, arch="sm_90", constants=None):
    return compile_ptx(Source.load(HEAD + text), arch, constants)


needs_metal = pytest.mark.skipif(METAL is None, reason="the project's kernels are not beside these tests")


def most_spills(kernel: str, features: bool) -> int:
    """Bytes that a thread may store to local memory and load from it, with all function constants on or all off.

    Attention's tiles are as large as fit without that where not all are on, more than any call has (two kinds of masks): on an
    H200 the next smaller ones are slower. Products of few rows have 128 registers, so that twice as many threads run at once."""
    if kernel.startswith(("quantized_gemv_matrix", "quantized_swiglu_matrix")):
        return 192 if "_g32_" in kernel else 112
    most = {"forward_matrix": 80, "backward_dkv_matrix": 328, "backward_dq_matrix": 440, "backward_dq_": 256}
    found = (most[pass_] for pass_ in most if kernel.startswith(f"flash_attention_{pass_}"))
    return next(found, 0) if features else 0
