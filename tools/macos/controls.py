"""Negative controls: calls that must not link, because MLX's headers declare them but libmlx does not export them."""

import re
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


def link(sdk: Path, folder: Path) -> str:
    """Compiles and links a module that makes all the calls. Returns the linker's errors, or ""."""
    mlx = released.mlx()
    includes = ["-isystem", str(mlx / "include"), "-isystem", str(mlx / "include" / "metal_cpp")]
    source, compiled = folder / "control.cpp", folder / "control.o"
    headers, calls = zip(EXPORTED, *NOT_EXPORTED.values(), strict=True)
    included = "".join(f'#include "{header}"\n' for header in ("mlx/mlx.h", *headers))
    source.write_text(
        f'{included}extern "C" __attribute__((visibility("default"))) void PyInit__ext() {{ {"; ".join(calls)}; }}\n'
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
    """Lists the controls that failed. The linker must reject what it should, for the expected reason, and no more."""
    complaint = link(sdk, folder)
    undefined = re.findall(r"undefined symbol: mlx::core::([\w:]+)\(", complaint)
    found = [
        f"a call to {name} should be an undefined symbol; the linker says: {complaint or 'nothing'}"
        for name in NOT_EXPORTED
        if name not in undefined
    ]
    if complaint.count("undefined symbol: ") != len(NOT_EXPORTED):
        found.append(f"a call that libmlx exports does not link:\n{complaint}")
    return found
