"""PTX of products of four SIMD groups: its target, and that they run while the threads go on."""

import re
from itertools import product

import pytest

from mlx_anvil.mslc.ptx import GROUP_ARCHITECTURE, _run_ptxas, with_constants
from tests.mslc.ptx_support import METAL, declared, folder_of_run, needs_metal, needs_ptxas, ptx, shipped

ATTENTION = [f"flash_attention/{name}" for name in ("forward_group_matrix", "backward_dq_group", "backward_dkv_group")]
QUANTIZED = "quantized_matmul/gemm_group"
# Advisories of ptxas that it waits for products, or runs one after the other.
WAITS = re.compile(r"\(C75\d\d\)[^\n]*")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return folder_of_run(tmp_path_factory)


def test_other_kernels_keep_their_target():
    module = ptx("kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }", "sm_80")
    assert module.arch == "sm_80"
    assert ".target sm_80" in module.text


@needs_metal
@needs_ptxas
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("file", "features"),
    [
        *product(ATTENTION, ["", "has_band has_sinks stores_lse", "has_softcap"]),
        *product([QUANTIZED], ["", "outputs_are_in_parts steps_are_whole"]),
    ],
)
def test_products_overlap(file, features, dtype, folder):
    path = METAL / "metal" / f"{file}.metal"
    names, constants = declared(path, dtype)
    module = shipped(path, tuple(names), folder)
    assert module.arch == GROUP_ARCHITECTURE
    assert f".version 8.0\n.target {GROUP_ARCHITECTURE}\n" in module.text
    assert ".align 1024 .b8 mslc_dynamic_threadgroup_memory" in module.text  # where a swizzled tile may start
    on = {"rows_are_vectors", "heads_fill_tile", *features.split()}
    values = {index: name in on for index, name in constants.items()}
    messages = _run_ptxas(with_constants(module.text, values), module.arch, "-v")[1]
    assert "Used" in messages
    assert WAITS.findall(messages) == []
