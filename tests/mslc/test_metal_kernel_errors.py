"""mlx_anvil.mslc.metal_kernel: what it refuses, what a wrong kernel raises, checks and profiles."""

import mlx.core as mx
import pytest

from mlx_anvil.mslc import CompileError, SimulationError, metal_kernel
from tests.mslc.custom_kernels import EXP_STRIDED, close, elementwise, normal, run


def test_sizes_are_checked():
    kernel = metal_kernel("sizes", ["a", "b"], ["out"], "out[0] = a[0];", simulate=True)
    with pytest.raises(ValueError, match=r"\[metal_kernel\] Expected `inputs` to have size 2 but got size 1"):
        run(kernel, [mx.zeros(8)], [((1,), mx.float32)], (1, 1, 1))
    with pytest.raises(ValueError, match=r"\[metal_kernel\] Expected `output_shapes` to have size 1 but got size 2"):
        run(kernel, [mx.zeros(8)] * 2, [((1,), mx.float32)] * 2, (1, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"grid": (4, 1)}, TypeError, "`grid` must be a tuple of three ints"),
        ({"grid": (4.5, 1, 1)}, TypeError, "`grid` must be a tuple of three ints"),
        ({"grid": (-1, 1, 1)}, ValueError, "must not be negative"),
        ({"threadgroup": (1025, 1, 1)}, ValueError, r"Thread group size \(1025\) is greater than the maximum"),
        ({"threadgroup": (0, 1, 1)}, ValueError, "`threadgroup` must not be empty"),
        (
            {"template": [("T", 1.5)]},
            ValueError,
            "Invalid template argument. Must be `mlx.core.Dtype`, `int` or `bool`",
        ),
        ({"template": [("T", 2**31)]}, ValueError, "does not fit an `int`"),
        ({"template": [("N", -1)]}, ValueError, "is negative, which MLX cannot compile"),
        ({"template": [("T", mx.float64)]}, ValueError, "float64 is not supported on the GPU"),
        ({"output_dtypes": [mx.float64]}, ValueError, "float64 is not supported on the GPU"),
    ],
)
def test_bad_calls(arguments, error, message):
    kernel = metal_kernel("bad", [], ["out"], "out[0] = 0;", simulate=True)
    call = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], "grid": (2000, 1, 1), "threadgroup": (1, 1, 1)}
    with pytest.raises(error, match=r"\[metal_kernel\] .*" + message):
        kernel(inputs=[], **{**call, **arguments})


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap])
def test_transformations_that_have_no_values(transform, rng):
    a = normal(rng, (4, 4))
    with pytest.raises(ValueError, match=r"\[metal_kernel\] The simulator needs values"):
        transform(lambda x: elementwise("uint i = thread_position_in_grid.x; out[i] = in0[i];", [x]))(a)


def test_bad_definitions_have_the_words_of_mlx():
    for arguments in (
        {"output_names": []},
        {"compile_options": 3},
        {"compile_options": {"x": 1}},
        {"compile_options": {"math_mode": "precise"}},
    ):
        call = {"name": "k", "input_names": [], "output_names": ["out"], "source": "", **arguments}
        with pytest.raises(ValueError, match=r"^\[metal_kernel\]") as theirs:
            mx.fast.metal_kernel(**call)
        with pytest.raises(ValueError, match=r"^\[metal_kernel\]") as ours:
            metal_kernel(**call, simulate=True)
        assert str(ours.value) == str(theirs.value)


def test_compile_errors_name_the_authors_string():
    header = "inline float f(float x) {\n  return undefined_name;\n}\n"
    kernel = metal_kernel("broken", ["x"], ["out"], "float a = 1;\nout[0] = f(mistyped);", header, simulate=True)
    with pytest.raises(CompileError) as caught:
        run(kernel, [mx.zeros(8)], [((1,), mx.float32)], (1, 1, 1))
    places = [(d.file, d.line, d.column) for d in caught.value.diagnostics]
    assert places == [("broken[header]", 2, 10), ("broken[source]", 2, 12)]
    assert "out[0] = f(mistyped);" in str(caught.value)


def test_a_failed_launch_names_the_line_of_the_body():
    source = "if (thread_position_in_grid.x < 3)\n  threadgroup_barrier(mem_flags::mem_threadgroup);\nout[0] = 1;"
    kernel = metal_kernel("divergent", [], ["out"], source, simulate=True)
    with pytest.raises(SimulationError) as caught:
        run(kernel, [], [((1,), mx.int32)], (64, 1, 1), (64, 1, 1))
    (finding,) = caught.value.findings
    assert (finding.kind, finding.file, finding.line) == ("barrier divergence", "divergent[source]", 2)


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("uint i = thread_position_in_grid.x;\nout[i + 1] = x[i];", "device out of bounds", 2),
        (
            "threadgroup float t[64];\nuint i = thread_position_in_threadgroup.x;\nt[i] = x[i];\nout[i] = t[63 - i];",
            "threadgroup race",
            4,
        ),
    ],
)
def test_checked(source, kind, line):
    kernel = metal_kernel("wrong", ["x"], ["out"], source, simulate=True, checked=True)
    with pytest.raises(SimulationError) as caught:
        run(kernel, [mx.arange(64).astype(mx.float32)], [((64,), mx.float32)], (64, 1, 1), (64, 1, 1))
    assert (kind, "wrong[source]") in [(f.kind, f.file) for f in caught.value.findings]
    assert line in [f.line for f in caught.value.findings]


def test_checked_strided_inputs(rng):
    kernel = metal_kernel(
        "myexp", ["inp"], ["out"], EXP_STRIDED, ensure_row_contiguous=False, simulate=True, checked=True
    )
    a = normal(rng, (4, 16))
    for view in (a[1:, 3:9:2], a.T, a[::-1, ::-2], mx.broadcast_to(a[:1], (5, 16))):
        out = run(kernel, [view], [(view.shape, mx.float32)], (view.size, 1, 1), template=[("T", mx.float32)])
        close(out[0], mx.exp(view), 1e-6)


def test_profiled():
    source = "uint i = thread_position_in_grid.x;\nout[i] = exp(x[8 * i]);"
    kernel = metal_kernel("scattered", ["x"], ["out"], source, simulate=True, profiled=True)
    run(kernel, [mx.zeros(256)], [((32,), mx.float32)], (32, 1, 1))
    profile = kernel.report.profile
    assert profile.metrics()["transcendentals"] == 32
    assert [(s.file, s.line, s.kind, s.transactions) for s in profile.sites] == [
        ("scattered[source]", 2, "read", 8),
        ("scattered[source]", 2, "write", 1),
    ]
    with pytest.raises(ValueError, match=r"\[metal_kernel\] A kernel is either checked or profiled"):
        metal_kernel("both", ["x"], ["out"], source, simulate=True, profiled=True, checked=True)
