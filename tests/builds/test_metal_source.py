"""The Metal source inside the extension: complete for each op, and reduced to one kernel for MLX's compiler on a Mac.
tests/metal_launches/test_launches.py compares it with the host."""

import re
import resource
from pathlib import Path

import pytest

from metal_support import kernels_for_apple
from mlx_anvil import _ext
from mlx_anvil.mslc import Source
from mlx_anvil.mslc.compiler import PRECISION_FLAGS, RELAXED_SPACES, run_compiler, run_preprocessor, run_rewriter
from mlx_anvil.mslc.preprocess import UNDEFINED

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parents[2]
OPS = sorted(path.name for path in (ROOT / "metal").iterdir() if path.name != "common")
FILES = sorted((ROOT / "metal").glob("*/*.metal"))
AS_APPLE = (("__MSLC__", UNDEFINED),)  # the kernels that Apple's compiler sees
FOR_MATRIX_UNITS = re.compile(
    r"\w+_matrix_|flash_attention_backward_(dkv|dk|dv)_"
    r"|quantized_(matmul_(transposed|plain)|gemm|gemmplain|dequantize)_"
    r"|gguf_dequantize_|rope_shared_|gather_gemm_|quantized_embedding_(float32|float16|bfloat16)_"
    r"|quantized_swiglu_\w+_r[48]$|gated_delta_chunk_\w+_(pairs|group)_"
)


def kernels_in(source: Source) -> list[str]:
    return [kernel.name for kernel in run_rewriter(source, run_preprocessor(source)).module.kernels]


@pytest.mark.parametrize("op", OPS)
def test_includes_are_resolved(op):
    source = _ext._op_source(op)
    assert re.findall(r'#include "', source) == []
    assert "#pragma once" not in source
    for_metal = re.sub(r"#ifndef __METAL__.*?#endif", "", source, flags=re.DOTALL)
    assert set(re.findall(r"#include <(.*)>", for_metal)) == {"metal_stdlib"}
    assert re.search(rf'^#line 1 "metal/{op}/\w+\.metal"$', source, re.MULTILINE)


def test_no_such_op():
    assert _ext._op_source("nonsense") == ""
    assert _ext._kernel_names("nonsense") == []


def test_no_such_kernel():
    with pytest.raises(ValueError, match=r"there is no kernel silu_gate_foward\."):
        _ext._kernel_source("silu_gate_foward")


@pytest.mark.parametrize("op", OPS)
def test_names_are_those_of_the_source(op):
    """Compares the list of the build's C++ preprocessor with mslc's."""
    assert sorted(_ext._kernel_names(op)) == sorted(kernels_in(Source(_ext._op_source(op))))


@pytest.mark.parametrize("op", OPS)
def test_source_of_a_kernel_has_one_instantiation(op):
    for name in _ext._kernel_names(op):
        text = _ext._kernel_source(name)
        assert re.findall(r"^template \[\[host_name\((.*?)\)\]\]", text, re.MULTILINE) == [f'"{name}"']
        assert "MLX_ANVIL_KERNEL(" not in text.replace("#define MLX_ANVIL_KERNEL(", "").replace(
            "// MLX_ANVIL_KERNEL(", ""
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_source_of_a_kernel_compiles_to_that_kernel(path):
    name = kernels_in(Source.load(path, [ROOT]))[-1]
    assert kernels_in(Source(_ext._kernel_source(name))) == [name]
    for_apple = (
        kernels_in(Source(_ext._kernel_source(name), defines=AS_APPLE)) if not FOR_MATRIX_UNITS.match(name) else []
    )
    assert for_apple in ([name], [])


def compile_seconds(text: str, output: Path) -> float:
    """Processor time of upstream clang, which stands in for Apple's compiler. That makes bitcode too."""
    source = Source(text)
    preprocessed = run_preprocessor(source)
    rewritten = run_rewriter(source, preprocessed)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_compiler(
        source,
        preprocessed,
        rewritten,
        [*PRECISION_FLAGS, *RELAXED_SPACES, "-O0", "-c", "-emit-llvm", "-o", str(output)],
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# Apple's compiler optimises. Without that, the share of one kernel is larger, and the test takes much less time.
@pytest.mark.slow
@pytest.mark.alike("op")
@pytest.mark.parametrize("op", ["flash_attention", "quantized_matmul"])
def test_a_kernel_compiles_in_a_twentieth_of_the_op(op, tmp_path):
    names = _ext._kernel_names(op)
    typical = _ext._kernel_source(names[len(names) // 2])
    one = min(compile_seconds(typical, tmp_path / "one.o") for _ in range(3))
    assert 20 * one <= compile_seconds(_ext._op_source(op), tmp_path / "all.o")


# ---- what a Mac gets -------------------------------------------------------------------------------------------------


def test_kernels_for_matrix_units_are_not_for_apple():
    everything = {name for op in OPS for name in _ext._kernel_names(op)}
    assert everything - kernels_for_apple() == {name for name in everything if FOR_MATRIX_UNITS.match(name)}
    in_metallib = {name for path in FILES for name in kernels_in(Source.load(path, [ROOT], dict(AS_APPLE)))}
    assert in_metallib == kernels_for_apple()


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.endswith("_matrix")], ids=lambda path: path.stem)
def test_files_for_matrix_units_are_empty_for_apple(path):
    text = run_preprocessor(Source.load(path, [ROOT], dict(AS_APPLE)))
    assert [line for line in text.splitlines() if line.strip() and not line.startswith("#")] == []
