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
