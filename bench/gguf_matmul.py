"""Models of GGUF files on the CPU: load_gguf and mlx_anvil.patch, and llama.cpp with the same file.

    python bench/gguf_matmul.py [--type Q4_K_M] [--layers 16] [--without-llama-cpp]

writes bench/results/gguf_matmul_cpu.json; rows of types that were not asked for stay in it. A Llama as in bench/lm.py
(hidden 2048, intermediate 5632, 32/8 heads, vocabulary 32000) with random weights. Q4_K_M and Q5_K_M are mixtures as
files have them: Q6_K for the output head, and for values and down projections of every other layer.

Activations are bfloat16, with and without activation_bits=8, which is what llama.cpp computes with. Decode: 32 tokens
one after another, behind 64 others; prefill: 64 tokens into an empty cache. Without llama-cpp-python, its columns stay
empty.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RESULTS, as_json, console_table, measure, ratio, write_results

import click
import mlx.core as mx
from rich.console import Console

from gguf_files import write
from mlx_anvil import _ext, lm, patch, use_huge_pages
from mlx_anvil.bench.model import LlamaShape, generation, prefill, random_tokens

PROMPT, TOKENS = 64, 32
NAME, LLAMA = "gguf_matmul_cpu", "llama.cpp"
MIXTURES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
TYPES = (*MIXTURES, "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
Run = Callable[[], Any]


def type_of(kind: str) -> Callable[[str], str]:
    """The type of a matrix by its name in the file."""
    if kind not in MIXTURES:
        return lambda name: kind

    def of_mixture(name: str) -> str:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        better = name == "output" or (name.endswith(("attn_v", "ffn_down")) and layer % 2 == 0)
        return "Q6_K" if better else MIXTURES[kind]

    return of_mixture


def model_of(path: Path, activation_bits: int | None) -> Any:
    """The patched model."""
    model, _ = lm.load_gguf(path, activation_bits=activation_bits)
    patch(model)
    use_huge_pages(model)
    return model


def rows_of(kind: str, shape: LlamaShape, folder: Path, with_llama_cpp: bool) -> tuple[list[dict[str, Any]], str]:
    """The rows of a type, and what llama.cpp says of itself."""
    path = folder / f"{kind}.gguf"
    write(path, shape, type_of(kind))
    models = {bits: model_of(path, bits) for bits in (None, 8)}
    llama: Any = None
    if with_llama_cpp:
        from gguf_llama import LlamaCpp

        llama = LlamaCpp(path, _ext._max_threads())
    prompt, token = random_tokens(shape, PROMPT), random_tokens(shape, 1)
    # The prefill of llama.cpp first: its decode goes on behind it.
    steps: dict[str, tuple[int, Callable[[Any], Run], Run | None]] = {
        "prefill": (PROMPT, lambda model: prefill(model, prompt), llama and (lambda: llama.prefill(PROMPT))),
        "decode": (
            TOKENS,
            lambda model: generation(model, token, TOKENS, PROMPT),
            llama and (lambda: llama.decode(PROMPT, TOKENS)),
        ),
    }
    lines = []
    for what, (tokens, step, of_llama) in steps.items():
        runs: dict[str, Run] = {str(bits): step(model) for bits, model in models.items()}
        timings = measure(runs | ({LLAMA: of_llama} if of_llama else {}), rounds=11, budget_seconds=20)
        for bits in models:
            own = timings[str(bits)]
            line: dict[str, Any] = {"op": what, "type": kind, "activation_bits": bits, "tokens": tokens}
            line["tokens_per_second"] = round(tokens / own.median, 1)
            line["seconds"] = {"ours": as_json(own)}
            if of_llama:
                line["speedup"] = {LLAMA: round(ratio(timings[LLAMA], own), 3)}
                line["seconds"][LLAMA] = as_json(timings[LLAMA])
            lines.append(line)
    system = llama.system if llama else ""
    if llama:
        llama.close()
    path.unlink()
    return lines, system


def other_rows(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Those of the file for other types."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return []
    return [line for line in json.loads(path.read_text())["rows"] if line["type"] not in kinds]


@click.command()
@click.option("--type", "kinds", multiple=True, type=click.Choice(TYPES), help="Only these.")
@click.option("--layers", default=16, help="Layers of the model.")
@click.option("--without-llama-cpp", is_flag=True)
def main(kinds: tuple[str, ...], layers: int, without_llama_cpp: bool) -> None:
    """Runs the benchmark, prints its table, writes its results."""
    mx.set_default_device(mx.cpu)
    shape = LlamaShape(hidden=2048, layers=layers, intermediate=5632, heads=32, kv_heads=8, vocabulary=32000)
    lines, systems = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds or TYPES:
            own, system = rows_of(kind, shape, Path(folder), not without_llama_cpp)
            lines += own
            systems |= {system} - {""}
    table = console_table(
        "Llama of a GGUF file, CPU: tokens a second, and times faster than llama.cpp",
        words=("", "type", "bits"),
        figures=("tokens/s", "over llama.cpp"),
    )
    for line in lines:
        faster = line["speedup"][LLAMA] if "speedup" in line else ""
        bits = str(line["activation_bits"] or "")
        table.add_row(line["op"], line["type"], bits, str(line["tokens_per_second"]), str(faster))
    console = Console(width=120)
    console.print(table)
    more = {LLAMA: systems.pop()} if systems else {}
    console.print(f"written: {write_results(NAME, lines + other_rows(kinds or TYPES), **more)}")


if __name__ == "__main__":
    main()
