"""Counts of the Metal kernels of gathered products and of MLX's, in the simulator:
bench/results/gather_matmul_metal_profile.txt.

    tools/agx/build.sh          # once
    python bench/profile_gather_matmul.py

Counts, not times: what the kernels ask of a GPU. Instructions are those of Mesa's compiler for an M1 (docs/apple.md).
"""

import sys
from functools import cache
from math import prod
from pathlib import Path

from harness import RESULTS

import mlx.core as mx
import numpy as np

from agx import sources
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.mslc.agx import AgxKernel, compile_agx
from mlx_anvil.mslc.estimate_work import combine_work
from mlx_anvil.mslc.profile import LaunchProfile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from quantized_numpy import Format  # noqa: E402
from tests.gather_matmul.metal_cases import Case  # noqa: E402
from tests.gather_matmul.profiles import (  # noqa: E402
    MLX_THREADS,
    counts_of,
    device_bytes,
    mlx_kernel,
    profiles_of_mlx,
    profiles_of_ours,
)

FOUR_BITS = Format("affine", 64, 4)
OUTPUTS, COLUMNS = 128, 2048
# Pairs, experts, whether pairs are sorted, and MLX's kernel for them.
CALLS = (
    (8, 64, False, "gather_qmv_fast"),
    (24, 4, True, "gather_qmv_fast"),
    (24, 4, True, "gather_qmm_rhs"),
    (256, 8, True, "gather_qmm_rhs"),
)
EXPLANATION = f"""Counts in the simulator: mlx-anvil and MLX {mx.__version__} on the same arrays, float16, 4 bits in groups of 64.

device        bytes of device memory that lanes read and write; of them
matrix        those of w, scales, biases and ids
x             those of x
shared        bytes of threadgroup memory read and written; barriers
instructions  that SIMD groups execute, in machine code of Mesa's compiler for an M1

Ours include the launch that finds the tiles of sorted pairs; MLX's kernel for the experts' offsets is not counted. Of gate and
up, its two products are counted, and not its activation.
"""
HEADING = f"  {'':18}{'device':>14}{'matrix':>14}{'x':>14}{'shared':>14}{'barriers':>10}{'instructions':>14}"
our_sources = cache(sources)


def executed(profiles: list[LaunchProfile], kernels: list[tuple[AgxKernel, int]]) -> int:
    """`kernels` are the launches' machine code, and the threads of a threadgroup."""
    pairs = zip(profiles, kernels, strict=True)
    return round(sum(combine_work(profile, *kernel).instructions for profile, kernel in pairs))


def of_ours(case: Case) -> tuple[list[LaunchProfile], int]:
    profiles, launched = profiles_of_ours(case)
    kernels = []
    for key, threads in launched:
        name, constants = parse_key(key)
        kernels.append((compile_agx(our_sources()[name], [name], constants)[0], threads))
    return profiles, executed(profiles, kernels)


def of_mlx(function: str, case: Case) -> tuple[list[LaunchProfile], int]:
    profiles = profiles_of_mlx(function, case)
    kernel, constants = mlx_kernel(function, case)
    (compiled,) = compile_agx(kernel, ["kernel"], dict(constants))
    return profiles, executed(profiles, [(compiled, prod(MLX_THREADS))] * len(profiles))


def line(title: str, profiles: list[LaunchProfile], instructions: int) -> str:
    counts = counts_of(profiles)
    columns = (device_bytes(counts), counts.matrix_bytes, counts.x_bytes, counts.threadgroup_bytes)
    figures = "".join(f"{count:14,}" for count in columns)
    return f"  {title:18}{figures}{counts.barriers:10,}{instructions:14,}"


def section(rng: np.random.Generator, pairs: int, experts: int, ordered: bool, function: str, gated: bool) -> list[str]:
    case = Case.draw(
        rng, FOUR_BITS, mx.float16, pairs, OUTPUTS, columns=COLUMNS, experts=experts, sorted_ids=ordered, gated=gated
    )
    case.vectors = [None, None]
    if not ordered:  # one token
        case.rhs = rng.permutation(experts)[:pairs].astype(np.int32)
        case.lhs = np.zeros(pairs, np.int32)
    what = "gate and up" if gated else "one product"
    order = "sorted" if ordered else "one token"
    title = f"{pairs} pairs of {experts} experts, {order}, {OUTPUTS} x {COLUMNS}, {what}"
    return [title, HEADING, line("mlx-anvil", *of_ours(case)), line(function, *of_mlx(function, case)), ""]


def main() -> None:
    rng = np.random.default_rng(0)
    lines = [EXPLANATION]
    for call in CALLS:
        for gated in (False, True):
            lines += section(rng, *call, gated)
            print("\n".join(lines[-5:]), flush=True)
    (RESULTS / "gather_matmul_metal_profile.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
