"""Released macOS wheels, got by pip: MLX's, to compile and link against, and others whose binaries show what the libraries
of macOS export."""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

TARGET = (14, 0)  # the oldest macOS that MLX's wheels and ours run on

# Modules of much C++ that run on macOS 14 and older. There is no list of what a macOS exports; what these import, it does.
WITNESSES = ("duckdb", "grpcio", "rapidfuzz")

# pip takes a wheel for any of these: MLX's have the first, the witnesses' the others.
PLATFORMS = (f"macosx_{TARGET[0]}_0_arm64", "macosx_11_0_arm64", "macosx_11_0_universal2", "macosx_10_9_universal2")


def cache_folder() -> Path:
    """Where downloads and builds are kept: outside the checkout, MLX_ANVIL_MACOS_CACHE if it is set."""
    default = Path.home() / ".cache" / "mlx-anvil" / "macos"
    return Path(os.environ.get("MLX_ANVIL_MACOS_CACHE", default))


def unpack(requirements: list[str], folder: Path) -> Path:
    """Downloads wheels without their dependencies and unpacks them into one folder, once."""
    if folder.exists():
        return folder
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    target = ["--implementation", "cp", "--python-version", f"{sys.version_info.major}.{sys.version_info.minor}"]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        downloads, unpacked = Path(name) / "downloads", Path(name) / "unpacked"
        subprocess.run([*pip, *target, "--dest", downloads, *requirements], check=True)
        for wheel in downloads.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    return folder


def mlx() -> Path:
    """MLX for macOS, of the version that is installed here: the folder that holds include/, lib/ and core*.so."""
    wanted = version("mlx")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    requirements = [f"mlx=={wanted}", f"mlx-metal=={wanted}"]
    return unpack(requirements, cache_folder() / f"mlx-{wanted}-{tag}") / "mlx"


def witnesses() -> Path:
    return unpack(list(WITNESSES), cache_folder() / "witnesses")


def write(path: Path, text: str) -> None:
    """At once, since another process may be reading the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def binaries(folder: Path) -> list[Path]:
    """The Mach-O files of an unpacked wheel."""
    magic = {b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"}

    def is_mach_o(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(4) in magic

    return sorted(p for p in folder.rglob("*") if p.is_file() and is_mach_o(p))
