"""Tables of the committed results, in the Markdown pages: bench/plot.py writes them, a test compares them."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import RESULTS

import agx_tables
import apple_tables
import cache_tables
import delta_tables
import distributed_measured
import distributed_tables
import estimate_tables
import expert_tables
from op_tables import OP_TABLES
from op_tables import markdown as _markdown

ROOT = RESULTS.parent.parent
GENERATED = re.compile(r"(<!-- table: ([^\n]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Results = dict[str, Any]


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _attention(rows_of_file: Iterable[Results]) -> str:
    """Forward, gradients and decoding."""
    rows = []
    for row in rows_of_file:
        speedup = row["speedup"]
        over_torch = min((speedup[x] for x in ("PyTorch", "PyTorch repeated") if x in speedup), default=None)
        rate = row["rate"]
        if row["direction"] == "decode":
            rate += f", {row['share_of_limit']:.2f} of read bandwidth"
        cells = [row["problem"], row["direction"], row["mask"], row["dtype"]]
        cells += [_milliseconds(row["seconds"]["ours"]["median"]), rate]
        cells.append("" if over_torch is None else f"{over_torch:.2f}x")
        cells.append(f"{speedup['MLX']:.0f}x" if "MLX" in speedup else "")
        rows.append(cells)
    return _markdown(("heads, lengths", "", "mask", "dtype", "ours", "rate", "vs PyTorch", "vs MLX"), rows)


def _attention_rows(results: Results) -> list[Results]:
    return [row for row in results["rows"] if "rate" in row and row["direction"] != "decode, cached"]


def attention(results: Results) -> str:
    """Every row but those of a window and of a cached decode."""
    return _attention(_attention_rows(results))


def attention_briefly(results: Results) -> str:
    """The larger shape with a causal mask, and a decode."""
    rows = _attention_rows(results)
    return _attention(
        row for row in rows if "32/8" in row["problem"] and (row["mask"] == "causal" or "1 of" in row["problem"])
    )


def silu_gate(results: Results) -> str:
    """Rows that reuse memory, as a training loop does."""
    rows = []
    for row in results["rows"]:
        if row["memory"] == "fresh":
            continue
        ours, speedup = row["seconds"]["ours"]["median"] * 1e3, row["speedup"]
        others = [f"{speedup[x]:.1f}x" if x in speedup else "" for x in ("MLX", "MLX compiled", "PyTorch")]
        shape = " x ".join(map(str, row["shape"]))
        figures = [f"{ours:.2f} ms, {row['gb_per_s']} GB/s", f"{row['share_of_copy']:.2f}"]
        rows.append([shape, row["direction"], row["dtype"], *figures, *others])
    heads = ("shape", "direction", "dtype", "ours", "share of copy", "vs MLX", "vs MLX compiled", "vs PyTorch")
    return _markdown(heads, rows)


def gated(results: Results) -> str:
    """Rows in bfloat16."""
    rows = []
    for row in results["rows"]:
        if row["dtype"] != "bfloat16":
            continue
        ours, speedup = row["seconds"]["ours"]["median"] * 1e3, row["speedup"]
        shape = " x ".join(map(str, row["shape"]))
        others = [f"{speedup[x]:.1f}x" for x in ("MLX", "MLX compiled")]
        figures = [f"{ours:.3f} ms", f"{row['spread']:.0%}", *others]
        rows.append([row["activation"], shape, row["direction"], *figures])
    return _markdown(("activation", "shape", "direction", "ours", "spread", "vs MLX", "vs MLX compiled"), rows)


def token_rates(row: Results) -> dict[str, float]:
    """Tokens a second of every contestant."""
    seconds = row["seconds"]
    rates = {"MLX, patched": row["tokens_per_second"]}
    if "MLX" in seconds:
        rates["MLX"] = row["tokens"] / seconds["MLX"].get("once", seconds["MLX"].get("calculated"))
    if "llama.cpp" in seconds:
        rates["llama.cpp"] = row["tokens"] / seconds["llama.cpp"]["median"]
    return rates


def _in_order(rows: list[Results]) -> list[Results]:
    return sorted(rows, key=lambda row: (row["op"], row["dtype"], -(row["activation_bits"] or 32)))


def language_model(results: Results) -> str:
    """Rates of all, and the spread of ours."""
    rows = []
    for row in _in_order(results["rows"]):
        rates, speedup, ours = token_rates(row), row["speedup"], row["seconds"]["ours"]
        cells = [row["op"], row["dtype"], str(row["activation_bits"] or ""), f"{rates['MLX, patched']:.1f}"]
        cells.append(f"{(ours['high'] - ours['low']) / ours['median']:.0%}")
        cells += [f"{rates['MLX']:.2g}", f"{speedup['MLX']:.0f}x"] if "MLX" in rates else ["", ""]
        cells += [f"{rates['llama.cpp']:.1f}", f"{speedup['llama.cpp']:.2f}x"] if "llama.cpp" in rates else ["", ""]
        cells.append(f"{row['share_of_read']:.2f}" if "share_of_read" in row else "")
        rows.append(cells)
    heads = ("", "dtype", "bits", "patched, tokens/s", "spread", "MLX, tokens/s", "vs MLX")
    return _markdown((*heads, "llama.cpp, tokens/s", "vs llama.cpp", "of read"), rows)


def gguf_models(results: Results) -> str:
    """A line for each type: decode and prefill, and their ratios to llama.cpp."""
    rows = []
    for kind in dict.fromkeys(row["type"] for row in results["rows"]):
        for bits in (None, 8):
            cells = [kind, str(bits or "")]
            for op in ("decode", "prefill"):
                of = next(r for r in results["rows"] if (r["op"], r["type"], r["activation_bits"]) == (op, kind, bits))
                cells += [f"{of['tokens_per_second']:.1f}", f"{of['speedup']['llama.cpp']:.2f}x"]
            rows.append(cells)
    heads = ("type", "bits", "decode, tokens/s", "vs llama.cpp", "prefill, tokens/s", "vs llama.cpp")
    return _markdown(heads, rows)


def language_model_parts(results: Results) -> str:
    """Milliseconds of each part, and its share of the step."""
    lines = results["rows"]
    heads = ["", "by", *(f"{line['op']}, {line['dtype']}" for line in lines)]
    rows = []
    for name, part in lines[0]["parts"].items():
        if not part["by"]:
            continue
        rows.append([name, part["by"]])
        for line in lines:
            seconds = line["parts"][name]["median"]
            rows[-1].append(f"{seconds * 1e3:.2f} ({seconds / line['seconds']['step']['median']:.1%})")
    for name, key in (("the step itself", "step"), ("reading its weights", "read")):
        rows.append([name, "", *(f"{line['seconds'][key]['median'] * 1e3:.2f}" for line in lines)])
    return _markdown(heads, rows)


# The stages of a token, as profile_lm.py measures them.
STAGES = ("graph", "products", "other kernels", "between", "read")


def stages_of_tokens(lines: list[Results]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: milliseconds of each stage, and the time of a read over that of the products."""
    rows = []
    for line in lines:
        for bits, stages in line.get("timeline", {}).items():  # of a decode
            cells = [f"{stages[name] * 1e3:.2f}" for name in STAGES]
            rows.append([line["dtype"], bits, *cells, f"{stages['read'] / stages['products']:.2f}"])
    return ["dtype", "bits", *STAGES, "of read"], rows


