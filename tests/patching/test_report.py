"""The report of ``patch`` in a terminal and in a notebook, and its advice."""

import re

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_update
from rich.console import Console

import mlx_anvil
from expert_models import MODELS as WITH_EXPERTS
from lm_models import ARCHITECTURES
from mlx_anvil import ssd_scan
from mlx_anvil._tables import shortened
from mlx_anvil.patching import Report, _left
from mlx_anvil.patching._advice import advice
from mlx_anvil.patching._report import FallbackLog
from recurrent_models import MODELS as RECURRENT
from recurrent_models import RWKV7

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


# ---- recurrences -----------------------------------------------------------------------------------------------------

# Those without an op. All others are swapped.
WITHOUT_OP = {
    "bailing_moe_linear": {"LinearAttention"},
    "recurrent_gemma": {"RGLRU", "RecurrentBlock"},
    "rwkv7": {"Rwkv7TimeMixing"},
}
WITH_RECURRENCE = RECURRENT | {"rwkv7": RWKV7, "bailing_moe_linear": WITH_EXPERTS["bailing_moe_linear"]}


def recurrences_left(report: Report) -> set[str]:
    return {row.what for row in report.left if row.why == _left.RECURRENCE}


@pytest.mark.parametrize("name", WITH_RECURRENCE)
def test_recurrences_without_an_op_are_left(name: str):
    model = WITH_RECURRENCE[name].build()
    for options in ({}, {}, {"recurrence": False}):  # the second time it is patched already
        assert recurrences_left(mlx_anvil.patch(model, **options)) == WITHOUT_OP.get(name, set())


class LinearAttention(nn.Module):
    """A model's own layer, which calls the op itself."""

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        return mlx_anvil.gated_delta(*arrays)


def of_ssd(*arrays: mx.array) -> tuple[mx.array, ...]:
    return ssd_scan(*arrays)


class DeltaMixer(nn.Module):
    """The same by the op's name, in a function of its module."""

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        return of_ssd(*arrays)


class DeltaWithClass(nn.Module):
    """One whose method cannot be copied."""

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        class Inner:
            pass

        return gated_delta_update(*arrays)


class TimeMixing(nn.Module):
    """One that does not call the op, but has its name for something else."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.gated_delta(x)


@pytest.mark.parametrize(
    ("layer", "left"),
    [
        (LinearAttention, []),
        (DeltaMixer, []),
        (DeltaWithClass, [("gated_delta_update", "DeltaWithClass.__call__ defines a class")]),
        (TimeMixing, [("TimeMixing", _left.RECURRENCE)]),
    ],
)
def test_layers_of_a_users_own(layer: type[nn.Module], left: list[tuple[str, str]]):
    assert [(row.what, row.why) for row in mlx_anvil.patch(layer()).left] == left
