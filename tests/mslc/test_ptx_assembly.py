"""ptxas accepts the PTX of every kernel, MLX's and ours, and spills no more registers than recorded here."""

from dataclasses import replace

import pytest

import build_ptx
from mlx_anvil._kernel_files import pack_ptx, unpack_ptx
from mlx_anvil.mslc import Source
from mlx_anvil.mslc.ptx import ARCHITECTURES, GROUP_ARCHITECTURE, PtxModule, assemble, compile_ptx, with_constants
from tests.mslc.control.mlx_kernels import ENCODE, include_dir, source
from tests.mslc.ptx_support import (
    DTYPES,
    METAL,
    declared,
    folder_of_run,
    most_spills,
    needs_metal,
    needs_ptxas,
    shipped,
)

FILES = sorted((METAL / "metal").glob("*/*.metal")) if METAL else []
DRAWN = 16  # kernels of a file; those of one template differ in format or tile


def mlx_source(headers, instances):
    return Source.load(source(headers, instances), [include_dir()], {"MLX_METAL_JIT": 1})


STEEL = ["steel/utils.h", "steel/gemm/gemm.h"]
MLX_KERNELS = {
    "sdpa_vector": (
        ["sdpa_vector.h"],
        [(f"sdpa_{d}_{n}", "sdpa_vector", d, n) for d in ENCODE for n in (64, 96, 128, 256)],
        dict.fromkeys(range(20, 26), False),
    ),
    "affine_qmv_fast": (
        [*STEEL, "quantized_utils.h", "quantized.h"],
        [(f"qmv_{d}_{b}", "affine_qmv_fast", d, 64, b, "false") for d in ENCODE for b in (3, 4, 8)],
        {},
    ),
    "steel_attention": (
        ["steel/attn/kernels/steel_attention.h"],
        [
            (f"attention_{d}_{n}", "attention", d, 32, k, n, n, 4, 1, "bool", "float")
            for d in ENCODE
            for n, k in ((64, 32), (128, 16))
        ],
        {200: True, 201: True, 300: False, 301: False, 302: False, 303: False},
    ),
    "softmax": (
        ["softmax.h"],
        [(f"{f}_{d}", f, d, "float") for d in ENCODE for f in ("softmax_single_row", "softmax_looped")],
        {},
    ),
    "steel_gemm": (
        [*STEEL, "steel/gemm/kernels/steel_gemm_fused.h"],
        [(f"gemm_{d}", "gemm", d, 64, 64, 16, 2, 2, "false", "true") for d in ENCODE],
        {10: False, 100: False, 110: False, 200: True, 201: True, 202: True},
    ),
}


def assert_assembles(module, names, may_spill=lambda kernel: 0):
    assert ".func" not in module.text
    assert {k.name for k in module.kernels} == set(names)
    reports = assemble(module)
    assert set(reports) == {k.entry for k in module.kernels}
    for description in module.kernels:
        report = reports[description.entry]
        assert report.spill_bytes <= may_spill(description.name), description.name
        assert report.registers > 0
        assert report.shared_bytes == description.static_threadgroup_memory


@pytest.mark.slow
@pytest.mark.alike("arch")
@needs_ptxas
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", MLX_KERNELS)
def test_mlx_kernels_assemble(name, arch):
    headers, instances, constants = MLX_KERNELS[name]
    assert_assembles(compile_ptx(mlx_source(headers, instances), arch, constants), [i[0] for i in instances])


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return folder_of_run(tmp_path_factory)


def loaded(module, arch, constants):
    """The module as a driver for the architecture receives it; one with products of four SIMD groups has its own."""
    arch = module.arch if module.arch == GROUP_ARCHITECTURE else arch
    return replace(module, arch=arch, text=with_constants(module.text, constants))


@pytest.mark.slow
@pytest.mark.alike("arch", "features", "dtype")
@needs_ptxas
@needs_metal
@pytest.mark.parametrize(("arch", "features"), [(ARCHITECTURES[0], True), (ARCHITECTURES[-1], False)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_project_kernels_assemble(path, dtype, arch, features, folder, request, rng):
    """With all function constants on, and with all off. Norms with fewer operands have more of them
    (tests/norm/test_registers.py). With --one-of-alike, the seed draws some of many formats and tiles."""
    names, constants = declared(path, dtype)
    if request.config.option.one_of_alike and len(names) > DRAWN:
        names = sorted(rng.choice(names, DRAWN, replace=False).tolist())
    values = {index: features and name != "registers_are_few" for index, name in constants.items()}
    module = loaded(shipped(path, tuple(names), folder), arch, values)
    assert ".local" not in module.text, "an array is in memory: an index depends on a function constant"
    assert_assembles(module, names, lambda kernel: most_spills(kernel, features))


@pytest.mark.slow
@needs_ptxas
@needs_metal
def test_packed_kernels_load_one_by_one(folder):
    """What the package ships: every kernel of a file as a separate module."""

    def kernels_of(*names):
        built = {}
        for name in names:
            path = METAL / "metal" / "flash_attention" / f"{name}.metal"
            built |= build_ptx.kernels_of(shipped(path, tuple(declared(path, "float16")[0]), folder))
        return unpack_ptx(pack_ptx(built))

    kernels = kernels_of("backward_dq", "decode")
    assert "flash_attention_decode_combine_float16" in kernels
    assert len(kernels) > 20
    assert kernels["flash_attention_backward_dq_float16_d64v64"].startswith("// bindings 0 1 2 3 4 5 6 7 8 9 10 11\n")
    # It takes no mask, binding 3.
    without_mask = kernels_of("backward_dq_group")["flash_attention_backward_dq_matrix_group_float16_d64v64"]
    assert without_mask.startswith("// bindings 0 1 2 4 5 6 7 8 9 10 11\n")
    shared = 0
    for name in [name for name in kernels if "float16_d64" in name]:
        module = PtxModule("sm_90", with_constants(kernels[name], dict.fromkeys(range(32), True)), [])
        (report,) = assemble(module).values()
        assert report.spill_bytes <= most_spills(name, features=True)
        shared += report.shared_bytes > 0
        assert module.text.count(".entry") == 1
    assert shared


def test_steel_gemm_wastes_no_half():
    headers, instances, constants = MLX_KERNELS["steel_gemm"]
    module = compile_ptx(mlx_source(headers, instances), "sm_80", constants)
    products = [line for line in module.text.split("\n") if "mma.sync" in line]
    # 4 x 4 x 2 products of fragments of a SIMD group, two at a time, each in three parts, in three kernels.
    assert len(products) == 4 * 4 * 2 // 2 * 3 * 3
    assert "mslc_zero" not in module.text
