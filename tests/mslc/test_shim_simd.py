"""Every function of <metal_simdgroup> and <metal_quadgroup>, matrices and atomics, against NumPy."""

import numpy as np
import pytest

from tests.mslc.msl import METAL_TYPES, evaluate, from_bfloat, library, to_bfloat

LANE = np.arange(32)
QUAD = LANE // 4 * 4


# For every call, the lane that each lane's result comes from.
SHUFFLES = {
    "simd_shuffle(a, (lane * 7 + 3) % 32)": (LANE * 7 + 3) % 32,
    "simd_broadcast(a, 5)": 0 * LANE + 5,
    "simd_broadcast_first(a)": 0 * LANE,
    "simd_shuffle_xor(a, 13)": LANE ^ 13,
    "simd_shuffle_down(a, 5)": np.where(LANE + 5 < 32, LANE + 5, LANE),
    "simd_shuffle_up(a, 5)": np.where(LANE >= 5, LANE - 5, LANE),
    "simd_shuffle_rotate_down(a, 5)": (LANE + 5) % 32,
    "simd_shuffle_rotate_up(a, 5)": (LANE - 5) % 32,
    "quad_shuffle(a, (lane + 1) % 4)": QUAD + (LANE + 1) % 4,
    "quad_broadcast(a, 2)": QUAD + 2,
    "quad_broadcast_first(a)": QUAD,
    "quad_shuffle_xor(a, 3)": LANE ^ 3,
    "quad_shuffle_down(a, 1)": np.where(LANE % 4 < 3, LANE + 1, LANE),
    "quad_shuffle_up(a, 1)": np.where(LANE % 4 > 0, LANE - 1, LANE),
    "quad_shuffle_rotate_down(a, 1)": QUAD + (LANE + 1) % 4,
    "quad_shuffle_rotate_up(a, 1)": QUAD + (LANE - 1) % 4,
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint16", "int8", "int64"])
@pytest.mark.parametrize("call", SHUFFLES)
def test_shuffles(rng, call, dtype):
    x = (rng.standard_normal(32) * 50).astype(dtype)
    np.testing.assert_array_equal(evaluate(call, x, out=dtype), x[SHUFFLES[call]])


def test_shuffle_of_vectors_and_bool(rng):
    x = rng.standard_normal((32, 4)).astype(np.float32)
    actual = evaluate("simd_shuffle_xor(a, 9)", x, out="float32:float4:4", types=("float4",))
    np.testing.assert_array_equal(actual, x[LANE ^ 9])
    flags = rng.random(32) < 0.5
    np.testing.assert_array_equal(evaluate("simd_shuffle_xor(a, 9)", flags, out="bool"), flags[LANE ^ 9])


@pytest.mark.parametrize("modulo", [4, 8, 32])
@pytest.mark.parametrize("delta", [0, 1, 3])
def test_shuffle_and_fill(rng, delta, modulo):
    x, fill = (rng.standard_normal(32).astype(np.float32) for _ in range(2))
    position, base = LANE % modulo, LANE // modulo * modulo
    down = np.where(position + delta < modulo, x[(LANE + delta) % 32], fill[base + (position + delta) % modulo])
    up = np.where(position >= delta, x[LANE - delta], fill[base + (position - delta) % modulo])
    for prefix in ("simd", "quad")[: 2 if modulo == 4 else 1]:
        tail = f"{delta}, {modulo}"
        np.testing.assert_array_equal(
            evaluate(f"{prefix}_shuffle_and_fill_down(a, b, {tail})", x, fill, out="float32"), down
        )
        np.testing.assert_array_equal(
            evaluate(f"{prefix}_shuffle_and_fill_up(a, b, {tail})", x, fill, out="float32"), up
        )


def fold(operation, x, width):
    groups = x.reshape(-1, width)
    total = groups[:, 0].copy()
    for i in range(1, width):
        total = operation(total, groups[:, i]).astype(x.dtype)
    return total.repeat(width)


@pytest.mark.parametrize(("prefix", "width"), [("simd", 32), ("quad", 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint32", "int16", "uint8", "int64"])
@pytest.mark.parametrize(
    ("name", "operation"), [("sum", np.add), ("product", np.multiply), ("max", np.maximum), ("min", np.minimum)]
)
def test_reductions(rng, prefix, width, name, operation, dtype):
    x = rng.uniform(0.8, 1.2, 32).astype(dtype) if np.dtype(dtype).kind == "f" else rng.integers(1, 5, 32).astype(dtype)
    expected = fold(operation, x, width)
    np.testing.assert_array_equal(evaluate(f"{prefix}_{name}(a)", x, out=dtype), expected)
    if name in ("sum", "product"):
        for kind in ("inclusive", "exclusive"):
            groups = x.reshape(-1, width)
            scanned = np.empty_like(groups)
            total = np.full(len(groups), int(name == "product"), dtype)
            for i in range(width):
                if kind == "exclusive":
                    scanned[:, i] = total
                total = operation(total, groups[:, i]).astype(dtype)
                if kind == "inclusive":
                    scanned[:, i] = total
            actual = evaluate(f"{prefix}_prefix_{kind}_{name}(a)", x, out=dtype)
            np.testing.assert_array_equal(actual, scanned.ravel())


@pytest.mark.parametrize(("prefix", "width"), [("simd", 32), ("quad", 4)])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint64"])
@pytest.mark.parametrize(
    ("name", "operation"), [("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)]
)
def test_bit_reductions(rng, prefix, width, name, operation, dtype):
    x = rng.integers(0, 127, 32).astype(dtype)
    np.testing.assert_array_equal(evaluate(f"{prefix}_{name}(a)", x, out=dtype), fold(operation, x, width))


def test_votes(rng):
    for x in (rng.random(32) < 0.5, np.ones(32, bool), np.zeros(32, bool)):
        bits = sum(1 << i for i in range(32) if x[i])
        np.testing.assert_array_equal(evaluate("ulong(simd_ballot(a))", x, out="uint64"), bits)
        np.testing.assert_array_equal(evaluate("simd_any(a)", x, out="bool"), x.any())
        np.testing.assert_array_equal(evaluate("simd_all(a)", x, out="bool"), x.all())
        np.testing.assert_array_equal(evaluate("ulong(simd_active_threads_mask())", x, out="uint64"), 0xFFFFFFFF)
        np.testing.assert_array_equal(evaluate("simd_is_first()", x, out="bool"), LANE == 0)
        quads = x.reshape(8, 4)
        ballots = (quads * [1, 2, 4, 8]).sum(1).repeat(4)
        np.testing.assert_array_equal(evaluate("ulong(quad_ballot(a))", x, out="uint64"), ballots)
        np.testing.assert_array_equal(evaluate("quad_any(a)", x, out="bool"), quads.any(1).repeat(4))
        np.testing.assert_array_equal(evaluate("quad_all(a)", x, out="bool"), quads.all(1).repeat(4))
        np.testing.assert_array_equal(evaluate("ulong(quad_active_threads_mask())", x, out="uint64"), 15)
        np.testing.assert_array_equal(evaluate("quad_is_first()", x, out="bool"), LANE % 4 == 0)


def test_vote_types_and_helper_threads(rng):
    for x in (rng.random(32) < 0.5, np.ones(32, bool), np.zeros(32, bool)):
        np.testing.assert_array_equal(evaluate("simd_ballot(a).any()", x, out="bool"), x.any())
        np.testing.assert_array_equal(evaluate("simd_ballot(a).all()", x, out="bool"), x.all())
        quads = x.reshape(8, 4)
        np.testing.assert_array_equal(evaluate("quad_ballot(a).any()", x, out="bool"), quads.any(1).repeat(4))
        np.testing.assert_array_equal(evaluate("quad_ballot(a).all()", x, out="bool"), quads.all(1).repeat(4))
        # Votes of lanes that a group does not have are dropped.
        votes = "ulong(simd_vote(~0ul)) == 0xffffffffu && ulong(quad_vote(quad_vote::vote_t(0xf5))) == 5"
        assert evaluate(f"{votes} && !simd_is_helper_thread() && !quad_is_helper_thread()", x, out="bool").all()
    # all() of a vote asks for every lane that exists; simd_all only for the active ones.
    part = evaluate("simd_all(true) && !simd_ballot(true).all()", np.ones(20, bool), out="bool")
    assert part.all()


def test_part_of_a_simdgroup_reduces_over_the_lanes_that_exist(rng):
    x = rng.integers(0, 9, 41).astype(np.int32)
    expected = np.append(np.full(32, x[:32].sum()), np.full(9, x[32:].sum()))
    np.testing.assert_array_equal(evaluate("simd_sum(a)", x, out="int32"), expected)


MATRIX = """
template <typename A, typename B, typename C, typename D>
kernel void product(const device A* a [[buffer(0)]], const device B* b [[buffer(1)]], const device C* c [[buffer(2)]],
                    device D* d [[buffer(3)]], device D* t [[buffer(4)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup D kept[8 * 9];
  simdgroup_matrix<A, 8, 8> ma; simdgroup_matrix<B, 8, 8> mb; simdgroup_matrix<C, 8, 8> mc; simdgroup_matrix<D, 8, 8> md;
  simdgroup_load(ma, a, 24, ulong2(8, 1));
  simdgroup_load(mb, b, 8, ulong2(0, 0), true);
  simdgroup_load(mc, c);
  simdgroup_multiply_accumulate(md, ma, mb, mc);
  simdgroup_store(md, d);
  simdgroup_store(md, kept, 9, ulong2(0, 0), true);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < 64; i += 32) t[i] = kept[i / 8 * 9 + i % 8];
}
template [[host_name("k")]] [[kernel]] decltype(product<A_, B_, C_, D_>) product<A_, B_, C_, D_>;
"""


@pytest.mark.parametrize(
    "types",
    [
        ("float",) * 4,
        ("half",) * 4,
        ("bfloat",) * 4,
        ("half", "half", "float", "float"),
        ("bfloat", "bfloat", "float", "float"),
        ("half", "float", "float", "float"),
        ("float", "float", "float", "half"),
    ],
)
def test_matrix_products(rng, types):
    dtypes = {"float": np.float32, "half": np.float16, "bfloat": np.uint16}

    def encode(values, kind):
        return to_bfloat(values) if kind == "bfloat" else values.astype(dtypes[kind])

    def decode(values, kind):
        return (from_bfloat(values) if kind == "bfloat" else values).astype(np.float64)

    a, b, c = (encode(rng.standard_normal(s), t) for s, t in zip(((9, 24), (8, 8), (8, 8)), types, strict=False))
    d, t = (np.zeros((8, 8), dtypes[types[3]]) for _ in range(2))
    source = MATRIX
    for letter, kind in zip("ABCD", types, strict=True):
        source = source.replace(f"{letter}_", kind)
    for seed in (0, 3):
        library(source).run("k", {0: a, 1: b, 2: c, 3: d, 4: t}, (1,), (32,), seed=seed)
        reference = decode(a, types[0])[1:, 8:16] @ decode(b, types[1]).T + decode(c, types[2])
        bound = {"float": 2e-6, "half": 6e-4, "bfloat": 5e-3}[types[3]] * np.abs(reference).max()
        np.testing.assert_allclose(decode(d, types[3]), reference, rtol=0, atol=bound)
        np.testing.assert_array_equal(d.T, t)


def test_matrix_layout_is_apples():
    source = """kernel void k(device float* o [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 m, filled = make_filled_simdgroup_matrix<float, 8, 8>(3), diagonal = simdgroup_float8x8(2);
  m.thread_elements()[0] = 2 * lane;
  m.thread_elements()[1] = 2 * lane + 1;
  simdgroup_store(m, o);
  simdgroup_store(filled, o + 64);
  simdgroup_store(diagonal, o + 128);
}"""
    out = np.zeros((3, 8, 8), np.float32)
    library(source).run("k", {0: out}, (1,), (32,))
    quad = LANE // 4
    row, column = (quad & 4) + LANE // 2 % 4, (quad & 2) * 2 + LANE % 2 * 2
    expected = np.zeros((8, 8))
    expected[row, column], expected[row, column + 1] = 2 * LANE, 2 * LANE + 1
    np.testing.assert_array_equal(out[0], expected)
    np.testing.assert_array_equal(out[1], 3)
    np.testing.assert_array_equal(out[2], 2 * np.eye(8))


@pytest.mark.parametrize(("kind", "dtype"), [("float", "float32"), ("half", "float16")])
def test_matrix_constructors_and_products_without_accumulator(rng, kind, dtype):
    source = f"""kernel void k(const device {kind}* x [[buffer(0)]], device {kind}* o [[buffer(1)]]) {{
  simdgroup_matrix<{kind}, 8, 8> a, product, diagonal({kind}(3));
  simdgroup_load(a, x);
  simdgroup_multiply(product, a, diagonal);
  simdgroup_store(product, o);
  simdgroup_store(diagonal * a, o + 64);
  simdgroup_store(make_filled_simdgroup_matrix<{kind}, 8>({kind}(5)), o + 128);
}}"""
    x = rng.integers(-9, 9, (8, 8)).astype(dtype)
    out = np.zeros((3, 8, 8), dtype)
    library(source).run("k", {0: x, 1: out}, (1,), (32,))
    np.testing.assert_array_equal(out, [3 * x, 3 * x, np.full_like(x, 5)])


def test_atomics_of_other_types(rng):
    """64-bit minimum and maximum, booleans, and a fence."""
    source = """kernel void k(const device ulong* x [[buffer(0)]], device atomic_ulong* o [[buffer(1)]],
    device atomic_bool* flags [[buffer(2)]], device uint* seen [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  atomic_max_explicit(o, x[i], memory_order_relaxed);
  atomic_min_explicit(o + 1, x[i], memory_order_relaxed);
  atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
  if (x[i] % 64 == 5) atomic_store_explicit(flags, true, memory_order_relaxed);
  bool expected = false;
  seen[i] = atomic_compare_exchange_weak_explicit(flags + 1, &expected, true, memory_order_relaxed, memory_order_relaxed);
  seen[i] += 2 * atomic_exchange_explicit(flags + 2, true, memory_order_relaxed);
  seen[i] += 4 * atomic_load_explicit(flags + 3, memory_order_relaxed);
}"""
    x = rng.integers(0, 2**63, 256).astype(np.uint64) * 2
    x[7] = 69
    limits, flags = np.array([0, 2**64 - 1], np.uint64), np.array([0, 0, 0, 1], np.uint32)
    seen = np.zeros(256, np.uint32)
    library(source).run("k", {0: x, 1: limits, 2: flags, 3: seen}, (256,), (64,), dispatch="threads", threads=2)
    np.testing.assert_array_equal(limits, [x.max(), x.min()])
    np.testing.assert_array_equal(flags, 1)
    assert np.count_nonzero(seen & 1) == 1  # one thread found it unset
    assert np.count_nonzero(seen & 2) == 255
    assert (seen & 4).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_atomics(rng, dtype, threads):
    names = ("add", "sub", "max", "min", "and", "or", "xor")
    kind = METAL_TYPES[dtype]
    calls = "".join(
        f"atomic_fetch_{n}_explicit(&o[{i}], x[i], memory_order_relaxed);"
        f"atomic_fetch_{n}_explicit(&s[{i}], x[i], memory_order_relaxed);"
        for i, n in enumerate(names)
    )
    source = f"""kernel void k(const device {kind}* x [[buffer(0)]], device atomic<{kind}>* o [[buffer(1)]],
    device {kind}* p [[buffer(2)]], device atomic_{kind}* count [[buffer(3)]], uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) {{
  threadgroup atomic_{kind} s[7];
  if (t < 7) atomic_store_explicit(&s[t], t == 3 || t == 4 ? 127 : 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  {calls}
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 7) p[g * 7 + t] = atomic_load_explicit(&s[t], memory_order_relaxed);
  {kind} expected = atomic_load_explicit(count, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(count, &expected, expected + 2, memory_order_relaxed, memory_order_relaxed)) {{}}
}}"""
    x = rng.integers(0, 127, (6, 64)).astype(dtype)
    start = np.array([0, 0, 0, 127, 127, 0, 0], dtype)
    total, parts, count = start.copy(), np.zeros((6, 7), dtype), np.zeros(1, dtype)
    library(source).run("k", {0: x, 1: total, 2: parts, 3: count}, (6,), (64,), threads=threads, seed=3)
    operations = (np.add, np.subtract, np.maximum, np.minimum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    for i, operation in enumerate(operations):
        fold_one = lambda values, i=i, operation=operation: operation.reduce(np.append(start[i], values), dtype=dtype)  # noqa: E731
        assert total[i] == fold_one(x.ravel())
        np.testing.assert_array_equal(parts[:, i], [fold_one(row) for row in x])
    assert count[0] == 2 * x.size


def test_float_atomics_and_exchange(rng):
    source = """kernel void k(const device float* x [[buffer(0)]], device atomic_float* o [[buffer(1)]],
    device float* old [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(o, x[i], memory_order_relaxed);
  old[i] = atomic_exchange_explicit(o + 1, x[i], memory_order_relaxed);
}"""
    x = rng.standard_normal(256).astype(np.float32)
    out, old = np.zeros(2, np.float32), np.zeros(256, np.float32)
    library(source).run("k", {0: x, 1: out, 2: old}, (256,), (64,), dispatch="threads")
    np.testing.assert_allclose(out[0], x.astype(np.float64).sum(), atol=1e-4)
    np.testing.assert_array_equal(np.sort(np.append(old, out[1])), np.sort(np.append(x, 0)))
