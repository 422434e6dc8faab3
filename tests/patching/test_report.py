"""The report of ``patch`` in a terminal and in a notebook, and its advice."""

import re

import mlx.nn as nn
import pytest
from rich.console import Console

import mlx_anvil
from lm_models import ARCHITECTURES
from mlx_anvil._tables import shortened
from mlx_anvil.patching import Report, _left
from mlx_anvil.patching._advice import advice
from mlx_anvil.patching._report import FallbackLog

pytestmark = pytest.mark.cpu_only


def test_the_report_fits_80_columns():
    model = ARCHITECTURES["gemma2"].build()
    nn.quantize(model, group_size=32, bits=4)
    report = mlx_anvil.patch(model, rope=False)
    lines = str(report).splitlines()
    assert all(len(line) <= 80 for line in lines), report
    total = len(report.swapped) + len(report.left)
    assert lines[0] == report.summary == f"gemma2.Model: {len(report.swapped)} of {total} calls swapped."
    headings = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert headings == ["Swapped", "Left as it was, and why", "What to do about it"]
    counts = [int(count) for count in re.findall(r" x (\d+)  ", "\n".join(lines))]
    assert sum(counts) == total
    rows = lines[lines.index("Swapped") + 2 : lines.index("Left as it was, and why") - 1]
    assert len({line.partition(" x ")[0] + line.partition(" x ")[2] for line in rows}) == len(rows), report
    assert "  mx.fast.rope: pass rope=True to patch." in lines
    lines = str(mlx_anvil.patch(ARCHITECTURES["starcoder2"].build())).splitlines()
    assert "  gelu: nothing to do; MLX's ops run there, as before the patch." in lines


def test_a_narrow_or_wide_terminal_gets_its_own_table():
    model = ARCHITECTURES["llama"].build()
    report = mlx_anvil.patch(model)
    for width in (80, 120):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(report)
        lines = capture.get().splitlines()
        assert all(len(line.rstrip()) <= width for line in lines)
        assert any("model.layers.*.post_attention_layernorm" in line for line in lines) == (width == 120)


def test_in_a_notebook():
    report = mlx_anvil.patch(ARCHITECTURES["llama"].build(), norm=False)
    html = report._repr_html_()
    assert html.startswith(f"<p>{report.summary}</p><table>")
    assert "model.layers.*.self_attn" in html
    assert "norm=False" in html
    assert "pass norm=True to patch." in html
    log = FallbackLog()
    log.add("rope", "<x> & y")
    assert "&lt;x&gt; &amp; y" in Report("Model", (), (), log=log)._repr_html_()


@pytest.mark.parametrize(
    ("path", "width", "text"),
    [
        ("model.layers.*.self_attn.q_proj", 31, "model.layers.*.self_attn.q_proj"),
        ("model.layers.*.self_attn.q_proj", 30, "…layers.*.self_attn.q_proj"),
        ("model.layers.*.self_attn.q_proj", 12, "…q_proj"),
        ("a_very_long_name", 8, "…ng_name"),
    ],
)
def test_paths_are_shortened_from_the_left(path, width, text):
    assert shortened(path, width) == text


def test_every_reason_has_advice():
    reasons = [value for name, value in vars(_left).items() if name.isupper() and not name.startswith("_")]
    assert len(reasons) >= 8
    for reason in reasons:
        assert advice(reason).endswith(".")
    assert advice("rope=False") == "pass rope=True to patch."
    assert "softmax_topk" in advice(_left.OWN_ROUTER)
    assert "the op" in advice("the methods of Norm cannot be replaced: TypeError: no")
