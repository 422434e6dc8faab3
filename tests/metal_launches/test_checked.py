"""Every kernel template of the Metal sources runs in the checked simulator, whatever the seed.

The seed draws the cases of CI's simulator stages, which may leave kernels out. The calls of tests/<op>/checked.py run
in every CI run. Each compares what it computes, and the kernels that they launch are counted here against those that
the Metal source of the op has: one that no call launches fails by name.

A template is a kernel's name without dtype, format of weights and head dims. Formats are counted by themselves.
"""

import re
from collections.abc import Iterable
from importlib import import_module

import pytest

import mlx_anvil
from checked_calls import Checked
from mlx_anvil import _ext
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.reference import DTYPES
from tests.metal_launches import ROOT
from tests.metal_launches.calls import OPS

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

FORMAT = re.compile(r"affine\d|mxfp\d|nvfp\d|i?q\d(0|k|nl|xs)")
# The head dims of a tile for decodes are followed by its rows, which tell templates apart.
SIZE = re.compile(r"d\d+v\d+|d\d+(?=r\d+$)|d\d+$|g\d+")


def counted(kernel: str) -> set[str]:
    """The template of a kernel, and the format of its weights if it has one."""
    dtypes = {str(dtype).removeprefix("mlx.core.") for dtype in DTYPES}
    words = [SIZE.sub("", word) for word in kernel.split("_") if word not in dtypes]
    formats = {word for word in words if FORMAT.fullmatch(word)}
    return {"_".join(word for word in words if word and word not in formats), *formats}


def missing(op: str, launched: Iterable[str]) -> list[str]:
    """Templates and formats that no launched kernel covers."""
    wanted = set().union(*map(counted, _ext._kernel_names(op)))
    return sorted(wanted.difference(*map(counted, launched)))


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("op", OPS)
def test_every_template_runs_checked(op, rng):
    calls: Iterable[Checked] = import_module(f"tests.{op}.checked").every_template(rng)
    launched = set()
    for call in calls:
        gpu = {"matrix_units": call.matrix_units, "group_products": call.group_products}
        with mlx_anvil.simulate(checked=True, **gpu), mlx_anvil.trace() as trace:
            call.run()
        launched |= {parse_key(event.kernel)[0] for event in trace.events if event.device == "simulator"}
    left_out = ", ".join(missing(op, launched))
    assert not left_out, f"no call of tests/{op}/checked.py launches {left_out}"


# ---- the count itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "counts"),
    [
        ("gated_gelu_tanh_jvp_float16_strided", {"gated_gelu_tanh_jvp_strided"}),
        ("rms_norm_backward_bfloat16_float32", {"rms_norm_backward"}),
        ("flash_attention_backward_dq_matrix_float16_d192v128", {"flash_attention_backward_dq_matrix"}),
        ("flash_attention_decode_float32_d128r4", {"flash_attention_decode_r4"}),
        ("quantized_gemv_float16_mxfp8_r2", {"quantized_gemv_r2", "mxfp8"}),
        ("quantized_gemv_matrix_float16_g64_n32s4", {"quantized_gemv_matrix_n32s4"}),
    ],
)
def test_what_a_kernel_counts_for(kernel, counts):
    assert counted(kernel) == counts


def test_what_is_missing_is_named():
    def without(op: str, *words: str) -> list[str]:
        names = _ext._kernel_names(op)
        left = [name for name in names if not set(words) <= set(name.split("_"))]
        assert len(left) < len(names)
        return missing(op, left)

    assert without("gated", "relu2", "jvp", "strided") == ["gated_relu2_jvp_strided"]
    assert without("quantized_matmul", "sum") == ["quantized_sum_parts"]
    assert without("quantized_embedding", "nvfp4") == ["nvfp4"]
    assert without("silu_gate", "float16") == []


def test_every_ci_run_has_them():
    """`pytest --rest` leaves out no slow test (tests/documentation/test_quick_run.py) but those with the marker
    `alike`, and cases of a function without the marker `every_case`."""
    marks = {mark.name for mark in [pytestmark, *test_every_template_runs_checked.pytestmark]}
    assert marks == {"cpu_only", "slow", "every_case", "parametrize"}
    assert re.search(r"^pytest --rest ", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
