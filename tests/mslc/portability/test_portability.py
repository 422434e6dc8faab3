"""The runtime on other machines: a C program with the runtime and a kernel, for arm64 under qemu and for this machine
with the portable context switch."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_anvil.mslc import Source, ToolchainError, compiler, toolchain

HERE = Path(__file__).parent
# The C library of Debian's libc6-arm64-cross. Without it, zig builds one, which takes two minutes.
ARM_LIBRARIES = Path("/usr/aarch64-linux-gnu")
RUNTIME_FLAGS = ["-x", "c++", "-std=c++20", "-O2", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]


def compile_all(directory: Path, target: list[str], defines: list[str]) -> list[str]:
    """Compiles kernel.metal, the runtime and the driver for a target; returns the objects."""
    objects = [directory / "kernel.o"]
    source = Source.load(HERE / "kernel.metal")
    preprocessed = compiler.run_preprocessor(source)
    rewritten = compiler.run_rewriter(source, preprocessed)
    machine = [] if target else compiler.MACHINE_FLAGS
    flags = [f for f in compiler.CPU_FLAGS if f not in compiler.MACHINE_FLAGS]
    flags = [*compiler.PRECISION_FLAGS, *compiler.RELAXED_SPACES, *flags, *machine]
    clang_target = [f"--target={target[1]}"] if target else []
    compiler.run_compiler(source, preprocessed, rewritten, [*flags, *clang_target, "-c", "-o", str(objects[0])])
    for unit in [*sorted(toolchain.RUNTIME.glob("*.cpp")), HERE / "driver.c"]:
        language = RUNTIME_FLAGS if unit.suffix == ".cpp" else ["-O1", "-fno-sanitize=all"]
        objects.append(directory / f"{unit.stem}.o")
        arguments = ["cc", *target, "-fPIC", *language, *defines, "-I", str(toolchain.RUNTIME), "-c", str(unit)]
        toolchain.require(toolchain.run_tool([*arguments, "-o", str(objects[-1])]), unit.name)
    return [str(path) for path in objects]


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout.strip()


@pytest.mark.skipif(platform.system() != "Linux", reason="the simulator runs on Linux")
def test_portable_context_switch(tmp_path):
    # As a library: the compiler would first make C libraries of its own for a program.
    library = tmp_path / "driver.so"
    objects = compile_all(tmp_path, [], ["-DMSLC_FIBER_UCONTEXT"])
    toolchain.link_shared(objects, library, needed=toolchain._c_libraries(str(tmp_path)))
    run_main = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).main())"
    assert output([sys.executable, "-c", run_main, str(library)]) == "ok"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="needs qemu-user")
def test_arm64(tmp_path):
    has_library = (ARM_LIBRARIES / "lib").is_dir()
    target = ["-target", "aarch64-linux-gnu" if has_library else "aarch64-linux-musl"]
    program = tmp_path / "program"
    static = [] if has_library else ["-static"]
    arguments = ["cc", *target, *static, *compile_all(tmp_path, target, []), "-lm", "-lpthread", "-o", str(program)]
    toolchain.require(toolchain.run_tool(arguments), "linking")
    assert output([shutil.which("qemu-aarch64"), "-L", str(ARM_LIBRARIES), str(program)]) == "ok"


def test_other_systems_get_a_clear_error(monkeypatch):
    monkeypatch.setattr(toolchain.sys, "platform", "darwin")
    with pytest.raises(ToolchainError, match="the simulator runs on Linux"):
        toolchain.build_runtime()
