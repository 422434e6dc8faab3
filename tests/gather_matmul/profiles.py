"""Memory profiles of the Metal kernels of gathered products and of MLX's, on the same arrays in the same simulator."""

from __future__ import annotations

from functools import cache
from math import prod

import mlx.core as mx
import numpy as np

import mlx_anvil
from mlx_anvil.mslc import PROFILED, LaunchProfile, Library, Source
from mlx_anvil.mslc.simulator import Report
from tests.gather_matmul.metal_cases import Case
from tests.mslc.control.mlx_kernels import include_dir, source
from tests.mslc.control.test_quantized import AFFINE
from tests.quantized_matmul.profiles import Counts

# Tiles of gather_qmm_rhs: rows of x, rows of w, columns, simdgroups.
RHS_ROWS, RHS_OUTPUTS = 16, 32
MLX_THREADS = (32, 2, 1)
RHS = (RHS_ROWS, RHS_OUTPUTS, 32, 1, 2)

Constants = tuple[tuple[int, bool], ...]


def profile_ours(case: Case) -> Counts:
    return counts_of(profiles_of_ours(case)[0])


def profile_mlx(function: str, case: Case) -> Counts:
    return counts_of(profiles_of_mlx(function, case))


def counts_of(profiles: list[LaunchProfile]) -> Counts:
    counts = Counts()
    for profile in profiles:
        counts.add(profile)
    return counts


def device_bytes(counts: Counts) -> int:
    return counts.matrix_bytes + counts.x_bytes + counts.other_bytes


def profiles_of_ours(case: Case) -> tuple[list[LaunchProfile], list[tuple[str, int]]]:
    """The launches; of each its pipeline key and the threads of a threadgroup."""
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles, mlx_anvil.trace() as trace:
        case.check()
    launched = [event for event in trace.events if not event.kernel.startswith("mx.")]
    return list(profiles), [(event.kernel, prod(event.threadgroup)) for event in launched]


def profiles_of_mlx(function: str, case: Case) -> list[LaunchProfile]:
    """The launches of MLX's kernel for a float16 case with affine codes: one for each matrix."""
    profiles, outs = [], []
    for matrix in case.matrices:
        arrays = [np.array(a) for a in (matrix.w, matrix.scales, matrix.biases)]
        out = np.full((len(case.rhs), 1, arrays[0].shape[1]), np.nan, np.float16)
        launch = launch_rhs if function == "gather_qmm_rhs" else launch_qmv
        profile = launch(*mlx_kernel(function, case), case, arrays, out).profile
        assert profile is not None
        profiles.append(profile)
        outs.append(out)
    if len(outs) == 1:  # MLX has no kernel for both; its silu and product are not counted
        case.check(mx.array(outs[0]))
    return profiles


def mlx_kernel(function: str, case: Case) -> tuple[Source, Constants]:
    """The kernel, with the name "kernel", and its function constants. The columns of x and of out are whole tiles."""
    options = ("half", case.format.group_size, case.format.bits)
    if function == "gather_qmm_rhs":
        return mlx_source(function, (*options, *RHS, "true")), ((200, False), (201, True), (202, True))
    return mlx_source(function, (*options, "false")), ()


@cache
def mlx_source(function: str, arguments: tuple[object, ...]) -> Source:
    text = source(list(AFFINE), [("kernel", f"affine_{function}", *arguments)])
    return Source.load(text, [include_dir()], {"MLX_METAL_JIT": 1})


@cache
def mlx_library(kernel: Source, constants: Constants) -> Library:
    return Library(kernel, constants=dict(constants), options=PROFILED)


def launch_qmv(kernel: Source, constants: Constants, case: Case, arrays: list[np.ndarray], out: np.ndarray) -> Report:
    x, (w, scales, biases) = np.array(case.x), arrays
    pairs, (_, outputs, columns) = len(case.rhs), (*w.shape[:2], x.shape[-1])
    lhs = np.arange(pairs, dtype=np.uint32) if case.lhs is None else case.lhs.astype(np.uint32)

    def strides(array: np.ndarray) -> np.ndarray:
        return np.array(array.strides, np.int64) // array.itemsize

    def shape(array: np.ndarray) -> np.ndarray:
        return np.array(array.shape, np.int32)

    one = np.ones(1, np.int64)
    layout = [1, shape(x), strides(x), 1, shape(w), strides(w), strides(scales), strides(biases)]
    layout += [1, np.array([pairs], np.int32), one, one]
    buffers = [w, scales, biases, x, lhs, case.rhs.astype(np.uint32), out, columns, outputs, *layout]
    grid = (1, -(-outputs // 8), pairs)
    return mlx_library(kernel, constants).run("kernel", dict(enumerate(buffers)), grid, MLX_THREADS)


def launch_rhs(kernel: Source, constants: Constants, case: Case, arrays: list[np.ndarray], out: np.ndarray) -> Report:
    """MLX's kernel that finds the offsets of the experts is not counted."""
    (w, scales, biases), x = arrays, np.array(case.x)
    experts, outputs = w.shape[:2]
    counts = np.bincount(case.rhs, minlength=experts)
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    tiles = int((-(-counts // RHS_ROWS)).sum())
    buffers = [x, w, scales, biases, offsets, out, len(case.rhs), outputs, x.shape[-1], experts]
    grid = (-(-outputs // RHS_OUTPUTS), tiles, 1)
    return mlx_library(kernel, constants).run("kernel", dict(enumerate(buffers)), grid, MLX_THREADS)
