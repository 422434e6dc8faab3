"""Peak memory of a prompt with a cache of 4 bits beside one of bfloat16, at lengths from 1024 to 131072.

    python bench/cache_memory.py

writes bench/results/cache_memory_cpu.json. The caches are mlx-lm's, filled a chunk of the prompt at a time, as its
generation does; after each chunk its queries attend over the whole cache with ``flash_attention``. Two layers with one
query head and one of keys, of 128: peaks are in proportion to the heads, and the time to the square of the length. The
peak is what MLX allocates from the first chunk on: caches, their growth, chunks, and what attention needs.
"""

from typing import Any

from harness import console_table, write_results

import click
import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from rich.console import Console
from rich.table import Table

from mlx_anvil import flash_attention

LAYERS, DIM, CHUNK, LONGEST = 2, 128, 1024, 1 << 17
CACHES = {"4 bits": lambda: QuantizedKVCache(group_size=64, bits=4), "bfloat16": KVCache}


def peaks(kind: str) -> dict[int, int]:
    """Peak bytes by the length of the prompt so far."""
    caches = [CACHES[kind]() for _ in range(LAYERS)]
    options = {"kv_bits": 4, "kv_group_size": 64} if kind == "4 bits" else {}
    found: dict[int, int] = {}
    mx.clear_cache()
    before, peak = mx.get_active_memory(), 0
    for end in range(CHUNK, LONGEST + 1, CHUNK):
        for cache in caches:
            q, k, v = (mx.random.normal((1, 1, CHUNK, DIM)).astype(mx.bfloat16) for _ in range(3))
            mx.eval(q, k, v)
            mx.clear_cache()
            mx.reset_peak_memory()
            keys, values = cache.update_and_fetch(k, v)
            mx.eval(flash_attention(q, keys, values, mask="causal", **options))
            peak = max(peak, mx.get_peak_memory() - before)
            del q, k, v, keys, values
        if end & (end - 1) == 0:
            found[end] = peak
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    result = console_table("Peak of a prompt, MiB", figures=("length", *CACHES, "share"))
    for row in rows:
        of_caches = [f"{row['peak_bytes'][kind] / 2**20:.1f}" for kind in CACHES]
        result.add_row(str(row["length"]), *of_caches, f"{row['share']:.2f}")
    return result


@click.command()
def main() -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.set_default_device(mx.cpu)
    by_kind = {kind: peaks(kind) for kind in CACHES}
    rows = [
        {
            "length": length,
            "peak_bytes": {kind: found[length] for kind, found in by_kind.items()},
            "share": round(by_kind["4 bits"][length] / by_kind["bfloat16"][length], 3),
        }
        for length in by_kind["4 bits"]
    ]
    console = Console()
    console.print(table(rows))
    console.print(f"written: {write_results('cache_memory_cpu', rows)}")


if __name__ == "__main__":
    main()
