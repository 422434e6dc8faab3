"""mlx_anvil.mslc.metal_kernel against pure MLX, and its generated text against MLX's own."""

import mlx.core as mx
import pytest

from mlx_anvil.mslc import CompileError, metal_kernel
from tests.mslc.custom_kernels import EXP_STRIDED, close, elementwise, normal, run, same

EXP = "uint elem = thread_position_in_grid.x;\nT tmp = inp[elem];\nout[elem] = metal::exp(tmp);\n"
DTYPES = [getattr(mx, f"{s}int{b}") for s in ("", "u") for b in (8, 16, 32, 64)]
DTYPES += [mx.bool_, mx.float16, mx.bfloat16, mx.float32, mx.complex64]


# ---- the examples of MLX's documentation


def test_exp(rng):
    kernel = metal_kernel("myexp", ["inp"], ["out"], EXP, simulate=True)
    a = normal(rng, (4, 16), mx.float16)
    out = run(kernel, [a], [(a.shape, a.dtype)], (a.size, 1, 1), (256, 1, 1), template=[("T", mx.float32)])
    close(out[0], mx.exp(a.astype(mx.float32)).astype(mx.float16), 1e-2)
    assert out[0].dtype == mx.float16


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a.T,
        lambda a: a[1:, 3:9:2],
        lambda a: mx.broadcast_to(a[:1], (5, 16)),
        lambda a: a[::-1, ::-2],
        lambda a: a.reshape(2, 2, 16).transpose(2, 0, 1),
    ],
    ids=["rows", "transposed", "slice", "broadcast", "reversed", "3d"],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_strided_input(rng, view, dtype):
    kernel = metal_kernel("myexp_strided", ["inp"], ["out"], EXP_STRIDED, ensure_row_contiguous=False, simulate=True)
    a = view(normal(rng, (4, 16), dtype))
    out = run(kernel, [a], [(a.shape, dtype)], (a.size, 1, 1), (256, 1, 1), template=[("T", mx.float32)])
    close(out[0], mx.exp(a.astype(mx.float32)).astype(dtype), 1e-6 if dtype == mx.float32 else 1e-2)


def test_row_contiguous_is_the_default(rng):
    a = normal(rng, (6, 5)).T
    same(elementwise("out[thread_position_in_grid.x] = in0[thread_position_in_grid.x];", [a]), a.flatten())
    strides = elementwise("uint i = thread_position_in_grid.x; out[i] = in0_strides[i];", [a], mx.int64, 2)
    assert strides.tolist() == [6, 1]


def test_strides_of_a_view(rng):
    kernel = metal_kernel(
        "strides",
        ["x"],
        ["out"],
        "for (int i = 0; i < x_ndim; ++i) { out[i] = x_shape[i]; out[x_ndim + i] = x_strides[i]; }",
        ensure_row_contiguous=False,
        simulate=True,
    )
    a = normal(rng, (6, 10))[::2, 1::3].T
    assert run(kernel, [a], [((4,), mx.int32)], (1, 1, 1))[0].tolist() == [3, 3, 3, 20]


# ---- every feature


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(rng, dtype):
    a = mx.array(rng.integers(0, 2 if dtype == mx.bool_ else 100, 37)).astype(dtype)
    same(elementwise("out[thread_position_in_grid.x] = in0[thread_position_in_grid.x];", [a], dtype), a)


def test_scalars_and_small_inputs(rng):
    a = normal(rng, (40,))
    source = "uint i = thread_position_in_grid.x; out[i] = in0[i] * in1 + in2[1] + (in3 ? float(in4) : 0.0f);"
    out = elementwise(source, [a, 2.5, mx.array([1.0, 7.0]), True, mx.array(3)])
    close(out, a * 2.5 + 7 + 3, 1e-6)


def test_template_arguments():
    source = "out[0] = sizeof(T); out[1] = N; out[2] = FLAG ? 1 : 0; out[3] = FLAG ? N / 2 : N;"
    template = [("T", mx.bfloat16), ("N", 7), ("FLAG", True)]
    assert elementwise(source, [mx.zeros(1)], mx.int32, 4, template=template).tolist() == [2, 7, 1, 3]
    template = [("T", mx.complex64), ("N", 5), ("FLAG", False)]
    assert elementwise(source, [mx.zeros(1)], mx.int32, 4, template=template).tolist() == [8, 5, 0, 5]


