"""quantized_experts on the CPU against mlx-lm's SwitchGLU and the sum that its models write out.

    python bench/quantized_experts.py

writes bench/results/quantized_experts_cpu.json. The experts have the shape of Qwen3-30B-A3B's: 128 of 768 x 2048, of
which a token takes 8, in 4 bits. MLX's contestant has the same weights. "share of copy" is what one token's chosen
experts, read once, take at the speed of a copy, over the time of the call. "dense" is our ``quantized_matmul`` with as
many products: the rows of all pairs, times one expert's matrices. MLX takes minutes for a prompt, so it has no row there.
"""

from collections.abc import Callable
from typing import Any

from harness import as_json, console_table, copies, measure, ratio, write_results

import click
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU
from rich.console import Console
from rich.table import Table

from mlx_anvil import quantized_experts, quantized_matmul, quantized_swiglu
from mlx_anvil._check import dtype_name

EXPERTS, CHOSEN, DIMS, HIDDEN = 128, 8, 2048, 768
TOKENS = (1, 4, 16, 512)
MOST_OF_MLX = 16
FORMAT: dict[str, Any] = {"group_size": 64, "bits": 4}
Matrix = tuple[mx.array, ...]


def experts_of(dtype: mx.Dtype) -> SwitchGLU:
    layer = SwitchGLU(DIMS, HIDDEN, EXPERTS)
    nn.quantize(layer, **FORMAT)
    layer.set_dtype(dtype)
    mx.eval(layer.parameters())
    return layer


def matrices_of(layer: SwitchGLU) -> list[Matrix]:
    sides = (layer.gate_proj, layer.up_proj, layer.down_proj)
    return [(side["weight"], side["scales"], side["biases"]) for side in sides]


def contestants(layer: SwitchGLU, arrays: list[mx.array], gradient: bool) -> dict[str, Callable[[], None]]:
    x, ids, weights = arrays
    matrices = matrices_of(layer)
    one = [tuple(part[0] for part in matrix) for matrix in matrices]

    def ours(x: mx.array) -> mx.array:
        return quantized_experts(x, ids, weights, *matrices, **FORMAT)

    def theirs(x: mx.array) -> mx.array:
        return (layer(x, ids) * weights[..., None]).sum(axis=-2)

    def dense(x: mx.array) -> mx.array:
        rows = mx.repeat(x, CHOSEN, axis=0)
        return quantized_matmul(quantized_swiglu(rows, one[0], one[1], **FORMAT), *one[2], **FORMAT)

    functions = {"ours": ours, "MLX": theirs} | ({} if gradient else {"dense": dense})
    if gradient:
        functions = {name: mx.grad(lambda x, f=f: f(x).sum()) for name, f in functions.items()}
    return {name: lambda f=f: mx.eval(f(x)) for name, f in functions.items()}


def run_row(layer: SwitchGLU, tokens: int, dtype: mx.Dtype, gradient: bool, rounds: int) -> dict[str, Any]:
    scores = mx.random.normal((tokens, EXPERTS))
    ids = mx.argsort(-scores, axis=-1)[:, :CHOSEN]
    weights = mx.softmax(mx.take_along_axis(scores, ids, axis=-1), axis=-1).astype(dtype)
    arrays = [mx.random.normal((tokens, DIMS)).astype(dtype), ids, weights]
    mx.eval(arrays)
    chosen = len({*ids.flatten().tolist()})
    read = chosen * sum(part[0].nbytes for matrix in matrices_of(layer) for part in matrix)
    functions = contestants(layer, arrays, gradient)
    if tokens > MOST_OF_MLX:
        del functions["MLX"]
    timings = measure({**functions, **copies(read)}, rounds=rounds, budget_seconds=1.0)
    copy = min((timings[name] for name in timings if name not in functions), key=lambda timing: timing.median)
    return {
        "op": "quantized_experts",
        "direction": "forward + backward" if gradient else "forward",
        "dtype": dtype_name(dtype),
        "shape": [tokens, CHOSEN, EXPERTS, DIMS, HIDDEN],
        "chosen": chosen,
        "speedup": {"MLX": round(ratio(timings["MLX"], timings["ours"]), 2)} if "MLX" in timings else {},
        "share_of_copy": round(ratio(copy, timings["ours"]), 3),
        "share_of_dense": None if gradient else round(ratio(timings["dense"], timings["ours"]), 2),
        "spread": round(timings["ours"].spread, 3),
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("direction", "dtype", "tokens", "experts read", "ours", "MLX", "x", "of copy", "of dense", "spread")
    result = console_table("quantized_experts, CPU: medians in ms", words=columns[:2], figures=columns[2:])
    for row in rows:
        ms = {label: f"{timing['median'] * 1e3:.2f}" for label, timing in row["seconds"].items()}
        shares = [
            f"{row['share_of_copy']:.2f}",
            "" if row["share_of_dense"] is None else f"{row['share_of_dense']:.2f}",
        ]
        cells = [row["direction"], row["dtype"], str(row["shape"][0]), str(row["chosen"]), ms["ours"]]
        mlx = [ms["MLX"], f"{row['speedup']['MLX']:.1f}"] if "MLX" in ms else ["", ""]
        result.add_row(*cells, *mlx, *shares, f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
def main(rounds: int) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows = []
    for dtype in (mx.float32, mx.bfloat16):
        layer = experts_of(dtype)
        for gradient in (False, True):
            rows += [run_row(layer, tokens, dtype, gradient, rounds) for tokens in TOKENS]
    console = Console(width=150)
    console.print(table(rows))
    console.print(f"written: {write_results('quantized_experts_cpu', rows)}")


if __name__ == "__main__":
    main()
