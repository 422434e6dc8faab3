"""Helpers for tests of the PTX target."""

import fcntl
import os
import pickle
from functools import cache
from pathlib import Path

import pytest

import build_ptx
from mlx_anvil.mslc import Source, ToolchainError
from mlx_anvil.mslc.compiler import run_preprocessor, run_rewriter
from mlx_anvil.mslc.ptx import PtxModule, compile_ptx, find_ptxas
from mlx_anvil.mslc.toolchain import digest, write_atomically
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


DTYPES = ("float32", "float16", "bfloat16")


def declared(path: Path, dtype: str) -> tuple[list[str], dict[int, str]]:
    """The names of a file's kernels for a dtype, or for float16 where none is for it, and its function constants."""
    source = Source.load(path, [METAL])
    module = run_rewriter(source, run_preprocessor(source)).module
    names = [kernel.name for kernel in module.kernels]
    first_words = {name: next((word for word in name.split("_") if word in DTYPES), dtype) for name in names}
    of_dtypes = ([name for name in names if first_words[name] == each] for each in (dtype, "float16"))
    return next(filter(None, of_dtypes), names), {constant.index: constant.name for constant in module.constants}


@cache
def shipped(path: Path, names: tuple[str, ...], folder: Path) -> PtxModule:
    """Kernels of a file as the package ships them, with deferred function constants.

    Compiling them takes as long as assembling them, so one process does it and keeps them in `folder` for the others.
    """
    kept = folder / f"{digest(path, *names)}.ptx.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not kept.exists():
            source = Source.load(path, [METAL])
            module = compile_ptx(source, build_ptx.ARCHITECTURE, defers_constants=True, only=names)
            write_atomically(kept, pickle.dumps(module), survives_crash=False)
    return pickle.loads(kept.read_bytes())


needs_metal = pytest.mark.skipif(METAL is None, reason="the project's kernels are not beside these tests")


# With all function constants on, and with all off. Rows of the state, of U and of y are in registers together, and no call
# has all of the constants. Kernels that are not named have none.
CHUNK_SPILLS = {
    "backward_channels_group": (400, 64),
    "backward_channels": (1500, 300),
    "backward_decays": (200, 200),
    "backward_group": (520, 400),
    "backward_gates": (0, 0),
    "backward_keys": (0, 0),
    "backward_squares_pairs": (32, 0),
    "backward_squares": (1500, 0),
    "backward_pairs": (64, 32),
    "backward": (1300, 160),
    "forward_channels_group": (320, 100),
    "forward_channels_pairs": (16, 24),
    "forward_channels": (120, 1500),
    "forward_group": (32, 16),
    "forward_pairs": (24, 80),
    "forward": (400, 1000),
    "prepare_channels_pairs": (1100, 900),
    "prepare_channels": (500, 500),
    "prepare_pairs": (600, 0),
    "prepare": (500, 0),
    "sum": (0, 0),
}


def most_spills(kernel: str, features: bool) -> int:
    """Bytes that a thread may store to local memory and load from it, with all function constants on or all off.

    Attention's tiles are as large as fit without that where not all are on, more than any call has (two kinds of
    masks): on an H200 the next smaller ones are slower. A decode of 16-bit types spills where rows are not vectors.
    Products of few rows have 128 registers, so that twice as many threads run at once. Sums of 64 rows leave few."""
    if kernel.startswith("gated_delta_chunk_"):
        parts = (parts for pass_, parts in CHUNK_SPILLS.items() if kernel.startswith(f"gated_delta_chunk_{pass_}_"))
        return next(parts)[0 if features else 1]
    if kernel.startswith(("quantized_gemv_matrix", "quantized_swiglu_matrix", "gather_few_matrix")):
        return 16 if "_g32_" in kernel else 112
    if kernel.startswith("gather_gemm_gated_"):
        return 48
    if kernel.startswith("quantized_gemm_") and kernel.endswith("_r64n64"):
        return 80
    if kernel.startswith("flash_attention_forward_matrix_group"):  # two fit a multiprocessor, and are faster so
        return 112 if features else 0
    if kernel.startswith("flash_attention_backward_dkv_matrix_group") and kernel.endswith("_d128v128"):
        return 80  # the sums take 192 of 255 registers
    if kernel.startswith("flash_attention_forward_matrix_tall"):  # and with that faster than without
        return 80
    if kernel == "flash_attention_quantized_forward_float32_d128v128":
        return 36 if features else 96
    if kernel.startswith(("flash_attention_decode_float16", "flash_attention_decode_bfloat16")):
        return 0 if features else 140
    if kernel.startswith("flash_attention_backward_dq_matrix_") and kernel.endswith("_d32v32"):
        return 900 if features else 0
    most = {
        "forward_matrix": 80,
        "backward_dkv_matrix": 328,
        "backward_dkv_": 92,
        "backward_dq_matrix": 460,
        "backward_dq_": 256,
    }
    found = (most[pass_] for pass_ in most if kernel.startswith(f"flash_attention_{pass_}"))
    return next(found, 0) if features else 0
