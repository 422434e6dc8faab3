"""Checks on import that the installed MLX matches the one that the extension was compiled against.

MLX's C++ ABI changes with every release, and nanobind passes types between two modules only if both were built with the
same internals. Without this check, a mismatch appears later as a missing symbol or as "incompatible function
arguments".
"""

import ctypes
import os
import re
from types import ModuleType

_KEY = re.compile(r"__nb_internals_(?P<tag>.+)_mlx__")


def import_mlx() -> ModuleType:
    """Imports ``mlx.core``.

    Raises:
        ImportError: MLX or its backend is missing; the text says what to install.
    """
    try:
        import mlx.core as mx
    except ImportError as error:
        raise ImportError(
            f"mlx_anvil needs MLX with a backend, and importing mlx.core failed: {error}\n"
            f"Install one, for Linux: {_hint('cpu')}; for NVIDIA: {_hint('cuda13')} (or cuda12); for macOS: "
            f"pip install mlx"
        ) from error
    return mx


def _hint(extra: str = "") -> str:
    """The command that installs an extra; without one, that installs the package again."""
    from mlx_anvil.mslc import install_command, reinstall_command  # imports the toolchain, which takes a while

    return install_command(extra) if extra else reinstall_command()


def installed_nanobind_tags() -> list[str]:
    """ABI tags of the nanobind builds that provide MLX's types in this process; in practice there is one."""
    get_state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyInterpreterState_Get", ctypes.pythonapi))
    # PyInterpreterState_GetDict returns a borrowed reference. With restype py_object, ctypes would release it.
    get_dict = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("PyInterpreterState_GetDict", ctypes.pythonapi))
    keys = ctypes.cast(get_dict(get_state()), ctypes.py_object).value
    matches = (_KEY.fullmatch(key) for key in keys if isinstance(key, str))
    return [match["tag"] for match in matches if match]


def check_isa(supported: list[str], left_out: list[str]) -> None:
    """Raises ImportError if MLX_ANVIL_ISA names an instruction set that this machine or build does not support, or if
    the build has kernels for other machines only."""
    if not supported:
        raise ImportError(
            "mlx_anvil was built on another machine, and this one lacks the instructions of its CPU kernels.\n"
            "From the source folder, either build here: pip install .\n"
            "or for every machine: MLX_ANVIL_ISAS=all pip install ."
        )
    wanted = os.environ.get("MLX_ANVIL_ISA")
    if wanted in left_out:
        raise ImportError(
            f"[MLX_ANVIL_ISA] is {wanted!r}, for which this build has no kernels; it has {', '.join(supported)}.\n"
            f"To build all, from the source folder: MLX_ANVIL_ISAS=all pip install ."
        )
    if wanted and wanted not in supported:
        raise ImportError(f"[MLX_ANVIL_ISA] is {wanted!r}; allowed on this machine: {', '.join(supported)}.")


def check(built_mlx: str, built_tag: str, installed_mlx: str, installed_tags: list[str]) -> None:
    """Raises ImportError if the two builds do not match; the text names both, and the command that fixes it."""
    if installed_mlx != built_mlx:
        raise ImportError(
            f"mlx_anvil was built for MLX {built_mlx}, but MLX {installed_mlx} is installed. MLX's C++ interface "
            f"belongs to one release.\n"
            f'Either install that MLX: pip install "mlx=={built_mlx}"\n'
            f"or rebuild mlx_anvil from its source folder: pip install ."
        )
    if built_tag not in installed_tags:
        found = ", ".join(installed_tags) or "none"
        raise ImportError(
            f"mlx_anvil was built with nanobind ABI {built_tag}, but MLX {installed_mlx} here uses {found}. "
            f"Types cannot pass between the two.\n"
            f"Reinstall to get builds that match: {_hint()}"
        )
