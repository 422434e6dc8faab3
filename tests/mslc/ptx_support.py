"""What several tests of the PTX target use."""

from pathlib import Path

import pytest
from msl import HEAD

from mlx_anvil.mslc import Source, ToolchainError
from mlx_anvil.mslc.ptx import compile_ptx, find_ptxas

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


def spills_with_all_features(kernel: str) -> int:
    """Bytes that a thread may store to local memory and load from it with all function constants on, more than any call has
    (two kinds of masks). Attention's tiles are as large as fit without that: on an H200 the next smaller ones are slower."""
    most = {"forward_matrix": 80, "backward_dkv_matrix": 328, "backward_dq_matrix": 440, "backward_dq_": 256}
    return next((most[pass_] for pass_ in most if kernel.startswith(f"flash_attention_{pass_}")), 0)
