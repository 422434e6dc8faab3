"""Helpers that run pieces of Metal in tests."""

from __future__ import annotations

from functools import cache

import numpy as np

from mlx_anvil.mslc import Library

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
METAL_TYPES = {
    "float32": "float",
    "float16": "half",
    "int8": "char",
    "uint8": "uchar",
    "int16": "short",
    "uint16": "ushort",
    "int32": "int",
    "uint32": "uint",
    "int64": "long",
    "uint64": "ulong",
    "bool": "bool",
}


@cache
def library(source: str) -> Library:
    return Library(HEAD + source)


def to_bfloat(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def evaluate(
    expression: str, *inputs: np.ndarray, out: str, types: tuple[str, ...] = (), prelude: str = ""
) -> np.ndarray:
    """Runs one thread per element: o[i] = expression, with the inputs' elements named a, b, c, d.

    `types` are the Metal types of the inputs where they do not follow from the arrays; `out` is a NumPy dtype name, or
    'dtype:metal type:components'.
    """
    dtype, _, rest = out.partition(":")
    metal_out, _, components = rest.partition(":")
    metal_out = metal_out or METAL_TYPES[dtype]
    size = int(components or 1)
    names = "abcd"[: len(inputs)]
    types = types or tuple(METAL_TYPES[str(x.dtype)] for x in inputs)
    count = inputs[0].shape[0]
    parameters = [f"const device {t}* {n}s [[buffer({i})]]" for i, (t, n) in enumerate(zip(types, names, strict=True))]
    parameters.append(f"device {metal_out}* o [[buffer({len(inputs)})]]")
    parameters += ["uint i [[thread_position_in_grid]]", "uint lane [[thread_index_in_simdgroup]]"]
    loads = " ".join(f"{t} {n} = {n}s[i];" for t, n in zip(types, names, strict=True))
    source = f"{prelude}\nkernel void k({', '.join(parameters)}) {{ {loads} o[i] = {expression}; }}\n"
    result = np.zeros((count, size) if size > 1 else count, dtype)
    buffers = {i: np.ascontiguousarray(x) for i, x in enumerate(inputs)}
    library(source).run("k", {**buffers, len(inputs): result}, (count,), (min(count, 1024),), dispatch="threads")
    return result