def language_model_stages(results: Results) -> str:
    return _markdown(*stages_of_tokens(results["rows"]))


# Contestants of bench/cuda.py that are not MLX's ops on the same arrays.
CUDA_PEERS = {
    "cudnn_gpu": "cuDNN",
    "flex_gpu": "FlexAttention",
    "int4mm": "int4mm",
    "torch_bfloat16_gpu": "grouped bfloat16",
    "dense": "dense",
    "batch": "as a batch",
    "bfloat16": "bfloat16 keys",
    "contiguous": "contiguous",
    "full": "all keys",
    "product": "product alone",
}


def cuda(results: Results, wanted: Callable[[str], bool] = lambda what: True) -> str:
    """Large calls: our time, that of MLX's ops over it by the host's clock and by the GPU's, a rate, and the others'
    times over ours."""
    rows = []
    for row in results["rows"]:
        if not wanted(row["what"]) or "ours_us" not in row or "64x64" in row["what"]:
            continue
        base = next((name for name in ("mlx", "composed", "compiled", "mlx_lm") if f"times_{name}" in row), None)
        if "share_of_copy" in row:
            rate = f"{row['share_of_copy']:.2f} of copy"
        elif "tflops" in row:
            rate = f"{row['tflops']:.0f} TFLOP/s"
        elif "times_peak" in row:
            rate = f"peak memory 1/{row['times_peak']:.0f}"
        else:
            launches = f"{row['ours_launches']} launches (MLX {row['mlx_launches']})"
            rate = f"{row['ours_tokens_per_second']:.0f} tokens/s, {launches}"
        times = (f"{row[f'times_{base}{clock}']:.2f}" if base else "" for clock in ("", "_gpu"))
        peers = (f"{label} {row[f'times_{key}']:.2f}" for key, label in CUDA_PEERS.items() if f"times_{key}" in row)
        microseconds = f"{row['ours_us']:.{1 if row['ours_us'] < 100 else 0}f}"
        rows.append([row["what"], microseconds, *times, rate, ", ".join(peers)])
    return _markdown(("call", "ours, us", "MLX / ours", "on the GPU", "", "others / ours"), rows)


