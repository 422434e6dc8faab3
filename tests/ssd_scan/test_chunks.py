"""Tests of ssd_scan by gated_delta's kernels for chunks of 64 steps, beside its definition."""

import mlx.core as mx
import pytest

import mlx_anvil
from support import kernel_names
from tests.gated_delta.cases import check_gradients_of_pairs
from tests.ssd_scan.cases import Case, check_gradients, check_results, draw

UNGATED = ("D", "state", "dt_bias")


def check(case: Case) -> list[str]:
    with mlx_anvil.trace() as trace:
        check_results(case)
        check_gradients(case)
    return [name for name in kernel_names(trace) if name.startswith("gated_delta_") and "_sum_" not in name]


@pytest.mark.parametrize("gpu", ["checked_simulator", "gpu_with_matrix_units", "group_products"])
@pytest.mark.parametrize("arrays", [UNGATED, ()], ids=["skip", "no skip"])
@pytest.mark.parametrize("steps", [17, 64, 130])
def test_steps(steps: int, arrays: tuple[str, ...], gpu: str, request: pytest.FixtureRequest):
    request.getfixturevalue(gpu)
    case = draw(steps, (1, 2), (64, 24), mx.bfloat16, batch=2, with_arrays=arrays)
    case.options["lengths"] = mx.array([steps, steps // 2])
    kernels = check(case)
    assert kernels
    assert all("_chunk_" in name for name in kernels)


@pytest.mark.usefixtures("group_products")
def test_heads_of_a_part():
    """With many chunks a threadgroup adds up the gradients of several heads."""
    case = draw(576, (1, 8), (64, 8), mx.bfloat16, batch=8, with_arrays=UNGATED)
    check_gradients_of_pairs(case.of_arrays, list(case.arrays.values()))


@pytest.mark.usefixtures("checked_simulator")
def test_calls_that_take_steps():
    """With a gate, or with few steps."""
    for case in (draw(17, (1, 2), (64, 8)), draw(16, (1, 2), (64, 8), with_arrays=UNGATED)):
        kernels = check(case)
        assert kernels
        assert not any("_chunk_" in name for name in kernels)
