"""Writes the tables of docs/patched-models.md from what a patched model of each architecture runs: ``python
docs/patch_matrix.py``."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

import mlx_anvil
from mlx_anvil._extras import missing

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

try:
    from mlx_lm.models.cache import make_prompt_cache

    from expert_models import MODELS  # beside the tests
    from lm_models import ARCHITECTURES, Architecture
    from recurrent_models import MODELS as RECURRENT
except ModuleNotFoundError as error:
    raise missing(error, "lm") from None

PAGE = ROOT / "docs" / "patched-models.md"
COLUMNS = {
    "attention": {"flash_attention", "mla_decode"},
    "recurrence": {"gated_delta", "selective_scan", "ssd_scan"},
    "convolution": {"causal_conv1d"},
    "gate": {"silu_gate", "gated", "quantized_swiglu", "sigmoid_gate"},
    "products": {"quantized_matmul"},
    "router": {"softmax_topk"},
    "experts": {"quantized_experts", "gather_quantized_matmul"},
    "table": {"quantized_embedding"},
    "norms": {"rms_norm", "layer_norm"},
    "rope": {"rope"},
}


def ops_that_run(model: nn.Module) -> set[str]:
    """Our ops in a prompt of nine tokens and a step of decoding."""
    cache = make_prompt_cache(model)
    with mlx_anvil.trace() as trace:
        mx.eval(model(mx.array([[*range(9)]]), cache=cache))
        mx.eval(model(mx.array([[9]]), cache=cache))
    if trace.fallbacks:
        raise RuntimeError(f"[patch_matrix] fell back: {trace.fallbacks}")
    return {event.op for event in trace.events}


def is_quantizable(_: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0 and layer.weight.shape[-2] > 1


def row(name: str, architecture: Architecture, why: dict[str, str]) -> str:
    """The row of a model. Adds the reasons for what is left to ``why``."""
    model = architecture.build()
    nn.quantize(model, group_size=32, bits=4, class_predicate=is_quantizable)
    report = mlx_anvil.patch(model)
    ran = ops_that_run(model)
    marks = ["yes" if ops & ran else "" for ops in COLUMNS.values()]
    left = {row.what: row.why for row in report.left}
    why.update(left)
    cells = [f"{name} (`{architecture.module}`)", *marks, ", ".join(f"`{what}`" for what in left)]
    return f"| {' | '.join(cells)} |"


def table() -> Iterator[str]:
    why: dict[str, str] = {}
    yield f"| model | {' | '.join(COLUMNS)} | left as it is |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    others = {name: architecture for name, architecture in MODELS.items() if name not in ARCHITECTURES}
    for name, architecture in (ARCHITECTURES | others | RECURRENT).items():
        yield row(name, architecture, why)
    yield ""
    yield "Why it is left:"
    yield ""
    for what, reason in sorted(why.items()):
        yield f"- `{what}`: {reason}."


def page_with(text: str) -> str:
    """The page with the table between its marks."""
    begin, end = "<!-- matrix -->\n", "\n<!-- end of matrix -->"
    return re.sub(f"(?<={begin}).*(?={end})", lambda _: text, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page_with("\n".join(table())))
