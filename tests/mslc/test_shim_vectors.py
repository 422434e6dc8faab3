"""Vectors that are structs in the shim (bool vectors, packed vectors): layout, swizzles, errors."""

import itertools

import numpy as np
import pytest

from mlx_anvil.mslc import CompileError, Library
from mlx_anvil.mslc.lint import lint
from mlx_anvil.mslc.preprocess import Source
from tests.mslc.msl import HEAD, METAL_TYPES, evaluate, library

XYZW, RGBA = "xyzw", "rgba"


def patterns(components, distinct=False):
    """Every swizzle of two to four letters of a vector of that many components, as tuples of indices."""
    choose = itertools.permutations if distinct else lambda letters, n: itertools.product(letters, repeat=n)
    return [p for n in (2, 3, 4) for p in choose(range(components), n)]


def spell(pattern, names=XYZW):
    return "".join(names[i] for i in pattern)


def run_writes(kind, dtype, components, writes, x, values):
    """For each write (a statement on v and u), the vector v that it leaves; v starts as x, u as values."""
    cases = "\n".join(f"case {i}: {{ {statement} }} break;" for i, statement in enumerate(writes))
    source = f"""kernel void k(const device {METAL_TYPES[dtype]}* x [[buffer(0)]], const device {METAL_TYPES[dtype]}* y [[buffer(1)]],
    device {METAL_TYPES[dtype]}* o [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
  {kind} v, u;
  for (int j = 0; j < {components}; ++j) {{ v[j] = x[j]; u[j] = y[j]; }}
  switch (i) {{
{cases}
  }}
  for (int j = 0; j < {components}; ++j) o[i * {components} + j] = v[j];
}}"""
    out = np.zeros((len(writes), components), dtype)
    library(source).run("k", {0: x, 1: values, 2: out}, (len(writes),), (32,), dispatch="threads")
    return out


VECTORS = {"bool": "bool", "packed_float": "float32", "packed_uchar": "uint8"}


def samples(rng, dtype, components):
    if dtype == "bool":
        return [rng.permutation([True, False, True, False])[:components] for _ in range(2)]
    return [rng.permutation(100)[:components].astype(dtype) for _ in range(2)]


@pytest.mark.parametrize("components", [2, 3, 4])
@pytest.mark.parametrize("prefix", VECTORS)
def test_every_swizzle_can_be_read(rng, prefix, components):
    dtype = VECTORS[prefix]
    everything = patterns(components)
    for names in (XYZW, RGBA):
        for length in (2, 3, 4):
            reads = [p for p in everything if len(p) == length]
            plain = METAL_TYPES[dtype]
            statements = [
                f"{plain}{length} w = v.{spell(p, names)}; for (int j = 0; j < {min(length, components)}; ++j) v[j] = w[j];"
                for p in reads
            ]
            x, y = samples(rng, dtype, components)
            out = run_writes(f"{prefix}{components}", dtype, components, statements, x, y)
            kept = min(length, components)
            expected = np.stack([np.append(x[list(p[:kept])], x[kept:]) for p in reads])
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("components", [2, 3, 4])
@pytest.mark.parametrize("prefix", VECTORS)
def test_every_swizzle_without_duplicates_can_be_written(rng, prefix, components):
    """From another vector's swizzle of the same pattern, which is what a plain copy would get wrong."""
    dtype = VECTORS[prefix]
    writes = patterns(components, distinct=True)
    for names in (XYZW, RGBA):
        x, y = samples(rng, dtype, components)
        statements = [f"v.{spell(p, names)} = u.{spell(p, names)};" for p in writes]
        out = run_writes(f"{prefix}{components}", dtype, components, statements, x, y)
        expected = np.tile(x, (len(writes), 1))
        for row, p in zip(expected, writes, strict=True):
            row[list(p)] = y[list(p)]
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("prefix", VECTORS)
def test_a_swizzle_of_the_vector_itself_is_read_before_it_is_written(rng, prefix):
    dtype = VECTORS[prefix]
    x, y = samples(rng, dtype, 4)
    moves = [(a, b) for a in patterns(4, distinct=True) for b in patterns(4, distinct=True) if len(a) == len(b)]
    moves = [moves[i] for i in rng.choice(len(moves), 100, replace=False)]
    out = run_writes(f"{prefix}4", dtype, 4, [f"v.{spell(a)} = v.{spell(b)};" for a, b in moves], x, y)
    expected = np.tile(x, (len(moves), 1))
    for row, (a, b) in zip(expected, moves, strict=True):
        row[list(a)] = x[list(b)]
    np.testing.assert_array_equal(out, expected)


