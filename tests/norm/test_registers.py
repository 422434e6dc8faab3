"""What NVIDIA GPUs launch of the norms assembles with next to no spills, within the registers that csrc/norm/gpu.cpp asks for."""

from dataclasses import replace
from functools import cache

import pytest

from mlx_anvil.mslc import Source
from mlx_anvil.mslc.ptx import ARCHITECTURES, PtxModule, assemble, compile_ptx, with_constants
from tests.mslc.ptx_support import METAL, needs_metal, needs_ptxas

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow, needs_ptxas, needs_metal]

WHOLE, SHARED, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, HAS_D_H, WANTS_WEIGHT, WANTS_BIAS = 11, 1, 3, 5, 6, 7, 8, 9
SHORT, FEW, AHEAD = 10, 12, 13
NARROW = ("float16_float16", "bfloat16_bfloat16")  # dtypes of rows and of weights
WIDE = ("float16_float32", "bfloat16_float32", "float32_float32")


@cache
def deferred(pass_: str, arch: str) -> PtxModule:
    return compile_ptx(Source.load(METAL / "metal" / "norm" / f"{pass_}.metal", [METAL]), arch, defers_constants=True)


def assert_spills(pass_: str, arch: str, norm: str, dtypes: tuple[str, ...], on: set[int], allowed: int = 0) -> None:
    module = deferred(pass_, arch)
    values = {index: index in on | {0, SHARED, HAS_WEIGHT, WHOLE} for index in range(14)}
    reports = assemble(replace(module, text=with_constants(module.text, values)))
    spills = {name: reports[name].spill_bytes for name in (f"{norm}_{pass_}_{types}" for types in dtypes)}
    assert max(spills.values()) <= allowed, spills


@pytest.mark.alike("arch")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("short", [False, True], ids=["", "short"])
def test_forward(norm, arch, short):
    centred = norm == "layer_norm"
    for more in ({HAS_RESIDUAL}, set()):
        common = more | ({HAS_BIAS} if centred else set()) | ({SHORT} if short else set())
        few = set() if more else {FEW}
        # An H100 is fastest with 40 registers, for which layer_norm puts a few addresses away.
        allowed = 32 if centred and few and not short else 0
        on = common | few | (set() if centred else {AHEAD})
        assert_spills("forward", arch, norm, NARROW, on, allowed)
        # A thread has half as many elements of float32 rows, which are short then.
        on = common | (few if short else set())
        assert_spills("forward", arch, norm, WIDE if short else WIDE[:2], on)


@pytest.mark.alike("arch")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("short", [False, True], ids=["", "short"])
def test_backward(norm, arch, short):
    centred = norm == "layer_norm"
    for more in ({HAS_D_H}, set()):
        common = more | {WANTS_WEIGHT} | ({WANTS_BIAS} if centred else set()) | ({SHORT} if short else set())
        few = {FEW} if short and not centred and not more else set()
        # All 128 registers are taken where layer_norm has all operands.
        allowed = 8 if centred and more and not short else 0
        assert_spills("backward", arch, norm, NARROW, common | few | {AHEAD}, allowed)
        assert_spills("backward", arch, norm, WIDE if short else WIDE[:2], common | few)
