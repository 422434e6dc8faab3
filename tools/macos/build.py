"""Builds the package for arm64 macOS on this machine, and runs the checks that need no Mac.

  python tools/macos/build.py --check          build and check
  python tools/macos/build.py --wheel dist     also put the wheel into dist/

The environment needs the build requirements of pyproject.toml, `ziglang`, `lief` and LLVM's ld64.lld (Debian: lld). pip
downloads MLX's macOS wheels. Downloads and builds are cached in ~/.cache/mlx-anvil/macos (MLX_ANVIL_MACOS_CACHE).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import check
import controls
import macho
import released
import sdk

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = f"{sys.version_info.major}{sys.version_info.minor}"


def build_wheel(sdk_folder: Path, folder: Path, options: list[str]) -> Path:
    """Builds the wheel with the normal build and a cross-compiler."""
    defines = {
        "CMAKE_TOOLCHAIN_FILE": HERE / "toolchain.cmake",
        "MLX_ANVIL_MACOS_SDK": sdk_folder,
        # As `pip install` compiles on a Mac. That a file includes too little shows in a developer's build.
        "MLX_ANVIL_UNITY": "ON",
        "MLX_ANVIL_PRECOMPILE": "ON",
        "MLX_ROOT": released.mlx() / "share" / "cmake" / "MLX",
    }
    settings = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    build = released.cache_folder() / f"build-cp{PYTHON}"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--wheel-dir", folder, *settings, f"-Cbuild-dir={build}", "-Cinstall.strip=false", *options, ROOT],
        check=True,
        env={**os.environ, "SETUPTOOLS_EXT_SUFFIX": f".cpython-{PYTHON}-darwin.so"},
    )
    (made,) = folder.glob("*.whl")
    # The build tags the wheel with the machine that it runs on.
    tag = f"macosx_{released.TARGET[0]}_{released.TARGET[1]}_arm64"
    subprocess.run(
        [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, made],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_wheel(wheel: Path, folder: Path) -> list[str]:
    zipfile.ZipFile(wheel).extractall(folder)
    modules = list((folder / "mlx_anvil").glob("_ext*"))
    expected = f"_ext.cpython-{PYTHON}-darwin.so"
    if [m.name for m in modules if m.suffix == ".so"] != [expected]:
        return [f"the wheel holds {[m.name for m in modules]}, not {expected}"]
    module = macho.read(folder / "mlx_anvil" / expected)
    found = check.problems(module, check.Exports.of_macos())
    if not found:
        print(f"{expected}: {len(module.imports)} imports, all of them exported on macOS {released.TARGET[0]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="build, check, keep nothing but the cache")
    what.add_argument("--wheel", type=Path, metavar="FOLDER", help="build, check, and leave the wheel in FOLDER")
    args = parser.parse_args()
    # Only releases are optimised. The checks look at symbols. Pass both options always, because the build folder caches
    # them.
    build_type, kernels = ("Release", "-O3") if args.wheel else ("MinSizeRel", "-Os")
    options = [f"-Ccmake.build-type={build_type}", f"-Ccmake.define.MLX_ANVIL_KERNEL_OPTIMISATION={kernels}"]

    sdk_folder = sdk.make()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(sdk_folder, folder, options)
        found = check_wheel(wheel, folder / "unpacked") + controls.problems(sdk_folder, folder)
        for problem in found:
            print(f"{wheel.name}: {problem}", file=sys.stderr)
        if not found and args.wheel:
            args.wheel.mkdir(parents=True, exist_ok=True)
            print(shutil.copy(wheel, args.wheel))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
