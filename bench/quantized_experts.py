"""quantized_experts on the CPU against mlx-lm's SwitchGLU and the sum that its models write out.

    python bench/quantized_experts.py

writes bench/results/quantized_experts_cpu.json. The experts have the shape of Qwen3-30B-A3B's: 128 of 768 x 2048, of
which a token takes 8, in 4 bits. MLX's contestant has the same weights. "share of copy" is what one token's chosen
experts, read once, take at the speed of a copy, over the time of the call. "dense" is our ``quantized_matmul`` with as
many products: the rows of all pairs, times one expert's matrices. MLX takes minutes for a prompt, so it has no row there.

PyTorch's blocks (torch_experts.py) run where torch is installed. llama.cpp's model is a Qwen3-MoE of two layers with
4-bit weights of its own (Q4_0), next to no attention and a small vocabulary; its time is a layer's share of one token
and of a prompt. Leave it out with --without-llama-cpp.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import as_json, console_table, copies, installed_torch, measure, ratio, write_results

import click
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU
from rich.console import Console
from rich.table import Table

import torch_experts
from mlx_anvil import _ext, quantized_experts, quantized_matmul, quantized_swiglu
from mlx_anvil._check import dtype_name
from mlx_anvil.bench.timing import Timing

EXPERTS, CHOSEN, DIMS, HIDDEN = 128, 8, 2048, 768
TOKENS = (1, 4, 16, 512)
MOST_OF_MLX = 16
LAYERS = 2  # of llama.cpp's model
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


@contextmanager
def llama_of_experts() -> Any:
    """llama.cpp with a model of such experts."""
    from gguf_files import MoeShape, write_experts
    from gguf_llama import LlamaCpp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts.gguf"
        write_experts(path, MoeShape(DIMS, LAYERS, EXPERTS, CHOSEN, HIDDEN))
        llama = LlamaCpp(path, _ext._max_threads())
        try:
            yield llama
        finally:
            llama.close()


def peers(arrays: list[mx.array], layer: SwitchGLU, torch: Any, llama: Any) -> dict[str, Callable[[], None]]:
    """Contestants of other libraries; a call of llama.cpp's runs all layers."""
    found = torch_experts.contestants(torch, *arrays, matrices_of(layer)) if torch else {}
    tokens = arrays[0].shape[0]
    if llama and tokens in (1, TOKENS[-1]):
        llama.prefill(TOKENS[-1] if tokens > 1 else 1)  # a decode goes on behind it
        found["llama.cpp"] = (lambda: llama.decode(1, 1)) if tokens == 1 else lambda: llama.prefill(tokens)
    return found


def run_row(
    layer: SwitchGLU, tokens: int, dtype: mx.Dtype, gradient: bool, rounds: int, torch: Any, llama: Any
) -> dict[str, Any]:
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
    others = {} if gradient else peers(arrays, layer, torch, llama)
    copied = copies(read)
    timings = measure({**functions, **others, **copied}, rounds=rounds, budget_seconds=1.0)
    if "llama.cpp" in timings:
        timings["llama.cpp"] = Timing.of([seconds / LAYERS for seconds in timings["llama.cpp"].rounds])
    copy = min((timings[name] for name in copied), key=lambda timing: timing.median)
    compared = [name for name in ("MLX", *others) if name in timings]
    return {
        "op": "quantized_experts",
        "direction": "forward + backward" if gradient else "forward",
        "dtype": dtype_name(dtype),
        "shape": [tokens, CHOSEN, EXPERTS, DIMS, HIDDEN],
        "chosen": chosen,
        "speedup": {name: round(ratio(timings[name], timings["ours"]), 2) for name in compared},
        "share_of_copy": round(ratio(copy, timings["ours"]), 3),
        "share_of_dense": None if gradient else round(ratio(timings["dense"], timings["ours"]), 2),
        "spread": round(timings["ours"].spread, 3),
        "seconds": {label: as_json(t) for label, t in timings.items()},
    }


def table(rows: list[dict[str, Any]]) -> Table:
    columns = (
        "direction",
        "dtype",
        "tokens",
        "experts read",
        "ours",
        "times faster than",
        "of copy",
        "of dense",
        "spread",
    )
    result = console_table("quantized_experts, CPU: medians in ms", words=columns[:2], figures=columns[2:])
    for row in rows:
        ms = {label: f"{timing['median'] * 1e3:.2f}" for label, timing in row["seconds"].items()}
        shares = [
            f"{row['share_of_copy']:.2f}",
            "" if row["share_of_dense"] is None else f"{row['share_of_dense']:.2f}",
        ]
        cells = [row["direction"], row["dtype"], str(row["shape"][0]), str(row["chosen"]), ms["ours"]]
        beside = ", ".join(f"{name} {value:.2g}" for name, value in row["speedup"].items())
        result.add_row(*cells, beside, *shares, f"{row['spread']:.0%}")
    return result


@click.command()
@click.option("--rounds", default=5, help="Rounds per row, after a warm-up.")
@click.option("--without-llama-cpp", is_flag=True)
def main(rounds: int, without_llama_cpp: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    rows, more, torch = [], {}, installed_torch()
    if torch:
        torch.set_num_threads(_ext._max_threads())
        more["torch"] = torch.__version__
    with ExitStack() as stack:
        llama = None if without_llama_cpp else stack.enter_context(llama_of_experts())
        if llama:
            more["llama.cpp"] = llama.system
        for dtype in (mx.float32, mx.bfloat16):
            layer = experts_of(dtype)
            for gradient in (False, True):
                rows += [run_row(layer, tokens, dtype, gradient, rounds, torch, llama) for tokens in TOKENS]
    console = Console(width=180)
    console.print(table(rows))
    console.print(f"written: {write_results('quantized_experts_cpu', rows, **more)}")


if __name__ == "__main__":
    main()
