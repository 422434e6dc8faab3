"""Decode from a paged cache on the CPU: with a plan, beside contiguous keys and values, and MLX.

    python bench/paged_attention.py

writes bench/results/paged_attention_cpu.json. One query for each of eight sequences of 64 to 4096 keys, or of 16 keys,
32 query heads over 8 key heads of 128, pages in random order. "Plan" has lengths and table in an attention_plan. "Contiguous" is our own call with the same lengths and no table. MLX
gathers the pages, dequantizes them if they are quantized, and attends with a mask.
"""

from functools import partial
from typing import Any

from harness import comparison, console_table, write_results

import click
import mlx.core as mx
from rich.console import Console

from mlx_anvil import attention_plan, flash_attention

LENGTHS = (4096, 64, 1024, 300, 2048, 128, 3000, 512)
SHORT = (16,) * 8
CASES = ((LENGTHS, 16), (LENGTHS, 64), (LENGTHS, 256), (SHORT, 16))  # and the page size
Parts = tuple[mx.array, ...]  # of keys or values: w, scales and biases, or one array
row = partial(comparison, budget_seconds=4)


def gathered(parts: Parts, table: mx.array) -> Parts:
    def one(x: mx.array) -> mx.array:
        pages = x[table].swapaxes(1, 2)  # [batch, heads, pages_per_sequence, page_size, ...]
        return pages.reshape(*pages.shape[:2], -1, x.shape[-1])

    return tuple(map(one, parts))


def of_mlx(q: mx.array, k: Parts, v: Parts, table: mx.array, mask: mx.array) -> mx.array:
    parts = [gathered(x, table) for x in (k, v)]
    keys, values = (mx.dequantize(*x, bits=4) if len(x) == 3 else x[0] for x in parts)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=q.shape[-1] ** -0.5, mask=mask)


def ours(q: mx.array, k: Parts, v: Parts, **options: Any) -> mx.array:
    if len(k) == 3:
        return flash_attention(q, k, v, **options, kv_bits=4)
    return flash_attention(q, k[0], v[0], **options)


def decode_row(of: tuple[int, ...], page_size: int, is_quantized: bool, rounds: int) -> dict[str, Any]:
    columns = -(-max(of) // page_size)
    pages = columns * len(of)
    table = mx.random.permutation(pages).reshape(len(of), columns)
    q = mx.random.normal((len(of), 32, 1, 128)).astype(mx.float16)
    caches: list[Parts] = []
    for _ in range(2):
        x = mx.random.normal((pages, 8, page_size, 128)).astype(mx.float16)
        caches.append(tuple(mx.quantize(x, bits=4)) if is_quantized else (x,))
    contiguous = [gathered(x, table) for x in caches]
    lengths = mx.array(of)
    mask = (mx.arange(columns * page_size) < lengths[:, None])[:, None, None]
    mx.eval(table, q, caches, contiguous, lengths, mask)
    plan = attention_plan(q_len=1, lengths=lengths, block_table=table, page_size=page_size)
    calls = {
        "ours": lambda: mx.eval(ours(q, *caches, lengths=lengths, block_table=table)),
        "plan": lambda: mx.eval(ours(q, *caches, plan=plan)),
        "contiguous": lambda: mx.eval(ours(q, *contiguous, lengths=lengths)),
        "MLX": lambda: mx.eval(of_mlx(q, *caches, table, mask)),
    }
    what = f"up to {max(of)} keys, pages of {page_size}" + (", 4 bits" if is_quantized else "")
    return row(what, mx.float16, (32, 8, max(of), 128), calls, rounds=rounds)


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
@click.option("--write/--no-write", default=True, help="Write the results.")
def main(rounds: int, write: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = [decode_row(*case, is_quantized, rounds) for is_quantized in (False, True) for case in CASES]
    others = ("plan", "contiguous", "MLX")
    table = console_table("paged attention, CPU", words=("op", "dtype"), figures=("ms", *(f"{o} x" for o in others)))
    for line in rows:
        ratios = (f"{line['speedup'][other]:.2f}" for other in others)
        table.add_row(line["op"], line["dtype"], f"{line['seconds']['ours']['median'] * 1e3:.2f}", *ratios)
    Console().print(table)
    if write:
        print(f"written: {write_results('paged_attention_cpu', rows)}")


if __name__ == "__main__":
    main()