def cuda_briefly(results: Results) -> str:
    """One row of each kind, in bfloat16."""

    def wanted(what: str) -> bool:
        heads = ("(1, 32/8", "32/8 heads of", "32/8 heads, length 4096")
        sizes = ("16384x16384", "4096x4096", "4096->14336", *heads, "decoder", "quantized_experts")
        caches = ("decode over", "prefill over", "decode of 8", "packed", "mla_decode")
        return ("bfloat16" in what and any(size in what for size in sizes)) or what.startswith(caches)

    return cuda(results, wanted)


def cuda_overhead(results: Results) -> str:
    """Microseconds of the CPU for one call, in Python and while it is evaluated."""
    rows = []
    for row in results["rows"]:
        if "ours_python_us" in row and "ours_us" not in row:  # not the decoder, which is timed too
            both = (
                f"{row[f'{who}_python_us']:.1f} + {row[f'{who}_eval_us']:.1f}" if f"{who}_eval_us" in row else ""
                for who in ("ours", "mlx")
            )
            rows.append([row["what"], *both])
    return _markdown(("op", "ours", "MLX's"), rows)


def cuda_first(results: Results) -> str:
    """How long the first tokens of a process take."""
    rows = [
        [
            row["what"].partition("bfloat16, ")[2],
            *(
                "{} ({} to {})".format(
                    *map(_milliseconds, (row[name], min(row[f"{name}_all"]), max(row[f"{name}_all"])))
                )
                for name in ("first_s", "second_s")
            ),
            str(row["cubins"]),
            str(row["ptx"]),
        ]
        for row in results["rows"]
        if "first_s" in row
    ]
    return _markdown(("", "first token", "the one after it", "cubins loaded", "kernels assembled"), rows)


def busy(results: Results) -> str:
    """MLX's time over ours in each condition: median and 90th percentile of single calls."""
    rows = results["rows"]
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    cells: dict[str, list[str]] = {}
    for row in rows:
        ratios = (row["MLX"][key] / row["ours"][key] for key in ("median", "p90"))
        cells.setdefault(row["case"], []).append(", ".join(f"{x:.1f}x" if x < 100 else f"{x:.0f}x" for x in ratios))
    return _markdown(("", *conditions), ([case, *texts] for case, texts in cells.items()))


def _results(name: str) -> list[Results]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def in_brief(results: Results) -> str:
    """The README's: one line for each kind of work, in bfloat16, beside the fastest other implementation and MLX."""
    products = "one thread; unpacks 4-bit codes and bfloat16 one by one"
    attention = "one thread; stores the scores"
    elementwise = "one thread, one number at a time"

    def ratio(row: Results, name: str) -> str:
        value = row["speedup"].get(name)
        return (
            ""
            if value is None
            else f"{value:.0f}x"
            if value >= 20
            else f"{value:.1f}x"
            if value >= 3
            else f"{value:.2f}x"
        )

    def line(what: str, file: str, other: str, why: str, **wanted: Any) -> list[str]:
        row = next(
            row
            for row in _results(file)
            if row["dtype"] == "bfloat16" and all(row.get(key) == value for key, value in wanted.items())
        )
        over_mlx = ratio(row, "MLX")
        return [what, f"{ratio(row, other)} {other}", over_mlx or "not timed", why if over_mlx else ""]

    causal = {"shape": [32, 8, 2048, 2048, 128], "mask": "causal"}
    hidden = {"shape": [4096, 11008], "memory": "reused"}
    model = ("llama.cpp", products)
    attend = ("flash_attention_cpu", "PyTorch", attention)
    gate = ("silu_gate_cpu", "PyTorch", elementwise)
    product = {"op": "decode", "shape": [1, 14336, 4096]}
    rows = [
        line("4-bit Llama, prefill of 64 tokens", "lm_cpu", *model, op="prefill"),
        line("4-bit Llama, decode", "lm_cpu", *model, op="decode"),
        line("the same on an Intel Xeon, prefill", "lm_xeon", *model, op="prefill"),
        line("the same on an Intel Xeon, decode", "lm_xeon", *model, op="decode"),
        line("attention, causal, 2048 tokens", *attend, direction="forward", **causal),
        line("its forward and backward", *attend, direction="forward + backward", **causal),
        line("4-bit product, one row, 4096 to 14336", "quantized_matmul_cpu", "PyTorch int4", products, **product),
        line("`silu_gate`, 4096 x 11008", *gate, direction="forward", **hidden),
        line("its backward", *gate, direction="backward", **hidden),
    ]
    heads = ("bfloat16, two CPU cores", "vs the next best", "vs MLX on Linux", "why MLX is so slow there")
    return _markdown(heads, rows)


