"""Attention on ragged batches on the CPU: beside one call for each sequence, a mask array, and MLX.

    python bench/ragged_attention.py

writes bench/results/ragged_attention_cpu.json. "Packed" has eight sequences of 33 to 512 rows, one after the other, with
a causal mask, 16 query heads over 4 key heads of 64. "Decode" has one query for each of eight sequences of 64 to 4096
keys in a padded cache, 32 query heads over 8 key heads of 128. "A mask" is our own call on the same batch with a bool
mask in place of the lengths, which is also what MLX gets.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import comparison, console_table, write_results

import click
import mlx.core as mx
from rich.console import Console

from mlx_anvil import flash_attention

PACKED = (512, 64, 400, 256, 33, 327, 300, 156)
CACHES = (4096, 64, 1024, 300, 2048, 128, 3000, 512)
Attention = Callable[..., mx.array]
row = partial(comparison, budget_seconds=4)


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def of_mlx(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)


def timed(attention: Attention, arrays: list[mx.array], gradient: bool) -> Callable[[], None]:
    if not gradient:
        return lambda: mx.eval(attention(*arrays))
    with_gradients = mx.value_and_grad(lambda *xs: attention(*xs).astype(mx.float32).sum(), argnums=(0, 1, 2))
    return lambda: mx.eval(with_gradients(*arrays))


def packed_row(dtype: mx.Dtype, gradient: bool, rounds: int) -> dict[str, Any]:
    total = sum(PACKED)
    ends = [sum(PACKED[:i]) for i in range(len(PACKED) + 1)]
    arrays = [normal(1, heads, total, 64, dtype=dtype) for heads in (16, 4, 4)]
    numbers = mx.array([i for i, length in enumerate(PACKED) for _ in range(length)])
    rows = mx.arange(total)
    mask = (numbers[:, None] == numbers) & (rows[:, None] >= rows)
    cu_seqlens = mx.array(ends)
    mx.eval(mask, cu_seqlens)

    def each_alone(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        pieces = [[x[:, :, a:b] for x in (q, k, v)] for a, b in itertools.pairwise(ends)]
        return mx.concatenate([flash_attention(*piece, mask="causal") for piece in pieces], axis=2)

    contestants = {
        "ours": partial(flash_attention, mask="causal", cu_seqlens_q=cu_seqlens),
        "a call each": each_alone,
        "a mask": partial(flash_attention, mask=mask),
        "MLX": partial(of_mlx, mask=mask),
    }
    calls = {label: timed(attention, arrays, gradient) for label, attention in contestants.items()}
    what = "packed, forward + backward" if gradient else "packed, forward"
    return row(what, dtype, (16, 4, total, 64), calls, rounds=rounds)


def decode_row(dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    longest, count = max(CACHES), len(CACHES)
    q = normal(count, 32, 1, 128, dtype=dtype)
    k, v = (normal(count, 8, longest, 128, dtype=dtype) for _ in range(2))
    lengths = mx.array(CACHES)
    mask = (mx.arange(longest) < lengths[:, None])[:, None, None]
    mx.eval(lengths, mask)
    contestants = {
        "ours": partial(flash_attention, lengths=lengths),
        "a mask": partial(flash_attention, mask=mask),
        "MLX": partial(of_mlx, mask=mask),
    }
    calls = {label: timed(attention, [q, k, v], gradient=False) for label, attention in contestants.items()}
    return row("decode", dtype, (32, 8, longest, 128), calls, rounds=rounds)


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = []
    for dtype in (mx.float32, mx.bfloat16):
        rows += [packed_row(dtype, gradient, rounds) for gradient in (False, True)]
        rows.append(decode_row(dtype, rounds))
    others = ("a call each", "a mask", "MLX")
    table = console_table("ragged attention, CPU", words=("op", "dtype"), figures=("ms", *(f"{o} x" for o in others)))
    for line in rows:
        ratios = (f"{line['speedup'][other]:.2f}" if other in line["speedup"] else "" for other in others)
        table.add_row(line["op"], line["dtype"], f"{line['seconds']['ours']['median'] * 1e3:.2f}", *ratios)
    Console().print(table)
    print(f"written: {write_results('ragged_attention_cpu', rows)}")


if __name__ == "__main__":
    main()
