"""The kernels for MLX's CUDA backend: what tools/build_ptx.py and tools/build_cubins.py packed beside the extension."""

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
    """Kernel name to the PTX module that holds it alone."""
    return unpack_ptx((FOLDER / f"{op}.ptx.xz").read_bytes())


def _ptx(op: str, kernel: str) -> str:
    return _modules(op)[kernel]


@cache
def _cubins(op: str, architecture: str) -> dict[str, bytes]:
    """Pipeline key to machine code; of few keys."""
    path = CUBINS / cubins_name(op, architecture)
    return unpack_cubins(path.read_bytes()) if path.exists() else {}


@cache
def architectures() -> tuple[str, ...]:
    """Those that this installation has cubins for, such as "sm_90", the oldest first. None with MLX_ANVIL_CUBINS=0."""
    if os.environ.get("MLX_ANVIL_CUBINS") == "0":
        return ()
    found = {match[1] for path in CUBINS.glob("*") if (match := re.search(r"\.(sm_\d+)\.", path.name))}
    return tuple(sorted(found, key=_capability))


def _capability(architecture: str) -> tuple[int, int]:
    return divmod(int(architecture.removeprefix("sm_")), 10)


def _cubin(op: str, key: str, major: int, minor: int) -> tuple[str, bytes]:
    """A cubin for a device of this compute capability, with its architecture; both empty where there is none.

    Machine code runs on devices of its own major version that are not older: sm_80 on 8.0, 8.6 and 8.9, sm_90 on 9.0.
    """
    for architecture in reversed(architectures()):
        of_major, least_minor = _capability(architecture)
        if of_major == major and least_minor <= minor and (image := _cubins(op, architecture).get(key)):
            return architecture, image
    return "", b""


def register() -> None:
    """Gives the extension access to the files, where this build has them. Nothing is read before a kernel is launched."""
    if _ext._has_cuda() and FOLDER.is_dir():
        _ext._set_cuda_modules(_ptx, _cubin)
