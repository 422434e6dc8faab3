"""Where the time of a patched language model goes: the parts of one token and of a prompt, by themselves.

    python bench/profile_lm.py [--dtype bfloat16]

writes bench/results/lm_parts_cpu.json, for the model of lm.py. A part is all calls of one kind that the step makes, in
all layers, with the weights of the layers and arrays of the shapes that the model has there, in one graph; its time has
the building of that graph in it, so the parts add up to somewhat more or less than the step, which is measured beside
them. "Read" is a sum over as many bytes as the weights have: what a token cannot beat.

Of a token there is a timeline too, without and with 8-bit activations: how long Python builds its graph, how long each
kernel runs (mlx_anvil.trace), and what lies between the kernels. Nothing overlaps there: the next token's graph is built
after the evaluation. A read of the weights runs beside it.
"""

import statistics
import time
from typing import Any

from harness import as_json, console_table, measure, write_results

import click
import mlx.core as mx
from mlx.utils import tree_flatten
from rich.console import Console
from rich.table import Table

from lm import PROMPT, SHAPE, TOKENS_A_ROUND, Run, huge_pages, rounded
from mlx_anvil import _ext, flash_attention, rope_and_cache, trace, use_huge_pages
from mlx_anvil._check import dtype_name
from mlx_anvil.bench.model import decode_step, prefill, random_cache, random_llama, random_tokens
from mlx_anvil.bench.random_weights import patched_twin
from mlx_anvil.reference import DTYPES
from tables import STAGES, stages_of_tokens

HEAD_DIM = SHAPE.hidden // SHAPE.heads
OURS, MLX = "mlx-anvil", "MLX"


class Step:
    """One pass of a patched model over `tokens` tokens behind `context` others, taken apart."""

    def __init__(self, model: Any, dtype: mx.Dtype, tokens: int, context: int):
        self.model, self.layers, self.dtype, self.tokens, self.context = model, model.layers, dtype, tokens, context
        self.ids = random_tokens(SHAPE, tokens)

    def draw(self, *shape: int) -> list[mx.array]:
        """One array for each layer."""
        arrays = [mx.random.normal(shape).astype(self.dtype) for _ in self.layers]
        mx.eval(arrays)
        return arrays

    def heads(self, count: int) -> list[mx.array]:
        arrays = [x.transpose(0, 2, 1, 3) for x in self.draw(1, self.tokens, count, HEAD_DIM)]
        mx.eval(arrays)
        return arrays

    def rope_and_caches(self, q: list[mx.array], k: list[mx.array]) -> Run:
        shape = (1, SHAPE.kv_heads, max(256, self.context + self.tokens), HEAD_DIM)
        caches = list(zip(self.draw(*shape), self.draw(*shape), strict=True))

        def run() -> None:
            queries = []
            for i, layer in enumerate(self.layers):
                rope = layer.self_attn.rope
                options = {"traditional": rope.traditional, "base": rope.base, "offset": self.context}
                written = rope_and_cache(q[i], k[i], k[i], *caches.pop(0), rope.dims, **options)
                queries.append(written[0])
                caches.append(written[1:])  # the only references: the op writes in place
            mx.eval(queries, caches)

        return run

    def parts(self) -> dict[str, tuple[str, Run]]:
        """Label to whose code runs, and the calls of one step."""
        x, y = self.draw(1, self.tokens, SHAPE.hidden), self.draw(1, self.tokens, SHAPE.hidden)
        hidden = self.draw(1, self.tokens, SHAPE.intermediate)
        q, k = self.heads(SHAPE.heads), self.heads(SHAPE.kv_heads)
        keys = self.draw(1, SHAPE.kv_heads, self.context + self.tokens, HEAD_DIM)
        (logits, *_) = self.draw(1, SHAPE.vocabulary)
        attentions, mlps = [layer.self_attn for layer in self.layers], [layer.mlp for layer in self.layers]
        norms = [[layer.input_layernorm, layer.post_attention_layernorm] for layer in self.layers]
        options: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "mask": "causal" if self.tokens > 1 else None}

        def each(call: Any, *per_layer: Any) -> Run:
            return lambda: mx.eval([call(*arguments) for arguments in zip(*per_layer, strict=True)])

        def projections(attention: Any, x: mx.array, y: mx.array) -> list[mx.array]:
            return [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x), attention.o_proj(y)]

        return {
            "products of attention": (OURS, each(projections, attentions, x, y)),
            "MLP": (OURS, each(lambda mlp, x: mlp(x), mlps, x)),
            "output head": (OURS, lambda: mx.eval(self.model.lm_head(x[0][:, -1:]))),
            "attention": (OURS, each(lambda q, k: flash_attention(q, k, k, **options), q, keys)),
            "rope and caches": (OURS, self.rope_and_caches(q, k)),
            # A patched norm computes the sum that it gets.
            "norms and residual sums": (OURS, each(lambda both, x, y: [norm(x + y) for norm in both], norms, x, y)),
            "embedding": (OURS, lambda: mx.eval(self.model.model.embed_tokens(self.ids))),
            "heads side by side": (MLX, each(lambda q: q.transpose(0, 2, 1, 3).reshape(1, self.tokens, -1), q)),
            "choice of the token": (MLX, lambda: mx.eval(mx.argmax(logits, axis=-1))),
            # Within the MLP above, for how much of it is a product of one matrix:
            "of the MLP: down": ("", each(lambda mlp, h: mlp.down_proj(h), mlps, hidden)),
        }


