"""Which part of the source may use which, read from imports and includes, so nothing has to be built."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "mlx_anvil"
MSLC = PACKAGE / "mslc"

# What an op may include besides csrc/common and itself.
OPS_THAT_AN_OP_USES = {
    "sigmoid_gate": {"gated"},
    "quantized_matmul": {"gated", "silu_gate"},
    "flash_attention": {"quantized_matmul"},
    "mla_decode": {"flash_attention"},
    "quantized_embedding": {"quantized_matmul", "gather_matmul"},
    "quantized_head": {"quantized_matmul"},
    "gather_matmul": {"quantized_matmul", "gated", "silu_gate"},
    "kv_append": {"quantized_matmul", "rope"},
    "ssd_scan": {"gated_delta"},
    "moe": {"gather_matmul", "quantized_matmul", "gated"},
    "gguf_matmul": {"quantized_matmul", "quantized_embedding", "quantized_head"},
    "distributed": {"flash_attention"},
}
# Ops whose bindings choose between their own function and that of GGUF's formats, by mode.
OPS_WITH_MODES_OF_GGUF = {"quantized_matmul", "quantized_embedding", "quantized_head"}

# A kernel file is compiled once per instruction set. The linker keeps one copy of an inline function, so headers with
# such functions of the standard library (or of MLX) must stay out: csrc/common/isa.h has the reasons.
STANDARD_HEADERS_OF_KERNELS = {
    *("algorithm", "array", "cstdint", "cstring", "numeric", "type_traits", "utility"),
    *("arm_neon.h", "immintrin.h"),
}


def modules_imported_by(file: Path) -> set[str]:
    """Absolute names of the imported modules, also for relative imports."""
    package = ("mlx_anvil", *file.relative_to(PACKAGE).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def included_by(file: Path) -> set[str]:
    return set(re.findall(r'^#include ["<]([^">]+)', file.read_text(), re.MULTILINE))


def kernel_files() -> list[Path]:
    return sorted(ROOT.glob("csrc/*/simd/*.*"))


def test_mslc_uses_nothing_of_the_rest():
    for file in MSLC.rglob("*.py"):
        ours = {name for name in modules_imported_by(file) if name.split(".")[0] == "mlx_anvil"}
        assert all(name.startswith("mlx_anvil.mslc") for name in ours), (file.name, ours)


def test_the_rest_uses_what_mslc_exports():
    modules = {f"mlx_anvil.mslc.{file.stem}" for file in MSLC.glob("*.py")}
    modules |= {f"mlx_anvil.mslc.{folder.name}" for folder in MSLC.iterdir() if folder.is_dir()}
    for file in set(PACKAGE.rglob("*.py")) - set(MSLC.rglob("*.py")):
        assert not modules & modules_imported_by(file), file.name


def test_ops_use_the_common_code_and_the_ops_below_them():
    ops = {folder.name for folder in (ROOT / "csrc").iterdir() if folder.is_dir()} - {"common"}
    for folder in ("common", *ops):
        allowed = {folder} | OPS_THAT_AN_OP_USES.get(folder, set())
        for file in ROOT.glob(f"csrc/{folder}/**/*.*"):
            used = {include.split("/")[0] for include in included_by(file)} & ops
            if file.name == "python.cpp" and folder in OPS_WITH_MODES_OF_GGUF:
                used -= {"gguf_matmul"}
            assert used <= allowed, (file.name, used - allowed)


def test_only_the_backends_use_the_gpu_interfaces_of_mlx():
    """csrc/common may use mlx/backend/gpu, which every build of MLX exports."""
    for file in ROOT.glob("csrc/**/*.*"):
        used = {include.split("/")[2] for include in included_by(file) if include.startswith("mlx/backend/")}
        assert "metal" not in used or file.name == "launch_metal.cpp", file
        assert "cuda" not in used, f"{file}: cuda_backend.h declares what is used of it"
        assert "gpu" not in used or file.parent.name == "common", file


def test_kernel_files_include_no_library_code_of_one_instruction_set():
    assert len(kernel_files()) > 40
    for file in kernel_files():
        for include in included_by(file):
            if "/" not in include:
                assert include in STANDARD_HEADERS_OF_KERNELS, (file.name, include)
            assert not include.startswith("mlx/"), (file.name, include)