def test_compound_assignment_chains_and_conditional_swizzles_of_bool_vectors():
    statements = {
        "v.xy &= u.zw;": lambda v, u: [v[0] & u[2], v[1] & u[3], v[2], v[3]],
        "v.wz |= u.xx;": lambda v, u: [v[0], v[1], v[2] | u[0], v[3] | u[0]],
        "v.xyz ^= v.zyx;": lambda v, u: [v[0] ^ v[2], False, v[2] ^ v[0], v[3]],
        "v.xy = u.xy = v.zw;": lambda v, u: [v[2], v[3], v[2], v[3]],
        "v.xy = v.x ? u.xy : u.zw;": lambda v, u: [*(u[:2] if v[0] else u[2:]), v[2], v[3]],
        "v.xz = !u.yw;": lambda v, u: [not u[1], v[1], not u[3], v[3]],
        "v.xy = true;": lambda v, u: [True, True, v[2], v[3]],
        "auto w = u.wx; v.yz = w;": lambda v, u: [v[0], u[3], u[0], v[3]],
        "v.xy = select(u.xy, u.zw, v.zw);": lambda v, u: [u[2] if v[2] else u[0], u[3] if v[3] else u[1], v[2], v[3]],
        "v.x = any(u.xy); v.y = all(u.zw);": lambda v, u: [u[0] | u[1], u[2] & u[3], v[2], v[3]],
        "v = bool4(u.xyz.zy, v.xy);": lambda v, u: [u[2], u[1], v[0], v[1]],
        "v.xy.x; const bool4 c = u; v.zw = c.zw;": lambda v, u: [v[0], v[1], u[2], u[3]],
        "v.xy = float2(1, -1) > 0;": lambda v, u: [True, False, v[2], v[3]],
    }
    for bits in range(0, 256, 7):
        x, y = ([bool(b >> i & 1) for i in range(4)] for b in (bits, bits >> 4))
        out = run_writes("bool4", "bool", 4, list(statements), np.array(x), np.array(y))
        for row, (statement, expected) in zip(out, statements.items(), strict=True):
            np.testing.assert_array_equal(row, expected(x, y), err_msg=f"{statement} {x} {y}")


def test_compound_assignment_to_swizzles_of_packed_vectors(rng):
    statements = {
        "v.xy += u.zw;": lambda v, u: [v[0] + u[2], v[1] + u[3], v[2], v[3]],
        "v.zyx *= 2;": lambda v, u: [v[0] * 2, v[1] * 2, v[2] * 2, v[3]],
        "v.xw -= v.wx;": lambda v, u: [v[0] - v[3], v[1], v[2], v[3] - v[0]],
        "v.yz /= float2(2, 4);": lambda v, u: [v[0], v[1] / 2, v[2] / 4, v[3]],
        "v.gb = 7;": lambda v, u: [v[0], 7, 7, v[3]],
        "v.xyz = packed_float3(u.yzw);": lambda v, u: [u[1], u[2], u[3], v[3]],
        "v.xy = -u.xy * dot(u.xy, u.xy);": lambda v, u: [
            *(-u[i] * (u[0] ** 2 + u[1] ** 2) for i in (0, 1)), v[2], v[3]],
        "v.x = length(float4(u).xy - u.xy);": lambda v, u: [0, v[1], v[2], v[3]],
        "float4 w = u; w.xy = v.wz; v = w;": lambda v, u: [v[3], v[2], u[2], u[3]],
    }  # fmt: skip
    x, y = samples(rng, "float32", 4)
    out = run_writes("packed_float4", "float32", 4, list(statements), x, y)
    for row, (statement, expected) in zip(out, statements.items(), strict=True):
        np.testing.assert_array_equal(row, expected(x, y), err_msg=statement)


def test_swizzles_in_every_address_space(rng):
    source = """struct S { packed_half3 p; bool3 b; };
kernel void k(device packed_half3* d [[buffer(0)]], constant packed_half3& c [[buffer(1)]], device bool4* o [[buffer(2)]],
    threadgroup packed_half3* t [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup S s;
  t[i].zyx = d[i].xyz + c.yyy;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  d[i].xy = t[31 - i].yz;
  if (i == 0) s.p.xz = c.zx;
  if (i == 0) s.b.zx = o[0].xy;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i].xy = bool2(s.p.x == c.z, s.p.z == c.x);
  o[i].wz = s.b.xz;
}"""
    x = rng.standard_normal((32, 3)).astype(np.float16)
    c = rng.standard_normal(3).astype(np.float16)
    o = rng.random((32, 4)) < 0.5
    d, first = x.copy(), o[0].copy()
    library(source).run("k", {0: d, 1: c, 2: o}, (1,), (32,), threadgroup_memory={0: 192})
    shifted = (x + c[1])[::-1, ::-1]
    np.testing.assert_array_equal(d, np.concatenate([shifted[:, 1:], x[:, 2:]], 1))
    np.testing.assert_array_equal(o, np.tile([True, True, first[0], first[1]], (32, 1)))
    assert lint(Source(HEAD + source)) == []


