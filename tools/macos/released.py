"""Downloads released macOS wheels with pip.

MLX's wheels are needed to compile and link against. The others show which symbols the libraries of macOS export."""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

TARGET = (14, 0)  # the oldest macOS that MLX's wheels and ours support

# C++-heavy modules that run on macOS 14 and older. No list of macOS exports exists, but macOS exports what these
# import.
WITNESSES = ("duckdb", "grpcio", "rapidfuzz")

# pip accepts wheels for any of these. MLX's wheels have the first platform, the witnesses the others.
PLATFORMS = (f"macosx_{TARGET[0]}_0_arm64", "macosx_11_0_arm64", "macosx_11_0_universal2", "macosx_10_9_universal2")


def cache_folder() -> Path:
    """Returns the folder for downloads and builds. It is outside the checkout; MLX_ANVIL_MACOS_CACHE overrides it."""
    default = Path.home() / ".cache" / "mlx-anvil" / "macos"
    return Path(os.environ.get("MLX_ANVIL_MACOS_CACHE", default))


def unpack(requirements: list[str], folder: Path) -> Path:
    """Downloads wheels without dependencies and unpacks them into one folder, unless it exists."""
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
            if not folder.exists():  # otherwise another process was faster
                raise
    return folder


def mlx() -> Path:
    """Returns the installed version of MLX for macOS: the folder with include/, lib/ and core*.so."""
    wanted = version("mlx")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    requirements = [f"mlx=={wanted}", f"mlx-metal=={wanted}"]
    return unpack(requirements, cache_folder() / f"mlx-{wanted}-{tag}") / "mlx"


def witnesses() -> Path:
    return unpack(list(WITNESSES), cache_folder() / "witnesses")


def write(path: Path, text: str) -> None:
    """Writes a file atomically, since another process may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def binaries(folder: Path) -> list[Path]:
    """Returns the Mach-O files of an unpacked wheel."""
    magic = {b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"}

    def is_mach_o(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(4) in magic

    return sorted(p for p in folder.rglob("*") if p.is_file() and is_mach_o(p))
