"""MLX's own kernels, unmodified, from the installed wheel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from mlx_anvil.mslc import Library, Options
from mlx_anvil.mslc.compiler import CHECKED, UNCHECKED

HEADERS = "mlx/backend/metal/kernels"


@cache
def include_dir() -> Path:
    import mlx

    return Path(next(iter(mlx.__path__))) / "include"


def source(headers: list[str], instances: list[tuple[str, ...]]) -> str:
    """A .metal file that instantiates kernels: each instance is (host name, function, template arguments...)."""
    lines = ["#include <metal_stdlib>"]
    lines += [f'#include "{HEADERS}/{header}"' for header in ["utils.h", *headers]]
    lines += ['instantiate_kernel("{}", {})'.format(name, ", ".join(map(str, rest))) for name, *rest in instances]
    return "\n".join(lines) + "\n"


def library(
    headers: list[str],
    instances: list[tuple],
    constants: Mapping[int | str, object] | None = None,
    options: Options | None = None,
    metal_version: int | None = None,
) -> Library:
    """Compiles a library. With MSLC_CHECKED=1 in the environment, all checks are on, which takes several times as
    long."""
    options = options or (CHECKED if os.environ.get("MSLC_CHECKED") == "1" else UNCHECKED)
    defines = {"MLX_METAL_JIT": 1, **({"__METAL_VERSION__": metal_version} if metal_version else {})}
    return Library(source(headers, instances), [include_dir()], constants, defines, options)


# ---- dtypes: NumPy has no bfloat16, so its bits travel as uint16 ------------------------------------


def to_bfloat(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


ENCODE = {
    "float": lambda a: np.ascontiguousarray(a, np.float32),
    "half": lambda a: np.ascontiguousarray(a, np.float16),
    "bfloat16_t": to_bfloat,
}
DECODE = {
    "float": lambda a: a.astype(np.float64),
    "half": lambda a: a.astype(np.float64),
    "bfloat16_t": lambda a: from_bfloat(a).astype(np.float64),
}
# Of the largest magnitude in the reference: half a unit in the last place, times what a few roundings add up to.
TOLERANCE = {"float": 1e-5, "half": 2e-3, "bfloat16_t": 1.6e-2}


def assert_close(actual: np.ndarray, reference: np.ndarray, dtype: str) -> None:
    scale = np.abs(reference).max()
    error = np.abs(actual - reference).max() / scale
    assert error <= TOLERANCE[dtype], f"error {error:.2e} of the largest value, allowed {TOLERANCE[dtype]:.0e}"
