"""The kernels of 64-bit Arm: every instruction set, cross-compiled, in an emulator that has it and in ones that lack it."""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
LIBRARIES = Path("/usr/aarch64-linux-gnu")
# As in cmake/CpuKernels.cmake, but for -O3, which takes twice as long to compile.
ISAS = {"baseline": "armv8-a", "dotprod": "armv8.2-a+dotprod", "i8mm": "armv8.2-a+dotprod+i8mm+bf16"}
KERNEL_FLAGS = ["-O1", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
DEFINES = [f"-DMLX_ANVIL_HAS_{name.upper()}=1" for name in ISAS]
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc"), "-I", str(ROOT), *DEFINES]
HOST = {
    "common": ("isa", "parallel", "thread_pool", "thread_scratch"),
    "quantized_matmul": ("cpu", "cpu_gemm", "cpu_plain", "gemv_operand", "large_rows"),
    "flash_attention": ("cpu", "cpu_backward", "cpu_plan", "cpu_sequences"),
}
# Processors, and the instruction sets that they run.
PROCESSORS = {"max": ["baseline", "dotprod", "i8mm"], "cortex-a76": ["baseline", "dotprod"], "cortex-a57": ["baseline"]}


def build(folder: Path) -> Path:
    compilations = {}
    for isa, machine in ISAS.items():
        flags = [*KERNEL_FLAGS, f"-march={machine}", f"-DMLX_ANVIL_ISA_NAMESPACE=isa_{isa}"]
        for op in ("quantized_matmul", "flash_attention"):
            for source in sorted(ROOT.glob(f"csrc/{op}/simd/*.cpp")):
                compilations[folder / f"{isa}_{op}_{source.stem}.o"] = [*flags, str(source)]
    for part, names in HOST.items():
        for name in names:
            compilations[folder / f"{part}_{name}.o"] = ["-O1", str(ROOT / "csrc" / part / f"{name}.cpp")]
    for source in (Path(__file__).parent / "arm").glob("*.cpp"):
        compilations[folder / f"check_{source.stem}.o"] = ["-O1", str(source)]

    def compile_one(item: tuple[Path, list[str]]) -> None:
        subprocess.run([COMPILER, *FLAGS, *item[1], "-c", "-o", str(item[0])], check=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, compilations.items()))
    program = folder / "driver"
    subprocess.run([COMPILER, *map(str, compilations), "-lpthread", "-o", str(program)], check=True)
    return program


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() == "aarch64", reason="the other tests run these kernels")
@pytest.mark.skipif(not COMPILER or not EMULATOR, reason="needs g++-aarch64-linux-gnu and qemu-user")
def test_products_in_an_emulator(tmp_path, rng):
    program = build(tmp_path)
    for processor, isas in PROCESSORS.items():
        seed = str(rng.integers(2**31))
        command = [EMULATOR, "-L", str(LIBRARIES), "-cpu", processor, str(program), seed, *isas]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, f"{processor}, seed {seed}:\n{run.stdout}{run.stderr}"
