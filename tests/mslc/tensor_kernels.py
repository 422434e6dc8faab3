"""Kernels of one product by matmul2d, and what they must give."""

from __future__ import annotations

import numpy as np

from mlx_anvil.mslc import Library, Options
from mlx_anvil.mslc.compiler import UNCHECKED
from tests.mslc.msl import from_bfloat, to_bfloat

METAL_4 = {"__METAL_VERSION__": 400}
HEAD = """#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
NUMPY = {"half": np.float16, "bfloat": np.uint16, "float": np.float32, "int8_t": np.int8, "int": np.int32}


def library(text: str, options: Options = UNCHECKED) -> Library:
    return Library(HEAD + text, defines=METAL_4, options=options)


def random(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind in ("int8_t", "int"):
        return rng.integers(-128, 128, shape).astype(NUMPY[kind])
    values = rng.standard_normal(shape).astype(np.float32)
    return to_bfloat(values) if kind == "bfloat" else values.astype(NUMPY[kind])


def values(array: np.ndarray, kind: str) -> np.ndarray:
    return (from_bfloat(array) if kind == "bfloat" else array).astype(np.float64)


def product_kernel(
    types: tuple[str, str, str],
    shape: tuple[int, int, int],
    transposed: tuple[bool, bool] = (False, False),
    relaxed: bool = False,
    mode: str = "multiply_accumulate",
) -> str:
    """`k` multiplies cooperative tensors whose elements are set one by one, as the index of each tells."""
    a, b, d = types
    m, n, k = shape
    flags = ", ".join("true" if flag else "false" for flag in (*transposed, relaxed))
    across = (m if transposed[0] else k, k if transposed[1] else n)
    each = "for (ushort i = 0; i < {0}.get_capacity(); ++i) {{ auto at = {0}.get_multidimensional_index(i); {1} }}"
    fill = [
        each.format(name, f"{name}[i] = {name}s[at[1] * {row} + at[0]];")
        for name, row in (("a", across[0]), ("b", across[1]), ("d", n))
    ]
    return f"""
kernel void k(const device {a}* as [[buffer(0)]], const device {b}* bs [[buffer(1)]], device {d}* ds [[buffer(2)]]) {{
  constexpr auto product = matmul2d_descriptor({m}, {n}, {k}, {flags}, matmul2d_descriptor::mode::{mode});
  matmul2d<product, execution_simdgroup> op;
  auto a = op.get_left_input_cooperative_tensor<{a}, {b}, {d}>();
  auto b = op.get_right_input_cooperative_tensor<{a}, {b}, {d}>();
  auto d = op.get_destination_cooperative_tensor<decltype(a), decltype(b), {d}>();
  {fill[0]}
  {fill[1]}
  {fill[2]}
  op.run(a, b, d);
  {each.format("d", f"ds[at[1] * {n} + at[0]] = d[i];")}
}}
"""


def stored(shape: tuple[int, int, int], transposed: tuple[bool, bool]) -> tuple[tuple[int, int], tuple[int, int]]:
    m, n, k = shape
    return (k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n)


def run_product(rng, types, shape, transposed=(False, False), relaxed=False, mode="multiply_accumulate"):
    """The result of a product of random matrices, and the one in float64."""
    of_a, of_b = stored(shape, transposed)
    a, b, d = (random(rng, t, s) for t, s in zip(types, (of_a, of_b, shape[:2]), strict=True))
    left, right = values(a, types[0]), values(b, types[1])
    left = left.T if transposed[0] else left
    right = right.T if transposed[1] else right
    expected = left @ right + (values(d, types[2]) if mode == "multiply_accumulate" else 0)
    library(product_kernel(types, shape, transposed, relaxed, mode)).run("k", {0: a, 1: b, 2: d}, (1,), (32,))
    return values(d, types[2]), expected
