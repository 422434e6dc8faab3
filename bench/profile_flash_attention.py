"""Counts of the Metal kernels of flash_attention and of MLX's, in the simulator:
bench/results/flash_attention_metal_profile.txt.

    python bench/profile_flash_attention.py

Counts, not times: what the source asks of a GPU, whichever it is. A decode over quantized keys and values stands beside
MLX's over float16 ones, with the instructions of Mesa's compiler for an M1 (docs/apple.md), weighted by how often they
run.
"""

import sys
from functools import cache
from math import prod
from pathlib import Path

from harness import RESULTS

import mlx.core as mx
import numpy as np

import mlx_anvil
from agx import sources
from apple_launches import decode_at_once
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.mslc.agx import compile_agx
from mlx_anvil.mslc.estimate_work import Work, combine_work

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

_sources = cache(sources)
QUANTIZED_HEADS = ((2, 2), (8, 2))  # of queries and of keys
QUANTIZED_KEYS = (1024, 4096, 32768)
QUANTIZED_DIM = 128
BITS, OTHER_BITS = (4, 8), ((8, 4), 3, 6)  # the others are for the shortest


def decode_of_codes(heads: tuple[int, int], keys: int, bits: int | tuple[int, int]) -> list[Work]:
    """Our launches for one query, float16 with affine keys and values in groups of 64."""
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    q = mx.random.normal((1, heads[0], 1, QUANTIZED_DIM)).astype(mx.float16)
    cache = mx.random.normal((heads[1] * keys, QUANTIZED_DIM)).astype(mx.float16)
    codes = [[x.reshape(1, heads[1], keys, -1) for x in mx.quantize(cache, group_size=64, bits=b)] for b in pair]
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles, mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.flash_attention(q, *map(tuple, codes), kv_group_size=64, kv_bits=bits))
    works = []
    for event, profile in zip(trace.events, profiles, strict=True):
        name, constants = parse_key(event.kernel)
        (compiled,) = compile_agx(_sources()[name], [name], constants)
        works.append(combine_work(profile, compiled, prod(event.threadgroup)))
    return works


def quantized_lines() -> list[str]:
    lines = ["Decode over quantized keys and values, affine, groups of 64, beside sdpa_vector over float16", ""]
    for heads in QUANTIZED_HEADS:
        for keys in QUANTIZED_KEYS:
            mlx = decode_at_once(keys, QUANTIZED_DIM, *heads).work()
            for bits in BITS + (OTHER_BITS if keys == QUANTIZED_KEYS[0] else ()):
                works = decode_of_codes(heads, keys, bits)
                lines.append(f"{heads[0]}, {heads[1]} x 1 x {keys} x {QUANTIZED_DIM} float16, {bits} bits")
                read = keys * heads[1]
                counts = {
                    "instructions a key": (sum(w.instructions for w in works) / read, mlx.instructions / read),
                    "bytes a key": (works[0].bytes_read / read, mlx.bytes_read / read),
                    "spilled bytes": (sum(w.spill_bytes for w in works), mlx.spill_bytes),
                    "not explained": (max(w.unexplained for w in works), mlx.unexplained),
                }
                for title, (a, b) in counts.items():
                    lines.append(f"  {title:20}{a:>14,.2f} / {b:>14,.2f}" + (f"  ({a / b:.2f})" if b else ""))
                lines.append("")
                print("\n".join(lines[-len(counts) - 2 :]))
    return lines


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
    lines += quantized_lines()
    (RESULTS / "flash_attention_metal_profile.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
