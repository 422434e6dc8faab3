"""Negative controls: calls that must not link, because MLX's headers declare them but libmlx does not export them."""

import subprocess
from pathlib import Path

import released

# Declared in MLX's headers and defined in libmlx, but not exported by any release.
NOT_EXPORTED = {
    "get_block_dims": ("mlx/backend/metal/utils.h", "(void)mlx::core::get_block_dims(1, 2, 3, 10)"),
    "contiguous_copy_gpu": (
        "mlx/backend/gpu/copy.h",
        "(void)mlx::core::contiguous_copy_gpu(mlx::core::array(1), mlx::core::default_stream(mlx::core::Device::gpu))",
    ),
}
EXPORTED = ("mlx/backend/gpu/device_info.h", "(void)mlx::core::gpu::is_available()")


def link(sdk: Path, folder: Path, header: str, call: str) -> str:
    """Compiles and links a module that makes one call. Returns the linker's error, or ""."""
    mlx = released.mlx()
    includes = ["-isystem", str(mlx / "include"), "-isystem", str(mlx / "include" / "metal_cpp")]
    source, compiled = folder / "control.cpp", folder / "control.o"
    source.write_text(
        f'#include "mlx/mlx.h"\n#include "{header}"\n'
        f'extern "C" __attribute__((visibility("default"))) void PyInit__ext() {{ {call}; }}\n'
    )
    compiler = str(sdk / "bin" / "c++")
    defines = ["-D_METAL_", "-DACCELERATE_NEW_LAPACK"]
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-w", *defines, *includes, "-c", str(source), "-o", str(compiled)], check=True
    )
    module = [compiler, "-bundle", str(compiled), "-o", str(folder / "control.so")]
    result = subprocess.run([*module, str(mlx / "lib" / "libmlx.dylib")], capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def problems(sdk: Path, folder: Path) -> list[str]:
    """Lists the controls that failed. The linker must reject what it should, for the expected reason."""
    found = []
    if complaint := link(sdk, folder, *EXPORTED):
        found.append(f"a call that libmlx exports does not link:\n{complaint}")
    for name, (header, call) in NOT_EXPORTED.items():
        complaint = link(sdk, folder, header, call)
        if f"undefined symbol: mlx::core::{name}(" not in complaint:
            found.append(f"a call to {name} should be an undefined symbol; the linker says: {complaint or 'nothing'}")
    return found
