"""mla_decode on the CPU against what models and users call without it.

    python bench/mla_decode.py

writes bench/results/mla_decode_cpu.json. "mlx-lm" is the graph of its DeepSeek-V3: the scores of the rope parts are a
product, which MLX's attention over the latents takes as its mask. "Joined" is our flash_attention over keys of both
parts, concatenated ahead; it has no kernel for such heads. The rank is 512, the rope dim 64. Rates count the
multiplications and additions of both products.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from harness import comparison, console_table, write_results

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_anvil import flash_attention, mla_decode

RANK, ROPE, SCALE = 512, 64, 0.07
MODELS = {"DeepSeek-V2-Lite": 16, "GLM-4.7-Flash": 20, "DeepSeek-V3": 128}
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
Arrays = list[mx.array]
row = partial(comparison, budget_seconds=0.7)


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def of_mlx_lm(q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array) -> mx.array:
    rope_scores = (q_rope * SCALE) @ k_rope.swapaxes(-1, -2)
    if (queries := q_nope.shape[2]) > 1:
        keys = latent.shape[2]
        seen = mx.arange(keys) <= mx.arange(keys - queries, keys)[:, None]
        rope_scores = mx.where(seen, rope_scores, mx.finfo(rope_scores.dtype).min)
    return mx.fast.scaled_dot_product_attention(q_nope, latent, latent, scale=SCALE, mask=rope_scores)


def inputs(heads: int, queries: int, keys: int, dtype: mx.Dtype) -> Arrays:
    q = [normal(1, heads, queries, dim, dtype=dtype) for dim in (RANK, ROPE)]
    return q + [normal(1, 1, keys, dim, dtype=dtype) for dim in (RANK, ROPE)]


def contestants(arrays: Arrays) -> dict[str, Callable[[], None]]:
    mask = "causal" if arrays[0].shape[2] > 1 else None
    q, k = (mx.concatenate(parts, axis=-1) for parts in (arrays[:2], arrays[2:]))
    mx.eval(q, k)
    return {
        "ours": lambda: mx.eval(mla_decode(*arrays, scale=SCALE, mask=mask)),
        "mlx-lm": lambda: mx.eval(of_mlx_lm(*arrays)),
        "joined": lambda: mx.eval(flash_attention(q, k, arrays[2], scale=SCALE, mask=mask)),
    }


def gradient_contestants(arrays: Arrays) -> dict[str, Callable[[], None]]:
    def gradient(function: Callable[..., mx.array]) -> Callable[[], None]:
        with_gradients = mx.value_and_grad(lambda *xs: function(*xs).astype(mx.float32).sum(), argnums=(0, 1, 2, 3))
        return lambda: mx.eval(with_gradients(*arrays))

    return {"ours": gradient(partial(mla_decode, scale=SCALE, mask="causal")), "mlx-lm": gradient(of_mlx_lm)}


def decode_row(model: str, queries: int, keys: int, dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    heads = MODELS[model]
    calls = contestants(inputs(heads, queries, keys, dtype))
    result = row("mla_decode", dtype, (1, heads, queries, keys), calls, rounds=rounds, model=model, direction="forward")
    flops = 2 * heads * queries * keys * (2 * RANK + ROPE)
    result["gflops"] = round(flops / result["seconds"]["ours"]["median"] / 1e9, 1)
    return result


def gradient_row(dtype: mx.Dtype, rounds: int) -> dict[str, Any]:
    heads, length = 16, 256
    calls = gradient_contestants(inputs(heads, length, length, dtype))
    shape = (1, heads, length, length)
    return row("mla_decode", dtype, shape, calls, rounds=rounds, model="16 heads", direction="forward + backward")


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("direction", "model", "dtype", "queries", "keys", "ours, ms", "GFLOP/s", "vs mlx-lm", "vs joined")
    result = console_table("mla_decode, CPU", words=columns[:3], figures=(*columns[3:], "spread"))
    for r in rows:
        queries, keys = r["shape"][2:]
        milliseconds = f"{r['seconds']['ours']['median'] * 1e3:.2f}"
        ratios = [f"{r['speedup'][name]:.1f}" if name in r["speedup"] else "" for name in ("mlx-lm", "joined")]
        figures = (str(queries), str(keys), milliseconds, str(r.get("gflops", "")), *ratios, f"{r['spread']:.0%}")
        result.add_row(r["direction"], r["model"], r["dtype"], *figures)
    return result


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    cases = product(MODELS, (1, 4), (1024, 4096), DTYPES)
    rows = [decode_row(*case, rounds) for case in cases]
    rows += [gradient_row(dtype, rounds) for dtype in (mx.float32, mx.bfloat16)]
    console = Console(width=150)
    console.print(table(rows))
    console.print(f"written: {write_results('mla_decode_cpu', rows)}")


if __name__ == "__main__":
    main()
