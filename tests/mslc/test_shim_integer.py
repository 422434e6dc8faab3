"""<metal_integer>, vectors, packed vectors and casts."""

import numpy as np
import pytest

from tests.mslc.msl import evaluate

DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def samples(rng, dtype, count=64):
    info = np.iinfo(dtype)
    edges = np.array([info.min, info.max, 0, 1], dtype)
    return np.append(rng.integers(info.min, info.max, count - 4, dtype=dtype, endpoint=True), edges)


def bits(x):
    return np.iinfo(x.dtype).bits


def unsigned(x):
    return [int(v) & ((1 << bits(x)) - 1) for v in x]


def wrap(values, dtype):
    width = np.iinfo(dtype).bits
    return np.array([v & ((1 << width) - 1) for v in values], f"uint{width}").view(dtype)


def clip(values, dtype):
    info = np.iinfo(dtype)
    return np.array([min(max(v, info.min), info.max) for v in values], dtype)


UNARY = {
    "clz": lambda x: [bits(x) - v.bit_length() for v in unsigned(x)],
    "ctz": lambda x: [(v & -v).bit_length() - 1 if v else bits(x) for v in unsigned(x)],
    "popcount": lambda x: [v.bit_count() for v in unsigned(x)],
    "reverse_bits": lambda x: [int(f"{v:0{bits(x)}b}"[::-1], 2) for v in unsigned(x)],
}
BINARY = {
    "addsat": lambda a, b: clip([x + y for x, y in zip(a, b, strict=True)], a_dtype),
    "subsat": lambda a, b: clip([x - y for x, y in zip(a, b, strict=True)], a_dtype),
    "hadd": lambda a, b: [(x + y) >> 1 for x, y in zip(a, b, strict=True)],
    "rhadd": lambda a, b: [(x + y + 1) >> 1 for x, y in zip(a, b, strict=True)],
    "mulhi": lambda a, b: [x * y >> np.iinfo(a_dtype).bits for x, y in zip(a, b, strict=True)],
    "max": lambda a, b: [max(x, y) for x, y in zip(a, b, strict=True)],
    "min": lambda a, b: [min(x, y) for x, y in zip(a, b, strict=True)],
}
a_dtype = None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_bit_functions(rng, name, dtype):
    x = samples(rng, dtype)
    np.testing.assert_array_equal(evaluate(f"{name}(a)", x, out=dtype), wrap(UNARY[name](x), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BINARY)
def test_arithmetic_functions(rng, name, dtype, monkeypatch):
    monkeypatch.setitem(globals(), "a_dtype", dtype)
    x, y = samples(rng, dtype), samples(rng, dtype)[::-1].copy()
    expected = wrap([int(v) for v in BINARY[name]([int(v) for v in x], [int(v) for v in y])], dtype)
    np.testing.assert_array_equal(evaluate(f"{name}(a, b)", x, y, out=dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_absdiff_and_bit_fields(rng, dtype):
    x, y = samples(rng, dtype), samples(rng, dtype)[::-1].copy()
    width = np.iinfo(dtype).bits
    count = rng.integers(0, width, x.size).astype(dtype)
    rotated = [
        ((v << int(n)) | (v >> (width - int(n)))) & ((1 << width) - 1) for v, n in zip(unsigned(x), count, strict=True)
    ]
    np.testing.assert_array_equal(evaluate("rotate(a, b)", x, count, out=dtype), wrap(rotated, dtype))
    difference = [abs(int(u) - int(v)) for u, v in zip(x, y, strict=True)]
    np.testing.assert_array_equal(
        evaluate("absdiff(a, b)", x, y, out=f"uint{width}"), np.array(difference, f"uint{width}")
    )
    field = [(v >> 2) & 7 for v in unsigned(x)]
    if dtype.startswith("i"):
        field = [v - 8 if v & 4 else v for v in field]
    np.testing.assert_array_equal(evaluate("extract_bits(a, 2, 3)", x, out=dtype), np.array(field).astype(dtype))
    inserted = [(u & ~0b11100) | (v & 7) << 2 for u, v in zip(unsigned(x), unsigned(y), strict=True)]
    np.testing.assert_array_equal(evaluate("insert_bits(a, b, 2, 3)", x, y, out=dtype), wrap(inserted, dtype))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_24_bit_and_saturating_products(rng, dtype):
    low, high = (-(1 << 23), (1 << 23) - 1) if dtype == "int32" else (0, (1 << 24) - 1)
    x, y, z = (rng.integers(low, high, 64).astype(dtype) for _ in range(3))
    product = [int(u) * int(v) for u, v in zip(x, y, strict=True)]
    np.testing.assert_array_equal(evaluate("mul24(a, b)", x, y, out=dtype), wrap(product, dtype))
    total = [p + int(w) for p, w in zip(product, z, strict=True)]
    np.testing.assert_array_equal(evaluate("mad24(a, b, c)", x, y, z, out=dtype), wrap(total, dtype))
    np.testing.assert_array_equal(evaluate("madsat(a, b, c)", x, y, z, out=dtype), clip(total, dtype))
    high_part = [(p >> 32) + int(w) for p, w in zip(product, z, strict=True)]
    np.testing.assert_array_equal(evaluate("madhi(a, b, c)", x, y, z, out=dtype), wrap(high_part, dtype))


def test_vector_constructors_and_swizzles(rng):
    x = rng.standard_normal((16, 4)).astype(np.float32)
    cases = {
        "float4(a.xy, a.zw)": x,
        "float4(a.x, a.yzw)": x,
        "float4(a.w)": np.repeat(x[:, 3:], 4, -1),
        "a.wzyx": x[:, ::-1],
        "float4(int4(a))": np.trunc(x),
        "(float4)a.rgba.xxyy": x[:, [0, 0, 1, 1]],
        "float4(half4(a))": x.astype(np.float16),
        "float4(bool4(a > 0))": x > 0,
        "float4(static_cast<int4>(a))": np.trunc(x),
        "as_type<float4>(as_type<uint4>(a))": x,
    }
    for expression, expected in cases.items():
        actual = evaluate(expression, x, out="float32:float4:4", types=("float4",))
        np.testing.assert_array_equal(actual, expected.astype(np.float32), err_msg=expression)


def test_parenthesised_vector_declarations():
    prelude = "int2 f(int x) { const int2 v(x, x + 1); short2 w(v); half3 h(0), g(1, 2, 3); return v + int2(w) + int2(h.xy + g.xy); }"
    x = np.arange(8, dtype=np.int32)
    actual = evaluate("f(a)", x, out="int32:int2:2", prelude=prelude)
    np.testing.assert_array_equal(actual, np.stack([2 * x + 1, 2 * x + 4], -1))


def test_bool_vectors():
    prelude = """
int f(int2 x) {
  bool2 p = x > 0, q(x.x == 1, true);
  bool4 r = bool4(p, q);
  bool2 s = r.zw;
  r.xy = bool2(false, r.y);
  static_assert(sizeof(bool4) == 4 && sizeof(bool2) == 2, "size");
  return any(p) + 2 * all(p) + 4 * (p && q).x + 8 * (!p).y + 16 * s.x + 32 * r.x + 64 * r.y;
}"""
    x = np.array([[a, b] for a in (-1, 0, 1, 2) for b in (-1, 0, 1)], np.int32)
    p = x > 0
    one = x[:, 0] == 1
    expected = p.any(1) + 2 * p.all(1) + 4 * (p[:, 0] & one) + 8 * ~p[:, 1] + 16 * one + 64 * p[:, 1]
    np.testing.assert_array_equal(evaluate("f(a)", x, out="int32", types=("int2",), prelude=prelude), expected)


def test_packed_vectors(rng):
    x = rng.standard_normal((8, 3)).astype(np.float32)
    prelude = 'static_assert(sizeof(packed_float3) == 12 && alignof(packed_half4) == 2, "layout");'
    actual = evaluate(
        "packed_float3(float3(a) * 2 + a.x)",
        x,
        out="float32:packed_float3:3",
        types=("packed_float3",),
        prelude=prelude,
    )
    np.testing.assert_allclose(actual, x * 2 + x[:, :1], rtol=1e-6)


def test_numeric_limits():
    for dtype, name in zip(DTYPES, ["char", "uchar", "short", "ushort", "int", "uint", "long", "ulong"], strict=True):
        zero = np.zeros(1, dtype)
        assert evaluate(f"a + numeric_limits<{name}>::max()", zero, out=dtype)[0] == np.iinfo(dtype).max
        assert evaluate(f"a + numeric_limits<{name}>::min()", zero, out=dtype)[0] == np.iinfo(dtype).min
    for dtype, name in (("float32", "float"), ("float16", "half")):
        zero, info = np.zeros(1, dtype), np.finfo(dtype)
        for member, expected in (
            ("max", info.max),
            ("lowest", info.min),
            ("min", info.tiny),
            ("epsilon", info.eps),
            ("infinity", np.inf),
        ):
            assert evaluate(f"a + numeric_limits<{name}>::{member}()", zero, out=dtype)[0] == expected


def test_components_of_packed_vectors_have_two_names(rng):
    a = rng.standard_normal((32, 4)).astype(np.float32)
    result = evaluate("float4(a.w, a.b, a.y, a.r)", a, out="float32:packed_float4:4", types=("packed_float4",))
    np.testing.assert_array_equal(result, a[:, ::-1])
    b = rng.integers(0, 2**63, (32, 3)).astype(np.uint64)
    result = evaluate("packed_ulong3(a.z, a.g, a.x)", b, out="uint64:packed_ulong3:3", types=("packed_ulong3",))
    np.testing.assert_array_equal(result, b[:, ::-1])
