"""Counts of the Metal kernels of flash_attention and of MLX's, in the simulator:
bench/results/flash_attention_metal_profile.txt.

    python bench/profile_flash_attention.py

Counts, not times: what the source asks of a GPU, whichever it is.
"""

import sys
from pathlib import Path

from harness import RESULTS

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from tests.flash_attention.profiles import MLX, Call, Shape, profile_ours  # noqa: E402

FORWARD = [("steel_attention", Shape(4, 2, 256, 256, dim), causal) for dim in (64, 80, 128) for causal in (False, True)]
DECODE = [("sdpa_vector", Shape(8, 2, 1, 512, dim), False) for dim in (64, 128)]
DECODE += [("sdpa_vector_2pass", Shape(8, 2, 1, 4096, dim), False) for dim in (64, 128)]
COLUMNS = {
    "device_bytes_read": "device read",
    "device_bytes_written": "device written",
    "matrix_multiplies": "8x8x8 products",
    "threadgroup_bytes": "threadgroup bytes",
    "bank_conflicts": "bank conflicts",
    "barriers": "barriers",
    "transcendentals": "transcendentals",
    "threadgroup_memory": "threadgroup memory",
}


def main() -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"Counts in the simulator: mlx-anvil / MLX {mx.__version__} (ratio). heads q, kv x queries x keys x head_dim",
        "",
    ]
    for dtype in ("float16", "float32"):
        for theirs, shape, causal in FORWARD + DECODE:
            call = Call.draw(rng, shape, dtype, causal)
            ours, mlx = profile_ours(call), MLX[theirs](call)
            sizes = f"{shape.q_heads}, {shape.kv_heads} x {shape.q_len} x {shape.kv_len} x {shape.head_dim}"
            lines.append(f"{sizes} {dtype}{' causal' if causal else ''}, beside {theirs}")
            for name, title in COLUMNS.items():
                a, b = getattr(ours, name), getattr(mlx, name)
                lines.append(f"  {title:20}{a:>14,} / {b:>14,}" + (f"  ({a / b:.2f})" if b else ""))
            lines.append("")
            print("\n".join(lines[-len(COLUMNS) - 2 :]))
    (RESULTS / "flash_attention_metal_profile.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