def test_attributes():
    """Each attribute that the body names is declared. The grid has three dimensions and partial last threadgroups."""
    source = """
        uint3 p = thread_position_in_grid;
        uint i = (p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x;
        uint3 q = threadgroup_position_in_grid * dispatch_threads_per_threadgroup + thread_position_in_threadgroup;
        bool right = all(p == q) && all(grid_size == threads_per_grid) && all(grid_origin == uint3(0));
        right = right && thread_index_in_simdgroup == thread_index_in_threadgroup % 32;
        right = right && simdgroup_index_in_threadgroup == thread_index_in_threadgroup / threads_per_simdgroup;
        right = right && thread_index_in_quadgroup == thread_index_in_threadgroup % 4;
        right = right && quadgroup_index_in_threadgroup == thread_index_in_threadgroup / 4;
        right = right && thread_execution_width == 32 && all(threadgroups_per_grid == uint3(3, 2, 2));
        right = right && dispatch_simdgroups_per_threadgroup == 1 && dispatch_quadgroups_per_threadgroup == 6;
        right = right && simdgroups_per_threadgroup == 1 && quadgroups_per_threadgroup <= 6;
        uint3 left = threads_per_grid - threadgroup_position_in_grid * dispatch_threads_per_threadgroup;
        right = right && all(threads_per_threadgroup == min(left, dispatch_threads_per_threadgroup));
        out[i] = right;
    """
    # The body's claim of 6 quadgroups is wrong: 2 x 3 x 2 threads are 3.
    for claim, holds in ((source, False), (source.replace("threadgroup == 6", "threadgroup == 3"), True)):
        kernel = metal_kernel("attributes", [], ["out"], claim, simulate=True)
        out = run(kernel, [], [((60,), mx.bool_)], (5, 4, 3), (2, 3, 2), init_value=not holds)[0]
        assert out.tolist() == [holds] * 60


def test_threadgroup_is_clipped_to_the_grid():
    source = "out[0] = threads_per_threadgroup.x; out[1] = dispatch_threads_per_threadgroup.y;"
    kernel = metal_kernel("clipped", [], ["out"], source, simulate=True)
    assert run(kernel, [], [((2,), mx.uint32)], (3, 1, 1), (64, 8, 1))[0].tolist() == [3, 1]


def test_header_and_helpers(rng):
    kernel = metal_kernel(
        "helper",
        ["a"],
        ["out"],
        "uint i = thread_position_in_grid.x;\nout[i] = squared(a[i]) + ceildiv(i, 4u);",
        header="template <typename T>\nT squared(T x) { return x * x; }\n",
        simulate=True,
    )
    a = normal(rng, (9,))
    close(run(kernel, [a], [((9,), mx.float32)], (9, 1, 1))[0], a * a + mx.ceil(mx.arange(9) / 4), 1e-6)


def test_atomic_outputs_and_init_value():
    source = "atomic_fetch_add_explicit(&sums[thread_position_in_grid.x % 3], 1, memory_order_relaxed);"
    kernel = metal_kernel("count", [], ["sums"], source, atomic_outputs=True, simulate=True)
    assert run(kernel, [], [((4,), mx.int32)], (100, 1, 1), init_value=5)[0].tolist() == [39, 38, 38, 5]
    assert run(kernel, [], [((4,), mx.float32)], (100, 1, 1), init_value=0.5)[0].tolist() == [34.5, 33.5, 33.5, 0.5]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int8, mx.bool_], ids=str)
def test_init_value_has_the_dtype_of_the_output(dtype):
    kernel = metal_kernel("nothing", [], ["out"], "if (false) out[0] = 0;", simulate=True)
    same(run(kernel, [], [((2, 3), dtype)], (1, 1, 1), init_value=1)[0], mx.ones((2, 3), dtype))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32, mx.complex64], ids=str)