def profile(step: Step, whole: Run, weight_bytes: int) -> dict[str, Any]:
    parts = step.parts()
    source = huge_pages(weight_bytes)
    contestants = {"step": whole, "read": lambda: _ext._read(source)} | {name: run for name, (_, run) in parts.items()}
    timings = measure(contestants, rounds=7, least_seconds=0.01, budget_seconds=10)
    return {
        "op": "decode" if step.tokens == 1 else "prefill",
        "dtype": dtype_name(step.dtype),
        "tokens": step.tokens,
        "weight_bytes": weight_bytes,
        "parts": {name: {"by": by, **as_json(timings[name])} for name, (by, _) in parts.items()},
        "seconds": {name: as_json(timings[name]) for name in ("step", "read")},
    }


def timeline(model: Any, token: mx.array, weight_bytes: int) -> dict[str, float]:
    """Medians of the seconds of a token's stages."""
    cache = random_cache(model, PROMPT)
    source = huge_pages(weight_bytes)
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    for _ in range(TOKENS_A_ROUND):
        with trace() as log:
            start = time.perf_counter()
            token = mx.argmax(model(token, cache)[:, -1:], axis=-1)
            stages["graph"].append(time.perf_counter() - start)
            mx.eval(token)
        # The embedding is looked up while the graph is built.
        kernels = sorted((event for event in log.events if event.op != "quantized_embedding"), key=lambda e: e.start)
        products = sum(event.seconds for event in kernels if event.op.startswith("quantized_"))
        busy = sum(event.seconds for event in kernels)
        stages["products"].append(products)
        stages["other kernels"].append(busy - products)
        stages["between"].append(kernels[-1].start + kernels[-1].seconds - kernels[0].start - busy)
        start = time.perf_counter()
        _ext._read(source)
        stages["read"].append(time.perf_counter() - start)
    return {name: rounded(statistics.median(seconds)) for name, seconds in stages.items()}


def rows(dtype: mx.Dtype) -> list[dict[str, Any]]:
    model = patched_twin(random_llama(SHAPE, dtype), repack=True)
    use_huge_pages(model)
    arrays: Any = tree_flatten(model.parameters())
    # Of the embedding a token reads one row.
    total = sum(array.nbytes for name, array in arrays if "embed_tokens" not in name)
    one, prompt = Step(model, dtype, 1, PROMPT), Step(model, dtype, PROMPT, 0)
    in_8_bits = patched_twin(model, activation_bits=8)
    stages = {"": timeline(model, one.ids, total), "8": timeline(in_8_bits, one.ids, total)}
    return [
        profile(one, decode_step(model, one.ids, PROMPT), total) | {"timeline": stages},
        profile(prompt, prefill(model, prompt.ids), total),
    ]


def table(line: dict[str, Any]) -> Table:
    step = line["seconds"]["step"]["median"]
    result = console_table(
        f"{line['op']}, {line['dtype']}, {line['tokens']} tokens: {step * 1e3:.1f} ms",
        words=("part", "by"),
        figures=("ms", "share of the step"),
    )
    for name, part in line["parts"].items():
        result.add_row(name, part["by"], f"{part['median'] * 1e3:.2f}", f"{part['median'] / step:.1%}")
    total = sum(part["median"] for part in line["parts"].values() if part["by"])
    result.add_section()
    result.add_row("all", "", f"{total * 1e3:.2f}", f"{total / step:.1%}")
    read = line["seconds"]["read"]["median"]
    result.add_row(f"reading {line['weight_bytes'] / 1e6:.0f} MB", "", f"{read * 1e3:.2f}", f"{read / step:.1%}")
    return result


def table_of_stages(lines: list[dict[str, Any]]) -> Table:
    (dtype, bits, *figures), cells = stages_of_tokens(lines)
    result = console_table("one token, ms", words=(dtype, bits), figures=figures)
    for row in cells:
        result.add_row(*row)
    return result


@click.command()
@click.option("--dtype", "names", multiple=True, type=click.Choice([dtype_name(d) for d in DTYPES]), help="Only these.")
def main(names: tuple[str, ...]) -> None:
    """Runs the profile, prints its tables, writes its results."""
    mx.set_default_device(mx.cpu)
    console = Console(width=100)
    lines = [line for dtype in DTYPES if not names or dtype_name(dtype) in names for line in rows(dtype)]
    for line in lines:
        console.print(table(line))
    console.print(table_of_stages(lines))
    if not names:
        console.print(f"written: {write_results('lm_parts_cpu', lines)}")


if __name__ == "__main__":
    main()