# What a page calls a table: the file of its results, and what makes it.
TABLES = {
    "silu_gate": ("silu_gate_cpu", silu_gate),
    "gated": ("gated_cpu", gated),
    "in brief": ("lm_cpu", in_brief),
    "flash_attention": ("flash_attention_cpu", attention),
    "flash_attention, briefly": ("flash_attention_cpu", attention_briefly),
    "busy": ("busy_cpu", busy),
    "language model": ("lm_cpu", language_model),
    "language model, Xeon": ("lm_xeon", language_model),
    "GGUF models": ("gguf_matmul_cpu", gguf_models),
    "GGUF models, Xeon": ("gguf_matmul_xeon", gguf_models),
    "language model, parts": ("lm_parts_cpu", language_model_parts),
    "language model, stages": ("lm_parts_cpu", language_model_stages),
    "cuda": ("cuda_h200", cuda),
    "cuda, briefly": ("cuda_h200", cuda_briefly),
    "cuda, overhead": ("cuda_h200", cuda_overhead),
    "cuda, first": ("cuda_first_h200", cuda_first),
    "agx, by op": ("agx", agx_tables.needs_by_op),
    "apple, code": ("apple", apple_tables.code),
    "apple, estimates": ("apple", apple_tables.estimates),
    "apple, recurrences": ("apple_recurrences", apple_tables.recurrences),
    "estimate, errors": ("apple", estimate_tables.errors),
    "estimate, by kernel": ("apple", estimate_tables.errors_by_kernel),
    "gather_matmul": ("gather_matmul_cpu", expert_tables.gather_matmul),
    "moe": ("moe_cpu", expert_tables.moe),
    "quantized_experts": ("quantized_experts_cpu", expert_tables.quantized_experts),
    "quantized_kv": ("quantized_kv_cpu", cache_tables.quantized_kv),
    "ragged_attention": ("ragged_attention_cpu", cache_tables.ragged),
    "batch_caches": ("batch_caches_cpu", cache_tables.batches),
    "paged_attention": ("paged_attention_cpu", cache_tables.paged),
    "kv_append": ("kv_append_cpu", cache_tables.appended),
    "cache_memory": ("cache_memory_cpu", cache_tables.memory),
    "gated_delta": ("gated_delta_cpu", delta_tables.table),
    "gated_delta, lengths": ("gated_delta_lengths_cpu", delta_tables.lengths),
    "ssd_scan": ("ssd_scan_cpu", delta_tables.table),
    "gated_delta, cuda": ("cuda_delta_h200", delta_tables.cuda),
    "distributed, fit": ("communication_cpu", distributed_tables.fit),
    "distributed, links": ("communication_cpu", distributed_tables.links),
    "distributed, machines": ("communication_cpu", distributed_tables.machines),
    "distributed, speed-ups": ("communication_cpu", distributed_tables.speedups),
    "ring attention": ("ring_attention_cpu", distributed_measured.ring_attention),
    "tensor parallel": ("tensor_parallel_cpu", distributed_measured.tensor_parallel),
    "tensor parallel, overlap": ("tensor_parallel_cpu", distributed_measured.overlap),
    "sharded cache": ("sharded_cache_cpu", distributed_measured.sharded_cache),
    "data parallel": ("data_parallel_cpu", distributed_measured.data_parallel),
    **OP_TABLES,
}


def with_tables(text: str) -> str:
    """The page, with the tables between its lines ``<!-- table: NAME -->`` and ``<!-- end -->`` written anew."""

    def written(match: re.Match[str]) -> str:
        name, make = TABLES[match[2]]
        table = make(json.loads((RESULTS / f"{name}.json").read_text()))
        return f"{match[1]}\n{table}\n\n{match[4]}"  # blank lines: else Python-Markdown sees no table

    return GENERATED.sub(written, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