def test_unwritten_outputs_are_nan(dtype):
    kernel = metal_kernel("half_of_it", [], ["out"], "out[thread_position_in_grid.x] = 1;", simulate=True)
    out = run(kernel, [], [((8,), dtype)], (4, 1, 1))[0]
    assert mx.isnan(out).tolist() == [False] * 4 + [True] * 4


def test_several_outputs_and_two_dimensional_shapes(rng):
    source = "uint i = thread_position_in_grid.x; twice[i] = 2 * in0[i]; whole[i] = int(in0[i]);"
    kernel = metal_kernel("pair", ["in0"], ["twice", "whole"], source, simulate=True)
    a = normal(rng, (3, 4)) * 10
    twice, whole = run(kernel, [a], [((4, 3), mx.float32), ((12,), mx.int32)], (12, 1, 1))
    same(twice, (2 * a).reshape(4, 3))
    same(whole, a.flatten().astype(mx.int32))


def test_inputs_are_evaluated_and_left_alone(rng):
    a = normal(rng, (16,))
    lazy = mx.exp(a) + 1
    same(elementwise("uint i = thread_position_in_grid.x; out[i] = in0[i];", [lazy]), mx.exp(a) + 1)
    same(lazy, mx.exp(a) + 1)


def test_the_same_kernel_takes_other_dtypes_and_shapes(rng):
    source = "uint i = thread_position_in_grid.x; out[i] = inp[i] + inp[i];"
    kernel = metal_kernel("mixed", ["inp"], ["out"], source, simulate=True)
    for dtype, count in ((mx.float16, 32), (mx.float32, 32), (mx.float32, 5)):
        a = normal(rng, (count,), dtype)
        same(run(kernel, [a], [((count,), dtype)], (count, 1, 1))[0], a + a)


def test_math_mode_is_visible():
    source = "#if defined(__FAST_MATH__) && __FAST_MATH__\nout[0] = 1;\n#else\nout[0] = 0;\n#endif"
    for mode, expected in (("safe", 0), ("relaxed", 0), ("fast", 1)):
        kernel = metal_kernel("mode", [], ["out"], source, compile_options={"math_mode": mode}, simulate=True)
        assert run(kernel, [], [((1,), mx.int32)], (1, 1, 1))[0].item() == expected


def test_empty_grid_and_empty_arrays():
    kernel = metal_kernel("empty", ["x"], ["out"], "out[thread_position_in_grid.x] = x[0];", simulate=True)
    out = run(kernel, [mx.zeros((0, 3))], [((0,), mx.float32)], (0, 1, 1))[0]
    assert out.shape == (0,)


def test_seed_shuffles_without_changing_results(rng):
    source = "out[thread_position_in_grid.x] = simd_sum(in0[thread_position_in_grid.x]);"
    a = normal(rng, (64,))
    outputs = []
    for seed in range(3):
        kernel = metal_kernel("sum", ["in0"], ["out"], source, simulate=True, seed=seed)
        outputs.append(run(kernel, [a], [((64,), mx.float32)], (64, 1, 1), (64, 1, 1))[0])
    same(outputs[0], outputs[1])
    same(outputs[0], outputs[2])
    assert kernel.report.collectives == 2


# ---- the text that MLX would compile


