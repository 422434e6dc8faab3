"""Gathered products of experts on the CPU: beside MLX's ops, our own dense product, and what the machine can read.

    python bench/gather_matmul.py

writes bench/results/gather_matmul_cpu.json, in about five minutes and 3 GB. Figures are from one run on two threads (or
as many as OMP_NUM_THREADS says). The experts are those of a model with 64 of 1408 x 2048 (DeepSeek-V2-Lite) and of one
with 128 of 768 x 2048 (Qwen3-30B-A3B); 8 are chosen for each token, at random. Eight are drawn, and the others are
copies of these.

- "decode" is one token. Every call has other experts, so that their weights come from memory. "Read" is a sum over as
  many bytes as those experts have. "Gated" is gate and up in one kernel; beside it are two products and silu_gate.
- "prompt" has 512 tokens. "Dense" is quantized_matmul of as many rows as there are pairs, by the matrix of one expert:
  the same number of products.
- Dense experts, 16 of 1408 x 2048, have "MLX" beside them, mx.gather_mm, and "PyTorch", a product for each expert that
  has rows. MLX's gradient in the weights stores a matrix for each pair, so its row has 4 tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from harness import as_json, comparison, console_table, in_turn, installed_torch, measure, ratio, write_results

import click
import mlx.core as mx
import numpy as np
from rich.console import Console

from mlx_anvil import _ext, gather_matmul, gather_quantized_matmul, quantized_matmul, silu_gate

Contestants = dict[str, Callable[[], Any]]

CHOSEN, PROMPT = 8, 512
SHAPES = ((64, 1408, 2048), (128, 768, 2048))
DENSE_SHAPE = (16, 1408, 2048)
CACHE_LIMIT = 1 << 30  # of MLX: freed arrays of one row are of no use to the next
FORMATS: tuple[dict[str, Any], ...] = (
    {"mode": "affine", "bits": 4, "group_size": 64},
    {"mode": "affine", "bits": 8, "group_size": 64},
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
)
DTYPES = (mx.bfloat16, mx.float32)


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def experts_of(shape: tuple[int, int, int], dtype: mx.Dtype, options: dict[str, Any]) -> list[mx.array]:
    """Only some are drawn: all of them, in float32, would be most of the benchmark's memory and time."""
    count, outputs, columns = shape
    drawn = normal(CHOSEN * outputs, columns, dtype=dtype if options["mode"] == "affine" else mx.float32)
    some = [part.reshape(CHOSEN, outputs, -1) for part in mx.quantize(drawn, **options)]
    parts = [mx.concatenate([part] * (count // CHOSEN)) for part in some]
    mx.eval(parts)
    return parts


def choices(tokens: int, count: int) -> mx.array:
    ids = mx.argpartition(mx.random.uniform(shape=(tokens, count)), kth=count - CHOSEN, axis=-1)[:, count - CHOSEN :]
    mx.eval(ids)
    return ids


def read_of(parts: list[mx.array]) -> Contestants:
    """A read of as many bytes as the chosen experts have, in as many places as all experts fill."""
    count = parts[0].shape[0]
    words = sum(part.nbytes for part in parts) // count * CHOSEN // 4
    sources = [np.asarray(mx.ones(words)) for _ in range(count // CHOSEN)]
    return {"read": in_turn([lambda s=source: _ext._read(s) for source in sources])}


row = partial(comparison, budget_seconds=3)


def each_token(op: Callable[[mx.array], mx.array], count: int) -> Callable[[], None]:
    """A contestant whose calls choose other experts each time, until all have been chosen."""
    order = mx.random.permutation(count)
    ids = [order[i : i + CHOSEN][None] for i in range(0, count - CHOSEN + 1, CHOSEN)]
    mx.eval(ids)
    return in_turn([lambda chosen=chosen: mx.eval(op(chosen)) for chosen in ids])


def decode_row(shape: tuple[int, int, int], dtype: mx.Dtype, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    parts, x = experts_of(shape, dtype, options), normal(1, 1, 1, shape[2], dtype=dtype)
    contestants = {
        "ours": each_token(lambda ids: gather_quantized_matmul(x, *parts, rhs_indices=ids, **options), shape[0]),
        **read_of(parts),
    }
    line = row("decode", dtype, shape, contestants, format=options, rounds=3 * rounds)
    ids = choices(1, shape[0])
    slow = {
        "ours": lambda: mx.eval(gather_quantized_matmul(x, *parts, rhs_indices=ids, **options)),
        "MLX": lambda: mx.eval(mx.gather_qmm(x, *parts, rhs_indices=ids, **options)),
    }
    timings = measure(slow, rounds=3, budget_seconds=4)
    line["speedup"]["MLX"] = round(ratio(timings["MLX"], timings["ours"]), 1)
    line["seconds"]["MLX"] = as_json(timings["MLX"])
    return line


def gated_row(shape: tuple[int, int, int], dtype: mx.Dtype, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    gate, up = (experts_of(shape, dtype, options) for _ in range(2))
    x = normal(1, 1, 1, shape[2], dtype=dtype)

    def apart(ids: mx.array) -> mx.array:
        return silu_gate(*(gather_quantized_matmul(x, *parts, rhs_indices=ids, **options) for parts in (gate, up)))

    def fused(ids: mx.array) -> mx.array:
        return _ext._gather_quantized_swiglu(x, gate, up, ids, **options)

    contestants = {
        "ours": each_token(fused, shape[0]),
        "two products and a gate": each_token(apart, shape[0]),
        **read_of([*gate, *up]),
    }
    return row("gated", dtype, shape, contestants, format=options, rounds=3 * rounds)


def prompt_rows(
    shape: tuple[int, int, int], dtype: mx.Dtype, options: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    parts, ids = experts_of(shape, dtype, options), choices(PROMPT, shape[0])
    one = [part[0] for part in parts]
    mx.eval(one)
    lines = []
    for what, transpose in (("prompt", True), ("prompt, gradient in x", False)):
        terms = shape[2] if transpose else shape[1]
        x = normal(PROMPT, *((1, 1) if transpose else (CHOSEN, 1)), terms, dtype=dtype)
        rows = normal(PROMPT * CHOSEN, terms, dtype=dtype)
        more = options | {"transpose": transpose}
        contestants: Contestants = {
            "ours": lambda x=x, more=more: mx.eval(gather_quantized_matmul(x, *parts, rhs_indices=ids, **more)),
            "dense": lambda rows=rows, more=more: mx.eval(quantized_matmul(rows, *one, **more)),
        }
        lines.append(row(what, dtype, shape, contestants, format=options, rounds=rounds))
    return lines


def torch_of_experts(x: mx.array, w: mx.array, ids: mx.array) -> Contestants:
    """The rows of each expert together, times its matrix; only the products are timed."""
    torch = installed_torch()
    if torch is None:
        return {}
    torch.set_num_threads(_ext._max_threads())
    dtype = torch.bfloat16 if x.dtype == mx.bfloat16 else torch.float32

    def tensor(array: mx.array) -> Any:
        return torch.from_numpy(np.array(array.astype(mx.float32))).to(dtype)

    tokens = np.repeat(np.arange(ids.shape[0]), ids.shape[1])
    of_pairs = np.array(ids).reshape(-1)
    rows = {int(e): tensor(x[mx.array(tokens[of_pairs == e]), 0, 0]) for e in np.unique(of_pairs)}
    weights = {e: tensor(w[e]) for e in rows}
    return {"PyTorch": lambda: [torch.nn.functional.linear(rows[e], weights[e]) for e in rows]}


def dense_rows(shape: tuple[int, int, int], dtype: mx.Dtype, rounds: int) -> list[dict[str, Any]]:
    w = (normal(*shape, dtype=dtype) / 45).astype(dtype)
    mx.eval(w)
    one, few, many = (normal(tokens, 1, 1, shape[2], dtype=dtype) for tokens in (1, 4, 128))
    few_ids, ids = choices(4, shape[0]), choices(128, shape[0])

    def product(op: Callable[..., mx.array], x: mx.array, w: mx.array, ids: mx.array) -> mx.array:
        return op(x, w.swapaxes(-1, -2), rhs_indices=ids)

    def gradient(op: Callable[..., mx.array], x: mx.array, ids: mx.array) -> mx.array:
        return mx.grad(lambda w: product(op, x, w, ids).astype(mx.float32).sum())(w)

    ops = {"ours": gather_matmul} | ({"MLX": mx.gather_mm} if dtype == mx.float32 else {})
    decode = {k: each_token(lambda i, op=op: product(op, one, w, i), shape[0]) for k, op in ops.items()}
    prompt: Contestants = {k: lambda op=op: mx.eval(product(op, many, w, ids)) for k, op in ops.items()}
    weights: Contestants = {k: lambda op=op: mx.eval(gradient(op, few, few_ids)) for k, op in ops.items()}
    fewer = min(rounds, 3)
    return [
        row("dense, decode", dtype, shape, decode | read_of([w]), rounds=3 * rounds),
        row("dense, prompt of 128", dtype, shape, prompt | torch_of_experts(many, w, ids), rounds=fewer),
        row("dense, gradient in w, 4 tokens", dtype, shape, weights, rounds=fewer),
    ]


@click.command()
@click.option("--rounds", default=7, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.set_cache_limit(CACHE_LIMIT)
    rows = []
    for shape in SHAPES:
        for options in FORMATS:
            for dtype in DTYPES:
                rows.append(decode_row(shape, dtype, options, rounds))
                if options is not FORMATS[1]:
                    rows.append(gated_row(shape, dtype, options, rounds))
                    rows += prompt_rows(shape, dtype, options, rounds)
    for dtype in DTYPES:
        rows += dense_rows(DENSE_SHAPE, dtype, rounds)
    console = Console(width=160)
    table = console_table("gathered products, CPU", words=("op", "format", "dtype"), figures=("shape", "ms", "speedup"))
    for line in rows:
        options = line.get("format", {"mode": "dense", "bits": ""})
        ratios = ", ".join(f"{label} {value:.2f}x" for label, value in line["speedup"].items())
        ms = f"{line['seconds']['ours']['median'] * 1e3:.2f}"
        cells = (f"{options['mode']} {options['bits']}", line["dtype"], "x".join(map(str, line["shape"])))
        table.add_row(line["op"], *cells, ms, ratios)
    console.print(table)
    console.print(f"written: {write_results('gather_matmul_cpu', rows)}")


if __name__ == "__main__":
    main()
