"""The host and the Metal source fit: every kernel that it asks for exists, and takes what it is given.

Calls of every op are recorded (tests/metal_launches), down to each array that is bound, and compared with what mslc
reads in the source that the extension embeds. On a Mac a mistake here would show as a missing kernel, or as wrong
numbers.
"""

import json
from dataclasses import replace
from functools import cache

import pytest

from metal_support import kernels_for_apple
from mlx_anvil import _ext
from mlx_anvil._kernel_files import parse_key
from mlx_anvil.mslc.preprocess import Source
from tests.metal_launches import ROOT, output_of
from tests.metal_launches.calls import CALLS
from tests.metal_launches.compare import Interface, constant_misfits, misfits
from tests.metal_launches.record import Launch

pytestmark = pytest.mark.cpu_only
CUBINS = ROOT / "tools" / "cubins.txt"


@cache
def launches_of(op: str) -> tuple[Launch, ...]:
    launches = [Launch(**fields) for fields in json.loads(output_of("record", op))]
    for launch in launches:
        launch.constants = {int(index): value for index, value in launch.constants.items()}
    return tuple(launches)


@cache
def interface_of(op: str) -> Interface:
    return Interface.of(Source(text=_ext._op_source(op), name=f"metal/{op}"))


@pytest.mark.every_case
@pytest.mark.parametrize("op", CALLS, scope="module")  # one op after the other: a worker records its calls once
def test_host_and_kernels_fit(op):
    assert misfits(interface_of(op), launches_of(op)) == []


@pytest.mark.every_case
@pytest.mark.parametrize("op", CALLS, scope="module")  # one op after the other: a worker records its calls once
def test_a_mac_has_what_it_launches(op):
    """A Mac's build has exactly the kernels that it launches: those for matrix units are left out."""
    launched = {launch.kernel for launch in launches_of(op) if not launch.for_matrix_units}
    assert launched == kernels_for_apple() & set(_ext._kernel_names(op))


# ---- tools/cubins.txt ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cubins_are_of_what_models_launch():
    launched = output_of("models")
    assert launched == CUBINS.read_text(), (
        "the list is another now; python -m tests.metal_launches.models > tools/cubins.txt"
    )


def test_listed_kernels_exist():
    keys = [line.partition("/") for line in CUBINS.read_text().splitlines() if not line.startswith("#")]
    assert {op for op, _, _ in keys} == set(CALLS)
    for op, _, key in keys:
        name, constants = parse_key(key)
        assert list(constant_misfits(interface_of(op), interface_of(op).kernels[name], constants)) == [], key


# ---- mistakes, made on purpose, are named ----------------------------------------------------------------------------


def forward() -> Launch:
    return next(x for x in launches_of("silu_gate") if x.kernel == "silu_gate_forward_float16_flat")


def found_with(wrong: Launch) -> list[str]:
    others = [x for x in launches_of("silu_gate") if x.kernel != "silu_gate_forward_float16_flat"]
    return misfits(interface_of("silu_gate"), [*others, wrong])


def test_misspelt_kernel():
    assert found_with(replace(forward(), kernel="silu_gate_foward_float16_flat")) == [
        "silu_gate: the host asks for silu_gate_foward_float16_flat, which the Metal source does not have",
        "silu_gate_forward_float16_flat: no call of the host asks for it",
    ]


@pytest.mark.parametrize(
    ("bindings", "complaint"),
    [
        (
            ("float16 in", "float16 in", "float16 in", "float16 out", "params 336"),
            "has bindings 0 to 3; the host binds 0 to 4",
        ),
        (("float16 in", "float16 in", "params 336"), "has bindings 0 to 3; the host binds 0 to 2"),
        (
            ("float16 in", "float16 out", "float16 in", "params 336"),
            "buffer(1) is 'const device T * up'; the host binds 'float16 out'",
        ),
        (
            ("float32 in", "float16 in", "float16 out", "params 336"),
            "buffer(0) is 'const device T * gate'; the host binds 'float32 in'",
        ),
        (
            ("float16 in", "float16 in", "float16 out", "params 336", "threadgroup 64"),
            "takes 0 blocks of threadgroup memory; the host gives 1",
        ),
    ],
)
def test_wrong_bindings(bindings, complaint):
    found = found_with(replace(forward(), bindings=bindings))
    assert f"silu_gate_forward_float16_flat: {complaint}" in found


def test_wrong_layout_of_params():
    found = found_with(replace(forward(), bindings=(*forward().bindings[:-1], "params 332")))
    assert len(found) == 1
    assert "params: the host gives ElementwiseParams 332 bytes" in found[0]


def test_too_many_threads():
    found = found_with(replace(forward(), threads=512))
    assert len(found) == 1
    expected = "silu_gate_forward_float16_flat: the host launches 512 threads per threadgroup, more than it allows"
    assert expected in found[0]


@pytest.mark.parametrize(
    ("constants", "complaint"),
    [
        ({}, "needs function constant 0 (packs_are_aligned), which the host does not give"),
        ({0: True, 7: True}, "function constant 7 is none in the source, bool to the host"),
    ],
)
def test_wrong_function_constants(constants, complaint):
    assert found_with(replace(forward(), constants=constants)) == [f"silu_gate_forward_float16_flat: {complaint}"]