@pytest.mark.parametrize(
    ("inputs", "outputs", "source", "options"),
    [
        ([(3, 5), (), (2,)], [mx.float32], "out0[0] = in0[0] + in1 + in2[0] * thread_position_in_grid.x;", {}),
        (
            [(3, 5), (4, 4)],
            [mx.float32, mx.bfloat16],
            "out0[0] = in0[in0_strides[0]]; out1[in1_shape[0] + in1_ndim] = thread_index_in_simdgroup;",
            {"template": [("T", mx.float16), ("N", 3), ("B", False)]},
        ),
        ([(9,)], [mx.int64], "out0[0] = 1; // threads_per_grid threads_per_threadgroup simdgroups_per_threadgroup", {}),
        ([(9,)], [mx.uint8], "out0[0] = in0[0];", {"header": "inline int f() { return 1; }\n"}),
    ],
)
@pytest.mark.parametrize("atomic", [False, True])
def test_generated_text_is_that_of_mlx(inputs, outputs, source, options, atomic, tmp_path, capfd):
    """MLX writes the kernel that it exports without needing Metal, and prints it."""
    header = options.get("header", "")
    names = [f"in{i}" for i in range(len(inputs))], [f"out{i}" for i in range(len(outputs))]
    arrays = [mx.ones(shape) for shape in inputs]
    call = {
        "output_shapes": [(4,)] * len(outputs),
        "output_dtypes": outputs,
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
        "template": options.get("template"),
        "verbose": True,
    }
    theirs = mx.fast.metal_kernel("k", *names, source, header=header, atomic_outputs=atomic)
    mx.export_function(str(tmp_path / "k.mlxfn"), lambda *a: theirs(inputs=list(a), **call), *arrays)
    expected = capfd.readouterr().out
    ours = metal_kernel("k", *names, source, header=header, atomic_outputs=atomic, simulate=True)
    try:
        ours(inputs=arrays, **call)
    except CompileError:
        assert atomic, "only the body's plain assignments to atomics may not compile"
    assert capfd.readouterr().out == expected
    assert "custom_kernel_k" in expected


def test_metal_is_used_where_it_is(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    kernel = metal_kernel("real", ["x"], ["out"], "out[0] = x[0];")
    assert type(kernel) is type(mx.fast.metal_kernel("real", ["x"], ["out"], "out[0] = x[0];"))
    assert type(metal_kernel("real", ["x"], ["out"], "out[0] = x[0];", simulate=True)) is not type(kernel)


# ---- no derivative ---------------------------------------------------------------------------------------------------


def doubled(x: mx.array) -> mx.array:
    kernel = metal_kernel(
        "doubled", ["x"], ["out"], "uint i = thread_position_in_grid.x; out[i] = 2 * x[i];", simulate=True
    )
    return run(kernel, [x], [(x.shape, x.dtype)], (x.size, 1, 1))[0]


@pytest.mark.parametrize(
    "derivative",
    [
        lambda x: mx.grad(lambda a: doubled(a).sum())(x),
        lambda x: mx.value_and_grad(lambda a: (a * doubled(a)).sum())(x),
        lambda x: mx.vjp(doubled, [x], [x]),
        lambda x: mx.jvp(doubled, [x], [x]),
        lambda x: mx.grad(lambda a: mx.checkpoint(doubled)(a).sum())(x),
    ],
)
def test_derivatives_raise(rng, derivative):
    with pytest.raises(
        ValueError, match=r"^\[metal_kernel\] mx\.(vjp|jvp) of `doubled`: a kernel has no derivative; allowed: "
    ):
        mx.eval(derivative(normal(rng, (5,))))


def test_derivative_where_none_is_needed(rng):
    x = normal(rng, (5,))
    same(mx.grad(lambda a: (a * doubled(mx.stop_gradient(a))).sum())(x), 2 * x)
    y = normal(rng, (5,))
    same(mx.grad(lambda a: (a * doubled(y)).sum())(x), 2 * y)


def test_derivative_of_ones_own(rng):
    @mx.custom_function
    def function(x):
        return doubled(x)

    @function.vjp
    def _(x, cotangent, output):
        return doubled(cotangent)

    x = normal(rng, (5,))
    same(mx.grad(lambda a: (function(a) * x).sum())(x), 2 * x)


@pytest.mark.parametrize(
    "options", [{"checked": 1}, {"profiled": "yes"}, {"simulate": 1}, {"seed": "a"}, {"seed": True}, {"seed": 1.5}]
)
def test_switches_of_the_wrong_type(options):
    (name,) = options
    with pytest.raises(TypeError, match=rf"^\[metal_kernel\] `{name}` is a \w+; allowed: a"):
        metal_kernel("k", ["x"], ["out"], "out[0] = x[0];", **{"simulate": True, **options})


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=rf"^\[metal_kernel\] `seed` is {seed}; allowed: a 64-bit unsigned integer"):
        metal_kernel("k", ["x"], ["out"], "out[0] = x[0];", simulate=True, seed=seed)
