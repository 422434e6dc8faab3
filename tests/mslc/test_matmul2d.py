"""matmul2d of MetalPerformancePrimitives: layout, products, tensors and what the simulator finds."""

import numpy as np
import pytest

from mlx_anvil.mslc import CHECKED, PROFILED, SimulationError
from tests.mslc.tensor_kernels import library, product_kernel, random, run_product, values

SHAPES = [(16, 32, 16), (32, 16, 16), (16, 16, 32), (32, 32, 32), (16, 32, 32)]
TYPES = [
    ("half", "half", "half"),
    ("half", "half", "float"),
    ("bfloat", "bfloat", "bfloat"),
    ("bfloat", "half", "float"),
    ("float", "float", "float"),
    ("half", "int8_t", "half"),
    ("int8_t", "int8_t", "int"),
]
TOLERANCE = {"half": 2e-3, "bfloat": 1e-2, "float": 1e-5, "int": 0}


def assert_close(actual, expected, kind):
    assert np.abs(actual - expected).max() <= TOLERANCE[kind] * np.abs(expected).max()


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_products_of_types(rng, types):
    assert_close(*run_product(rng, types, (16, 32, 16)), types[2])


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_shapes(rng, shape, transposed):
    assert_close(*run_product(rng, ("half", "half", "float"), shape, transposed), "float")


def test_multiply_forgets_the_destination(rng):
    assert_close(*run_product(rng, ("half", "half", "float"), (16, 32, 16), mode="multiply"), "float")


def test_relaxed_precision_keeps_ten_bits_of_a_float(rng):
    types = ("float", "float", "float")
    actual, expected = run_product(rng, types, (16, 32, 16), relaxed=True)
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert 2e-5 < error < 2e-3
    assert_close(*run_product(rng, ("half", "half", "float"), (16, 32, 16), relaxed=True), "float")


def mlx_place(lane, i):
    """(column, row) of element i of a lane in a 16 x 16 fragment: BaseNAXFrag::get_coord in MLX's nax.h."""
    quad = lane >> 2
    row = (quad & 4) | ((lane >> 1) & 3)
    return ((quad & 2) | (lane & 1)) * 4 + i % 4, row + (i >> 2) * 8


