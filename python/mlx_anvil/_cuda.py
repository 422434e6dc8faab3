"""Kernels for MLX's CUDA backend, which tools/build_ptx.py and tools/build_cubins.py pack beside the extension."""

import os
import re
from functools import cache
from pathlib import Path

from mlx_anvil import _ext
from mlx_anvil._kernel_files import cubins_name, unpack_cubins, unpack_ptx

FOLDER = Path(_ext.__file__).parent / "ptx"
CUBINS = FOLDER.with_name("cubin")


@cache
def _modules(op: str) -> dict[str, str]:
    """Maps the name of a kernel to its PTX module."""
    return unpack_ptx((FOLDER / f"{op}.ptx.xz").read_bytes())


def _ptx(op: str, kernel: str) -> str:
    return _modules(op)[kernel]


@cache
def _cubins(op: str, architecture: str) -> dict[str, bytes]:
    """Maps pipeline keys to machine code. Most keys have none, and the driver assembles their PTX."""
    path = CUBINS / cubins_name(op, architecture)
    return unpack_cubins(path.read_bytes()) if path.exists() else {}


@cache
def architectures() -> tuple[str, ...]:
    """Architectures with cubins in this installation, such as "sm_90", oldest first; empty with MLX_ANVIL_CUBINS=0."""
    if os.environ.get("MLX_ANVIL_CUBINS") == "0":
        return ()
    found = {match[1] for path in CUBINS.glob("*") if (match := re.search(r"\.(sm_\d+)\.", path.name))}
    return tuple(sorted(found, key=_capability))


def _capability(architecture: str) -> tuple[int, int]:
    return divmod(int(architecture.removeprefix("sm_")), 10)


def _cubin(op: str, key: str, major: int, minor: int) -> tuple[str, bytes]:
    """The architecture and the cubin for a device of this compute capability; both empty if there is none.

    A cubin runs on devices of the same major version and the same or a higher minor version.
    """
    for architecture in reversed(architectures()):
        of_major, least_minor = _capability(architecture)
        if of_major == major and least_minor <= minor and (image := _cubins(op, architecture).get(key)):
            return architecture, image
    return "", b""


def register() -> None:
    """Registers the loaders of PTX and cubins with the extension. Files are read on the first launch."""
    if _ext._has_cuda() and FOLDER.is_dir():
        _ext._set_cuda_modules(_ptx, _cubin)
