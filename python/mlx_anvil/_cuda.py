"""The kernels' PTX, for MLX's CUDA backend: what tools/build_ptx.py packed beside the extension."""

import lzma
from functools import cache
from pathlib import Path

from mlx_anvil import _ext

FOLDER = Path(_ext.__file__).parent / "ptx"


@cache
def _modules(op: str) -> dict[str, str]:
    """Kernel name to the PTX module that holds it alone."""
    text = lzma.decompress((FOLDER / f"{op}.ptx.xz").read_bytes()).decode()
    modules = (module.partition("\n") for module in text.split("//! ")[1:])
    return {name: body for name, _, body in modules}


def _ptx(op: str, kernel: str) -> str:
    return _modules(op)[kernel]


def register() -> None:
    """Gives the extension access to the files, where this build has them. Nothing is read before a kernel is launched."""
    if _ext._has_cuda() and FOLDER.is_dir():
        _ext._set_ptx_source(_ptx)