@pytest.mark.parametrize(
    ("operand", "transposed", "across"),
    [("left", False, (1, 1)), ("right", False, (2, 1)), ("right", True, (1, 2)), ("destination", False, (2, 1))],
)
def test_layout_is_that_of_mlx_fragments(operand, transposed, across):
    get = {
        "left": "op.get_left_input_cooperative_tensor<half, half, float>()",
        "right": "op.get_right_input_cooperative_tensor<half, half, float>()",
        "destination": "op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>()",
    }
    text = f"""
kernel void k(device int* places [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {{
  matmul2d<matmul2d_descriptor(16, 32, 16, false, {str(transposed).lower()}), execution_simdgroup> op;
  auto a = {get["left"]};
  auto b = {get["right"]};
  auto x = {get[operand]};
  for (ushort i = 0; i < x.get_capacity(); ++i) {{
    places[(lane * 16 + i) * 3] = x.is_valid_element(i);
    for (int j = 0; j < 2; ++j) places[(lane * 16 + i) * 3 + 1 + j] = x.get_multidimensional_index(i)[j];
  }}
}}"""
    places = np.zeros((32, 16, 3), np.int32)
    library(text).run("k", {0: places}, (1,), (32,))
    for lane in range(32):
        for i in range(8 * across[0] * across[1]):
            column, row = mlx_place(lane, i % 8)
            fragment = i // 8
            place = (1, column + 16 * (fragment % across[0]), row + 16 * (fragment // across[0]))
            assert tuple(places[lane, i]) == place, (lane, i)


TENSORS = """
using View = tensor<device {a}, dextents<int, 2>, tensor_inline>;
using Right = tensor<device {b}, dextents<int, 2>, tensor_inline>;
using Out = tensor<device {d}, dextents<int, 2>, tensor_inline>;
kernel void k(device {a}* as [[buffer(0)]], device {b}* bs [[buffer(1)]], device {d}* ds [[buffer(2)]],
              constant int& m [[buffer(3)]], constant int& n [[buffer(4)]], constant int& k [[buffer(5)]],
              constant int& ldd [[buffer(6)]]) {{
  matmul2d<matmul2d_descriptor(32, 48, {k}, {ta}, {tb}, false, matmul2d_descriptor::mode::{mode}),
           execution_simdgroup> op;
  View a(as, {ta} ? dextents<int, 2>(m, k) : dextents<int, 2>(k, m));
  Right b(bs, {tb} ? dextents<int, 2>(k, n) : dextents<int, 2>(n, k));
  Out d(ds, dextents<int, 2>(n, m), array<int, 2>{{1, ldd}});
  for (int y = 0; y < m; y += 32) {{
    for (int x = 0; x < n; x += 48) {{
      auto rows = {ta} ? a.slice(y, 0) : a.slice(0, y);
      auto columns = {tb} ? b.slice(0, x) : b.slice(x, 0);
      auto out = d.slice(x, y);
      op.run(rows, columns, out);
    }}
  }}
}}
"""


@pytest.mark.parametrize("mode", ["multiply", "multiply_accumulate"])
@pytest.mark.parametrize("transposed", [(False, False), (True, True)])
def test_tensors_of_odd_sizes_with_a_dynamic_inner_dimension(rng, transposed, mode):
    m, n, k = (int(x) for x in rng.integers(33, 90, 3))
    of_a, of_b = ((k, m), (n, k)) if transposed[0] else ((m, k), (k, n))
    a, b = random(rng, "half", of_a), random(rng, "bfloat", of_b)
    d = random(rng, "float", (m, n + 5))
    before = d.copy()
    ta, tb = (str(t).lower() for t in transposed)
    dynamic = "static_cast<int>(dynamic_extent)"
    kernels = library(TENSORS.format(a="half", b="bfloat", d="float", ta=ta, tb=tb, k=dynamic, mode=mode), CHECKED)
    kernels.run("k", {0: a, 1: b, 2: d, 3: m, 4: n, 5: k, 6: n + 5}, (1,), (32,))
    left, right = values(a, "half"), values(b, "bfloat")
    expected = (left.T if transposed[0] else left) @ (right.T if transposed[1] else right)
    assert_close(d[:, :n], expected + (before[:, :n] if mode == "multiply_accumulate" else 0), "float")
    np.testing.assert_array_equal(d[:, n:], before[:, n:])


PART = """
using View = tensor<device float, dextents<int, 2>, tensor_inline>;
kernel void k(device float* x [[buffer(0)]], device float* y [[buffer(1)]], constant int& column [[buffer(2)]]) {
  matmul2d<matmul2d_descriptor(16, 32, 16), execution_simdgroup> op;
  View from(x, dextents<int, 2>(45, 21)), to(y, dextents<int, 2>(40, 12));
  auto a = op.get_left_input_cooperative_tensor<float, float, float>();
  auto b = op.get_right_input_cooperative_tensor<float, float, float>();
  auto d = op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
  auto slice = from.slice<SIZES>(column, 3);
  d.load(slice);
  d.store(to);
}
"""


@pytest.mark.parametrize(("sizes", "column"), [("32, 16", 13), ("dynamic_extent, 16", 20), ("dynamic_extent, 9", 4)])
def test_a_load_is_zero_beyond_extents_and_a_store_stops_there(rng, sizes, column):
    x, y = rng.standard_normal((21, 45)).astype(np.float32), np.full((12, 40), 7, np.float32)
    library(PART.replace("SIZES", sizes), CHECKED).run("k", {0: x, 1: y, 2: column}, (1,), (32,))
    part = np.zeros((16, 32), np.float32)
    rows = int(sizes.split(",")[1])
    inside = x[3 : 3 + rows, column : column + 32]
    part[: inside.shape[0], : inside.shape[1]] = inside
    expected = np.full((12, 40), 7, np.float32)
    expected[:, :32] = part[:12]
    np.testing.assert_array_equal(y, expected)


def test_a_static_slice_beyond_its_tensor_is_found(rng):
    x, y = rng.standard_normal((21, 45)).astype(np.float32), np.zeros((12, 40), np.float32)
    with pytest.raises(SimulationError, match="a slice with static extents reaches beyond") as error:
        library(PART.replace("SIZES", "32, 16"), CHECKED).run("k", {0: x, 1: y, 2: 14}, (1,), (32,))
    found = error.value.findings[0]
    assert found.line == PART.split("\n").index("  d.load(slice);") + 6


def test_a_product_without_all_lanes_is_found(rng):
    text = product_kernel(("half", "half", "float"), (16, 32, 16))
    text = text.replace(
        "device float* ds [[buffer(2)]]", "device float* ds [[buffer(2)]], uint l [[thread_position_in_grid]]"
    )
    arguments = {0: random(rng, "half", (16, 16)), 1: random(rng, "half", (16, 32)), 2: random(rng, "float", (16, 32))}
    library(text, CHECKED).run("k", dict(arguments), (1,), (32,))
    with pytest.raises(SimulationError, match="matmul2d without all 32 lanes"):
        library(text.replace("op.run(", "if (l != 9) op.run("), CHECKED).run("k", dict(arguments), (1,), (32,))


def test_what_a_static_slice_has_beyond_its_tensor_is_implausible(rng):
    x, y = rng.standard_normal((21, 45)).astype(np.float32), np.zeros((12, 40), np.float32)
    library(PART.replace("SIZES", "32, 16")).run("k", {0: x, 1: y, 2: 14}, (1,), (32,))
    np.testing.assert_array_equal(y[:, :31], x[3:15, 14:45])
    assert np.isnan(y[:, 31]).all()


def test_an_element_that_a_lane_does_not_have_is_found(rng):
    text = product_kernel(("half", "half", "float"), (16, 32, 16)).replace("op.run(", "a[8] = half(0); op.run(")
    arguments = {0: random(rng, "half", (16, 16)), 1: random(rng, "half", (16, 32)), 2: random(rng, "float", (16, 32))}
    with pytest.raises(SimulationError, match="element 8 of a cooperative tensor that has 8 elements") as error:
        library(text).run("k", arguments, (1,), (32,))
    assert error.value.findings[0].line == next(i for i, t in enumerate(text.split("\n"), 5) if "a[8]" in t) + 1


def test_elements_that_were_never_set_are_implausible(rng):
    text = product_kernel(("half", "half", "float"), (16, 32, 16)).replace("i < b.get_capacity()", "i < 8")
    arguments = {0: random(rng, "half", (16, 16)), 1: random(rng, "half", (16, 32)), 2: random(rng, "float", (16, 32))}
    library(text).run("k", arguments, (1,), (32,))
    assert np.isfinite(arguments[2][:, :16]).all()
    assert np.isnan(arguments[2][:, 16:]).all()


def test_a_race_with_a_load_from_threadgroup_memory_is_found(rng):
    text = """
kernel void k(device float* x [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float part[16 * 32];
  for (uint i = t; i < 16 * 32; i += 64) part[i] = x[i];
  BARRIER
  matmul2d<matmul2d_descriptor(16, 32, 16), execution_simdgroup> op;
  auto a = op.get_left_input_cooperative_tensor<float, float, float>();
  auto b = op.get_right_input_cooperative_tensor<float, float, float>();
  auto d = op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
  tensor<threadgroup float, dextents<int, 2>, tensor_inline> from(part, dextents<int, 2>(32, 16));
  d.load(from);
  tensor<device float, dextents<int, 2>, tensor_inline> to(x + 512 + t / 32 * 512, dextents<int, 2>(32, 16));
  d.store(to);
}
"""
    x = rng.standard_normal(3 * 512).astype(np.float32)
    library(text.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);"), CHECKED).run(
        "k", {0: x}, (1,), (64,)
    )
    np.testing.assert_array_equal(x.reshape(3, 512)[1:], np.stack([x[:512]] * 2))
    with pytest.raises(SimulationError) as error:
        library(text.replace("BARRIER", ""), CHECKED).run("k", {0: x}, (1,), (64,), seed=3)
    assert {"threadgroup race", "uninitialised threadgroup memory"} & {f.kind for f in error.value.findings}


def test_a_profile_counts_its_work_in_products_of_8(rng):
    text = product_kernel(("half", "half", "float"), (16, 32, 16))
    arguments = {0: random(rng, "half", (16, 16)), 1: random(rng, "half", (16, 32)), 2: random(rng, "float", (16, 32))}
    report = library(text, PROFILED).run("k", arguments, (3,), (32,))
    assert report.profile.metrics()["matrix_multiplies"] == 3 * 2 * 4 * 2
