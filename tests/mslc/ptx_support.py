"""What several tests of the PTX target use."""

import fcntl
import os
import pickle
from functools import cache
from pathlib import Path

import pytest

import build_ptx
from mlx_anvil.mslc import Source, ToolchainError
from mlx_anvil.mslc.ptx import PtxModule, compile_ptx, find_ptxas
from mlx_anvil.mslc.toolchain import write_atomically
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


def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of one run of pytest share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@cache
def shipped(path: Path, folder: Path) -> PtxModule:
    """The kernels of one of the project's files as the package ships them, with deferred function constants.

    One process compiles a file, which takes as long as to assemble it, and keeps it in `folder` for the others."""
    kept = folder / f"{path.parent.name}-{path.stem}.ptx.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not kept.exists():
            module = compile_ptx(Source.load(path, [METAL]), build_ptx.ARCHITECTURE, defers_constants=True)
            write_atomically(kept, pickle.dumps(module), survives_crash=False)
    return pickle.loads(kept.read_bytes())


needs_metal = pytest.mark.skipif(METAL is None, reason="the project's kernels are not beside these tests")


def most_spills(kernel: str, features: bool) -> int:
    """Bytes that a thread may store to local memory and load from it, with all function constants on or all off.

    Attention's tiles are as large as fit without that where not all are on, more than any call has (two kinds of
    masks): on an H200 the next smaller ones are slower. Products of few rows have 128 registers, so that twice as many
    threads run at once."""
    if kernel.startswith(("quantized_gemv_matrix", "quantized_swiglu_matrix")):
        return 192 if "_g32_" in kernel else 112
    most = {"forward_matrix": 80, "backward_dkv_matrix": 328, "backward_dq_matrix": 440, "backward_dq_": 256}
    found = (most[pass_] for pass_ in most if kernel.startswith(f"flash_attention_{pass_}"))
    return next(found, 0) if features else 0
