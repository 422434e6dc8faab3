"""Memory profiles and instruction counts of the Metal kernels of quantized matrices and of MLX's kernels.

Ours are the launches of the op itself. Both sides get the same dense arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil.mslc import PROFILED, LaunchProfile, Library
from mlx_anvil.mslc.preprocess import Source
from mlx_anvil.mslc.ptx import compile_ptx
from mlx_anvil.mslc.simulator import Report
from quantized_numpy import Format, Matrix, draw
from tests.mslc.control.mlx_kernels import include_dir, source
from tests.mslc.control.test_quantized import AFFINE, FLOATING, batch
from tests.quantized_matmul.ptx_loops import Loop, hot_loop

METAL_TYPES = {"float32": "float", "float16": "half"}
GEMV, SWIGLU, PLAIN = PRODUCTS = ("gemv", "swiglu", "plain")
TILES = "tiles"  # as GEMV, but quantized_matmul for any number of rows


@dataclass
class Call:
    """One product: `rows` rows of x, and one matrix [outputs, columns] (swiglu: two)."""

    product: str
    format: Format
    dtype: str
    x: np.ndarray
    matrices: list[Matrix]

    @classmethod
    def draw(
        cls, rng: np.random.Generator, product: str, format: Format, dtype: str, rows: int, outputs: int, columns: int
    ) -> Call:
        count = 2 if product == SWIGLU else 1
        matrices = [draw(format, (outputs, columns), rng, getattr(mx, dtype)) for _ in range(count)]
        terms = outputs if product == PLAIN else columns
        x = (rng.standard_normal((rows, terms)) * terms**-0.5).astype(dtype)
        return cls(product, format, dtype, x, matrices)

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def outputs(self) -> int:
        return self.matrices[0].w.shape[0]

    @property
    def columns(self) -> int:
        return self.matrices[0].scales.shape[1] * self.format.group_size

    def empty_out(self) -> np.ndarray:
        return np.full((self.rows, self.columns if self.product == PLAIN else self.outputs), np.nan, self.dtype)

    def assert_close(self, out: np.ndarray) -> None:
        """Checks that the profiled launch computed the right result."""
        x = self.x.astype(np.float64)
        products = [x @ (m.weights if self.product == PLAIN else m.weights.T) for m in self.matrices]
        exact = products[0]
        if self.product == SWIGLU:
            exact = products[0] / (1 + np.exp(-products[0])) * products[1]
        assert np.abs(out - exact).max() <= (1e-5 if self.dtype == "float32" else 2e-3) * np.abs(exact).max()


def is_words(buffer: str) -> bool:
    return buffer in ("w", "gate_w", "up_w")


@dataclass
class Counts:
    """Sums over the launches of a call, for the matrices w, scales and biases. `unique` bytes count once however often
    they are read. Lines have 128 bytes."""

    word_bytes: int = 0  # of w alone
    word_unique: int = 0
    matrix_bytes: int = 0
    matrix_unique: int = 0
    matrix_lines: int = 0
    matrix_fewest_lines: int = 0
    x_bytes: int = 0
    x_lines: int = 0
    other_bytes: int = 0  # what a second pass reads, and what is written
    threadgroup_bytes: int = 0
    barriers: int = 0
    threadgroup_memory: int = 0  # the most of a launch

    def add(self, profile: LaunchProfile | None) -> None:
        assert profile is not None
        for site in profile.sites:
            if site.memory == "constant":
                continue
            if site.memory == "threadgroup":
                self.threadgroup_bytes += site.bytes
            elif site.kind == "write" or site.buffer == "parts":
                self.other_bytes += site.bytes
            elif site.buffer == "x":
                self.x_bytes += site.bytes
                self.x_lines += site.transactions
            else:
                self.word_bytes += site.bytes * is_words(site.buffer)
                self.matrix_bytes += site.bytes
                self.matrix_lines += site.transactions
                self.matrix_fewest_lines += site.ideal_transactions
        for buffer in profile.buffers:
            self.word_unique += buffer.bytes_read * is_words(buffer.name)
            self.matrix_unique += buffer.bytes_read * bool(re.fullmatch(r"((gate|up)_)?(w|scales|biases)", buffer.name))
        self.barriers += profile.barriers
        self.threadgroup_memory = max(self.threadgroup_memory, profile.threadgroup_memory)


# ---- ours ------------------------------------------------------------------------------------------------------------


def evaluate(call: Call) -> mx.array:
    arrays = [m.arrays for m in call.matrices]
    x, options = mx.array(call.x), call.format.options
    if call.product == SWIGLU:
        out = mlx_anvil.quantized_swiglu(x, *arrays, **options)
    elif call.product == GEMV and call.rows <= 8:
        out = mlx_anvil.quantized_gemv(x, *arrays[0], **options)
    else:
        out = mlx_anvil.quantized_matmul(x, *arrays[0], transpose=call.product != PLAIN, **options)
    mx.eval(out)
    return out


def profile_ours(call: Call) -> Counts:
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        out = evaluate(call)
    counts = Counts()
    for profile in profiles:
        counts.add(profile)
    call.assert_close(np.array(out))
    return counts


# ---- MLX's -----------------------------------------------------------------------------------------------------------


@cache
def mlx_library(name: str, headers: tuple[str, ...], arguments: tuple[object, ...]) -> Library:
    text = source(list(headers), [("kernel", name, *arguments)])
    return Library(text, [include_dir()], None, {"MLX_METAL_JIT": 1}, PROFILED)


def profile_mlx(function: str, call: Call, *arguments: object) -> Counts:
    """`arguments` are the template arguments after the format."""
    affine = call.format.affine
    name = f"{'affine' if affine else 'fp'}_{function}"
    options = METAL_TYPES[call.dtype], call.format.group_size, call.format.bits, *arguments
    library = mlx_library(name, tuple(AFFINE if affine else FLOATING), options)
    counts, outs = Counts(), []
    for matrix in call.matrices:
        out = call.empty_out()
        # The third argument of the other formats is a scale for the whole matrix, which is not used.
        biases = np.array(matrix.biases) if affine else np.ones(1, np.float32)
        arrays = [np.array(matrix.w), np.array(matrix.scales), biases, call.x, out]
        counts.add(LAUNCH[function](library, call, arrays, *arguments).profile)
        outs.append(out)
    if call.product != SWIGLU:  # MLX has no kernel for it; its silu and product are not counted
        call.assert_close(outs[0])
    return counts


def launch_qmv(library: Library, call: Call, arrays: list[np.ndarray], *_: object) -> Report:
    buffers = dict(enumerate([*arrays, call.columns, call.outputs])) | batch(7, 8 if call.format.affine else 7)
    return library.run("kernel", buffers, (call.rows, -(-call.outputs // 8), 1), (32, 2, 1))


def launch_qmv_wide(library: Library, call: Call, arrays: list[np.ndarray], *arguments: object) -> Report:
    vectors, lanes = int(str(arguments[0])), int(str(arguments[1]))
    buffers = dict(enumerate([*arrays, call.columns, call.outputs, call.rows])) | batch(8, 8)
    grid = -(-call.rows // vectors), -(-call.outputs // (2 * 32 // lanes)), 1
    return library.run("kernel", buffers, grid, (32, 2, 1))


def launch_qvm(library: Library, call: Call, arrays: list[np.ndarray], *_: object) -> Report:
    buffers = dict(enumerate([*arrays, call.outputs, call.columns])) | batch(7, 8)
    return library.run("kernel", buffers, (call.rows, call.columns // 64, 1), (32, 2, 1))


def launch_qvm_split_k(library: Library, call: Call, arrays: list[np.ndarray], *arguments: object) -> Report:
    """NumPy adds up the parts, which is not counted."""
    parts = int(str(arguments[0]))
    w, scales, biases, x, out = arrays
    partial = np.zeros((parts, *out.shape), out.dtype)
    length = call.outputs // parts
    shape = np.array([parts, call.rows, length], np.int32)

    def strides(step: int) -> np.ndarray:
        return np.array([step, 0, 0], np.int64)

    buffers = dict(
        enumerate([w, scales, biases, x, partial, length, call.columns, 1, shape, strides(length), 1, shape])
    )
    buffers |= {12: strides(length * w.shape[1]), 13: strides(length * scales.shape[1])}
    buffers |= {14: strides(length * scales.shape[1]), 15: length}
    report = library.run("kernel", buffers, (call.rows, call.columns // 64, parts), (32, 2, 1))
    out[...] = partial.astype(np.float64).sum(0)
    return report


def launch_qmm(library: Library, call: Call, arrays: list[np.ndarray], *_: object) -> Report:
    """Launches either orientation. The summed dimension comes first."""
    columns, terms = call.empty_out().shape[1], call.x.shape[1]
    buffers = dict(enumerate([*arrays, terms, columns, call.rows])) | batch(8, 8)
    return library.run("kernel", buffers, (-(-columns // 32), -(-call.rows // 32), 1), (32, 2, 2))


LAUNCH: dict[str, Callable[..., Report]] = {
    "qmv_fast": launch_qmv,
    "qmv": launch_qmv,
    "qmv_wide": launch_qmv_wide,
    "qvm": launch_qvm,
    "qvm_split_k": launch_qvm_split_k,
    "qmm_t": launch_qmm,
    "qmm_n": launch_qmm,
}


# ---- instructions ----------------------------------------------------------------------------------------------------

# MLX's loops over a few rows leave it to the compiler to unroll them, as Apple's does: without, sums are in memory.
UNROLLED = ("-mllvm", "-unroll-threshold=5000")
METAL = Path(__file__).resolve().parents[2]


def our_instructions(product: str, format: Format, dtype: str, rows: int) -> dict[str, float]:
    """Instructions of the inner loop per weight, for all rows."""
    file = "plain" if product == PLAIN else "gemv"
    template = f"AffineFormat<{format.bits}>" if format.affine else f"{format.mode.capitalize()}Format"
    instance = f"quantized_{product}<{METAL_TYPES[dtype]}, {template}, {rows}>"
    definitions = (METAL / "metal" / "quantized_matmul" / f"{file}.metal").read_text().split("#define INSTANTIATE")[0]
    text = definitions + f'template [[host_name("kernel")]] [[kernel]] decltype({instance}) {instance};\n'
    # Whole vectors, and as large matrices are dispatched.
    constants = {0: True, 2: True} if product == PLAIN else {0: True, 1: False}
    module = compile_ptx(Source.load(text, [METAL]), "sm_90", constants)
    chunk = 16 if format.bits == 8 else 32
    weights = min(chunk, 64 // rows) if product == PLAIN else chunk * (2 if rows > 4 else 4)
    return checked_shares(hot_loop(module.text, "kernel"), weights, rows)


def mlx_instructions(function: str, format: Format, dtype: str, *arguments: object) -> dict[str, float]:
    """The same for MLX's kernel, for one row; for qmv_wide, for as many rows as its first argument says."""
    kernel = f"{'affine' if format.affine else 'fp'}_{function}"
    options = METAL_TYPES[dtype], format.group_size, format.bits, *arguments
    text = source(AFFINE if format.affine else FLOATING, [("kernel", kernel, *options)])
    module = compile_ptx(Source.load(text, [include_dir()], {"MLX_METAL_JIT": 1}), "sm_90", {}, compiler_flags=UNROLLED)
    values = 8 if format.bits in (6, 8) else 16  # of a lane, in each of four rows of w
    outer = 32 if format.affine else format.group_size
    weights = {"qmv_fast": 4 * values, "qmv_wide": format.group_size}.get(function, outer)
    return checked_shares(hot_loop(module.text, "kernel"), weights, int(str(arguments[0])) if "wide" in function else 1)


def checked_shares(loop: Loop, weights: int, rows: int) -> dict[str, float]:
    """Checks that this is the intended loop: it multiplies every weight by every row, and does little else."""
    assert rows * weights <= loop.multiplications <= (2 * rows + 2) * weights
    return loop.per(weights)