PACKED = ["char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float"]


def test_packed_vectors_have_the_size_and_alignment_of_the_specification():
    checks = [
        f'static_assert(sizeof(packed_{t}{n}) == {n} * sizeof({t}) && alignof(packed_{t}{n}) == alignof({t}), "{t}{n}");'
        f' static_assert(is_same_v<packed_{t}{n}, packed_vec<{t}, {n}>>, "{t}{n}");'
        for t in PACKED
        for n in (2, 3, 4)
    ]
    bools = 'static_assert(sizeof(bool2) == 2 && sizeof(bool3) == 4 && alignof(bool3) == 4 && sizeof(bool4) == 4, "");'
    assert evaluate("a", np.arange(2, dtype=np.int32), out="int32", prelude="\n".join([*checks, bools])).tolist() == [
        0,
        1,
    ]


@pytest.mark.slow
def test_operators_of_packed_vectors(rng):
    x, y = (rng.integers(1, 100, (32, 3)).astype(np.int16) for _ in range(2))

    def run(expression):
        types = ("packed_short3", "packed_short3")
        return evaluate(expression, x, y, out="int16:packed_short3:3", types=types)

    for op, function in {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.floor_divide, "%": np.remainder,
                         "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor}.items():  # fmt: skip
        np.testing.assert_array_equal(run(f"a {op} b"), function(x, y), err_msg=op)
        np.testing.assert_array_equal(run(f"a {op} short(7)"), function(x, np.int16(7)), err_msg=op)
        np.testing.assert_array_equal(run(f"short(7) {op} b"), function(np.int16(7), y), err_msg=op)
        np.testing.assert_array_equal(run(f"short3(a) {op} b"), function(x, y), err_msg=op)
        np.testing.assert_array_equal(run(f"a {op}= short3(b)"), function(x, y), err_msg=op)
    for op, function in {"==": np.equal, "!=": np.not_equal, "<": np.less, ">": np.greater, "<=": np.less_equal,
                         ">=": np.greater_equal, "&&": np.logical_and, "||": np.logical_or}.items():  # fmt: skip
        np.testing.assert_array_equal(run(f"short3(bool3(a {op} b))"), function(x, y), err_msg=op)
    np.testing.assert_array_equal(run("a << short(2) >> short(1)"), x << 2 >> 1)
    np.testing.assert_array_equal(run("~a"), ~x)
    np.testing.assert_array_equal(run("-a"), -x)


@pytest.mark.parametrize("kind", PACKED)
def test_swizzles_of_every_packed_type(kind):
    prelude = f"""int f(int a) {{
  packed_{kind}4 v = packed_{kind}4({kind}4({kind}(a), {kind}(a + 1), {kind}(a + 2), {kind}(a + 3)));
  v.xw = v.wx;
  {kind}3 w = v.zyx;
  return int(w.x) + 10 * int(w.y) + 100 * int(w.z) + 1000 * int(v.a);
}}"""
    x = np.arange(6, dtype=np.int32)
    expected = (x + 2) + 10 * (x + 1) + 100 * (x + 3) + 1000 * x
    np.testing.assert_array_equal(evaluate("f(a)", x, out="int32", prelude=prelude), expected)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("b.xx = bool2(true);", "vector is not assignable (contains duplicate components)"),
        ("b.xyx |= bool3(true);", "vector is not assignable (contains duplicate components)"),
        ("p.zz = float2(1);", "vector is not assignable (contains duplicate components)"),
        ("p.xz = float4(1);", "cannot initialize"),
        ("p.xg = float2(1);", "no member named 'xg'"),
        ("p.xw = float2(1);", "no member named 'xw'"),
        ("thread float2* q = &p.xy;", "address of property expression requested"),
    ],
)
def test_what_a_swizzle_cannot_do_is_an_error_where_it_stands(statement, message):
    source = f"kernel void k(device int* o [[buffer(0)]]) {{\n  bool4 b = true;\n  packed_float3 p = float3(0);\n  {statement}\n}}"
    with pytest.raises(CompileError) as error:
        Library(HEAD + source)
    first = error.value.diagnostics[0]
    assert message in first.message
    assert first.line == 6
