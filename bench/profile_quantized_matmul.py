"""Counts of the Metal kernels of quantized matrices and of MLX's, in the simulator and in PTX:
bench/results/quantized_matmul_metal_profile.txt.

    python bench/profile_quantized_matmul.py

Counts, not times: what the source asks of a GPU, whichever it is.
"""

import sys
from pathlib import Path

from harness import RESULTS

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from quantized_numpy import FLOAT_FORMATS, Format  # noqa: E402
from tests.quantized_matmul.profiles import (  # noqa: E402
    GEMV,
    PLAIN,
    SWIGLU,
    Call,
    Counts,
    mlx_instructions,
    our_instructions,
    profile_mlx,
    profile_ours,
)
from tests.quantized_matmul.ptx_loops import CLASSES  # noqa: E402

FOUR_BITS = Format("affine", 64, 4)
FORMATS = [*(Format("affine", 64, bits) for bits in (2, 3, 4, 5, 6, 8)), *FLOAT_FORMATS]
ROWS = (1, 2, 4, 8)
OUTPUTS, COLUMNS = 256, 4096
RAGGED = 253, 4032

EXPLANATION = f"""Counts in the simulator, and instructions in PTX: mlx-anvil and MLX {mx.__version__} on the same arrays, float16.

matrix    bytes that lanes ask for of w, scales and biases, over those arrays' size. What is above 1 for one row of x is lanes
          that load the scale of their group together, in one access to one line; from 2 on, w is read again.
lines     128-byte lines that accesses to w, scales and biases touch, over the fewest that their bytes need; and all of them.
x         lines of x.
other     bytes written, and read back by a second pass (MLX's, of qvm_split_k, is a kernel of its own: not counted).
shared    bytes of threadgroup memory read and written; barriers.

MLX runs qmv_wide instead of qmv_fast from 2 rows of x on GPUs from the M3 on, for up to 5 rows at a time. Of two products, its
silu and multiplication are not counted.
"""


def line(title: str, counts: Counts) -> str:
    return (
        f"  {title:24}{counts.matrix_bytes / counts.matrix_unique:7.2f}{counts.matrix_lines / counts.matrix_fewest_lines:8.2f}"
        f"{counts.matrix_lines:>11,}{counts.x_lines:>11,}{counts.other_bytes:>11,}"
        f"{counts.threadgroup_bytes:>12,}{counts.barriers:>9,}"
    )


HEADING = f"  {'':24}{'matrix':>7}{'lines':>8}{'':>11}{'x':>11}{'other':>11}{'shared':>12}{'barriers':>9}"


def memory(rng: np.random.Generator) -> list[str]:
    lines = []

    def section(product: str, format: Format, rows: int, sizes: tuple[int, int], *mlx: tuple) -> None:
        call = Call.draw(rng, product, format, "float16", rows, *sizes)
        lines.append(f"{product}, {format}, {rows} x {sizes[0]} x {sizes[1]} (rows of x, rows and columns of w)")
        lines.extend([HEADING, line("mlx-anvil", profile_ours(call))])
        lines.extend(line(function, profile_mlx(function, call, *arguments)) for function, *arguments in mlx)
        lines.append("")

    for rows in ROWS:
        wide = [("qmv_wide", min(rows, 4), 8, "false")] if rows > 1 else []
        section(GEMV, FOUR_BITS, rows, (OUTPUTS, COLUMNS), ("qmv_fast", "false"), *wide)
    section(GEMV, FOUR_BITS, 1, RAGGED, ("qmv", "false"))
    for rows in ROWS:
        wide = [("qmv_wide", min(rows, 4), 8, "false")] if rows > 1 else []
        section(SWIGLU, FOUR_BITS, rows, (OUTPUTS, COLUMNS), ("qmv_fast", "false"), *wide)
    for rows in ROWS:
        section(PLAIN, FOUR_BITS, rows, (1024, 1024), ("qvm", "false"), ("qvm_split_k", 8))
    for format in FORMATS:
        if format != FOUR_BITS:
            section(GEMV, format, 1, (OUTPUTS, COLUMNS), ("qmv_fast", "false"))
    return lines


def instructions() -> list[str]:
    lines = [
        "Instructions of the inner loop for each weight and all rows of x, in PTX for sm_90; moves between registers not counted"
    ]
    lines.append(f"  {'':34}" + "".join(f"{name:>12}" for name in (*CLASSES, "total")))

    def add(title: str, shares: dict[str, float]) -> None:
        lines.append(f"  {title:34}" + "".join(f"{share:12.2f}" for share in shares.values()))

    for format in FORMATS:
        add(f"gemv {format}", our_instructions(GEMV, format, "float16", 1))
        add("  qmv_fast", mlx_instructions("qmv_fast", format, "float16", "false"))
        add(f"plain {format}", our_instructions(PLAIN, format, "float16", 1))
        add("  qvm", mlx_instructions("qvm", format, "float16", "false"))
    for rows in ROWS[1:]:
        add(f"gemv, {rows} rows, 4 bits", our_instructions(GEMV, FOUR_BITS, "float16", rows))
        add(f"swiglu, {rows} rows, 4 bits", our_instructions(SWIGLU, FOUR_BITS, "float16", rows))
        times, wide = max(1, rows // 4), mlx_instructions("qmv_wide", FOUR_BITS, "float16", min(rows, 4), 8, "false")
        add("  qmv_wide" + (f", {times} times" if times > 1 else ""), {k: times * v for k, v in wide.items()})
        add(f"plain, {rows} rows, 4 bits", our_instructions(PLAIN, FOUR_BITS, "float16", rows))
        add(
            f"  qvm, {rows} times",
            {k: rows * v for k, v in mlx_instructions("qvm", FOUR_BITS, "float16", "false").items()},
        )
    return lines


def main() -> None:
    lines = [EXPLANATION, *memory(np.random.default_rng(0)), *instructions()]
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / "quantized_matmul_metal_profile.txt").write_text(text)


if __name__ == "__main__":
    main()
