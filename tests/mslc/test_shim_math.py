"""Every function of <metal_math>, <metal_common> and <metal_relational> against float64 NumPy."""

import math

import numpy as np
import pytest

from tests.mslc.msl import METAL_TYPES, evaluate, from_bfloat, to_bfloat

UNARY = {
    "acos": (np.arccos, -1, 1),
    "acosh": (np.arccosh, 1, 50),
    "asin": (np.arcsin, -1, 1),
    "asinh": (np.arcsinh, -50, 50),
    "atan": (np.arctan, -50, 50),
    "atanh": (np.arctanh, -0.99, 0.99),
    "ceil": (np.ceil, -50, 50),
    "cos": (np.cos, -20, 20),
    "cosh": (np.cosh, -9, 9),
    "cospi": (lambda x: np.cos(np.pi * x), -3, 3),
    "exp": (np.exp, -9, 9),
    "exp10": (lambda x: 10.0**x, -4, 4),
    "exp2": (np.exp2, -9, 9),
    "fabs": (np.abs, -50, 50),
    "abs": (np.abs, -50, 50),
    "floor": (np.floor, -50, 50),
    "fract": (lambda x: x - np.floor(x), -50, 50),
    "log": (np.log, 0.01, 50),
    "log10": (np.log10, 0.01, 50),
    "log2": (np.log2, 0.01, 50),
    "rint": (np.rint, -50, 50),
    "round": (lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5), -50, 50),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 0.01, 50),
    "saturate": (lambda x: np.clip(x, 0, 1), -2, 2),
    "sign": (np.sign, -5, 5),
    "sin": (np.sin, -20, 20),
    "sinh": (np.sinh, -9, 9),
    "sinpi": (lambda x: np.sin(np.pi * x), -3, 3),
    "sqrt": (np.sqrt, 0, 50),
    "tan": (np.tan, -1.5, 1.5),
    "tanh": (np.tanh, -9, 9),
    "tanpi": (lambda x: np.tan(np.pi * x), -0.45, 0.45),
    "trunc": (np.trunc, -50, 50),
}
BINARY = {
    "atan2": np.arctan2,
    "copysign": np.copysign,
    "divide": np.divide,
    "fdim": lambda x, y: np.maximum(x - y, 0),
    "fmax": np.maximum,
    "fmin": np.minimum,
    "fmod": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "pow": lambda x, y: np.abs(x) ** y,
    "powr": lambda x, y: np.abs(x) ** y,
    "step": lambda e, x: (x >= e).astype(x.dtype),
}
TERNARY = {
    "clamp": lambda a, b, c: np.minimum(np.maximum(a, b), c),
    "fma": lambda a, b, c: a * b + c,
    "fmax3": lambda a, b, c: np.maximum(a, np.maximum(b, c)),
    "max3": lambda a, b, c: np.maximum(a, np.maximum(b, c)),
    "fmin3": lambda a, b, c: np.minimum(a, np.minimum(b, c)),
    "min3": lambda a, b, c: np.minimum(a, np.minimum(b, c)),
    "fmedian3": lambda a, b, c: np.sort([a, b, c], 0)[1],
    "median3": lambda a, b, c: np.sort([a, b, c], 0)[1],
    "mix": lambda a, b, c: a + (b - a) * c,
}
# Relative to the result: a few units in the last place; absolute near zeros of sin and the like.
BOUNDS = {"float32": (1e-6, 1e-6), "float16": (1.5e-3, 2e-3)}


def check(actual, reference, dtype, terms=0.0):
    """`terms`: the size of terms that may cancel in the reference."""
    relative, absolute = BOUNDS[dtype]
    too_large = np.abs(reference) > np.finfo(dtype).max
    reference = np.where(too_large, np.copysign(np.inf, reference), reference)
    absolute = np.maximum(absolute, relative * terms)
    same = np.isclose(actual.astype(np.float64), reference, rtol=relative, atol=absolute, equal_nan=True)
    assert same.all(), (actual[~same], reference[~same])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", UNARY)
def test_unary(rng, name, dtype):
    function, low, high = UNARY[name]
    x = np.append(rng.uniform(low, high, 60), [low, high]).astype(dtype)
    check(evaluate(f"{name}(a)", x, out=dtype), function(x.astype(np.float64)), dtype)
    if name in ("exp", "sqrt", "tanh"):
        for space in ("fast", "precise"):
            check(evaluate(f"{space}::{name}(a)", x, out=dtype), function(x.astype(np.float64)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", BINARY)
def test_binary(rng, name, dtype):
    x, y = (rng.uniform(-4, 4, 64).astype(dtype) for _ in range(2))
    call = f"{name}(fabs(a), b)" if name.startswith("pow") else f"{name}(a, b)"
    check(evaluate(call, x, y, out=dtype), BINARY[name](x.astype(np.float64), y.astype(np.float64)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", TERNARY)
def test_ternary(rng, name, dtype):
    x, y, z = (rng.uniform(-4, 4, 64).astype(dtype) for _ in range(3))
    if name == "clamp":
        y, z = np.minimum(y, z), np.maximum(y, z)
    given = [v.astype(np.float64) for v in (x, y, z)]
    terms = np.abs(given[0]) + np.abs((given[1] - given[0]) * given[2]) if name == "mix" else 0.0
    check(evaluate(f"{name}(a, b, c)", x, y, z, out=dtype), TERNARY[name](*given), dtype, terms)


def test_sines_of_half_turns_are_exact_where_they_can_be():
    x = np.array([0, -0.0, 0.5, 1, 1.5, 2, -0.5, -1, -1.5, 3, 1e6 + 0.5, 1e9, 3e38, np.inf, np.nan], np.float32)
    sine = np.array([0, -0.0, 1, 0, -1, 0, -1, -0.0, 1, 0, 1, 0, 0, np.nan, np.nan], np.float32)
    cosine = np.array([1, 1, 0, -1, 0, 1, 0, -1, 0, -1, 0, 1, 1, np.nan, np.nan], np.float32)
    for name, expected in (("sinpi", sine), ("cospi", cosine)):
        actual = evaluate(f"{name}(a)", x, out="float32")
        np.testing.assert_array_equal(actual, expected, name)
        known = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(actual[known]), np.signbit(expected[known]), name)


def test_rsqrt_is_within_a_unit(rng):
    x = np.exp(rng.uniform(np.log(1e-38), np.log(3e38), 20_000)).astype(np.float32)
    exact = 1 / np.sqrt(x.astype(np.float64))
    error = np.abs(evaluate("rsqrt(a)", x, out="float32") - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= 0.5
    special = np.array([0.0, np.inf, -1, 4, 1e-45], np.float32)
    expected = np.array([np.inf, 0, np.nan, 0.5, 1 / np.sqrt(2.0**-149)], np.float32)
    np.testing.assert_array_equal(evaluate("rsqrt(a)", special, out="float32"), expected)


@pytest.mark.parametrize("name", ["exp", "sqrt", "tanh"])
def test_vectors_are_mapped_component_by_component(rng, name):
    x = rng.uniform(0.1, 4, (16, 4)).astype(np.float32)
    actual = evaluate(f"{name}(a)", x, out="float32:float4:4", types=("float4",))
    check(actual, UNARY[name][0](x.astype(np.float64)), "float32")


def test_scalars_are_repeated_along_vectors(rng):
    x = rng.uniform(-4, 4, (16, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        evaluate("clamp(a, -1.0f, 1.0f)", x, out="float32:float4:4", types=("float4",)), np.clip(x, -1, 1)
    )


def test_exponents():
    x = np.array([0.0, 1.0, -3.5, 1e-40, 3e38, 2.0**-149], np.float32)
    prelude = (
        "float fraction(float x) { int e; return frexp(x, e); } int exponent(float x) { int e; frexp(x, e); return e; }"
    )
    fraction, exponent = np.frexp(x)
    np.testing.assert_array_equal(evaluate("fraction(a)", x, out="float32", prelude=prelude), fraction)
    np.testing.assert_array_equal(evaluate("exponent(a)", x, out="int32", prelude=prelude), exponent)
    powers = np.array([5, -5, 100, -149, 127, -200], np.int32)
    one = np.array([1.5, -1.5, 2.0, 1.0, 1.0, 1.0], np.float32)
    np.testing.assert_array_equal(evaluate("ldexp(a, b)", one, powers, out="float32"), np.ldexp(one, powers))
    np.testing.assert_array_equal(evaluate("ilogb(a)", x[1:], out="int32"), [math.frexp(v)[1] - 1 for v in x[1:]])


def test_modf_and_nextafter(rng):
    x = rng.uniform(-9, 9, 32).astype(np.float32)
    prelude = "float2 parts(float x) { float whole; float f = modf(x, whole); return float2(f, whole); }"
    np.testing.assert_array_equal(
        evaluate("parts(a)", x, out="float32:float2:2", prelude=prelude), np.stack(np.modf(x), -1)
    )
    special = np.array([np.inf, -np.inf, -0.0, 3.0, np.nan], np.float32)
    parts = evaluate("parts(a)", special, out="float32:float2:2", prelude=prelude)
    np.testing.assert_array_equal(parts, np.stack(np.modf(special), -1))
    np.testing.assert_array_equal(np.signbit(parts[:4]), np.signbit(special[:4, None]).repeat(2, 1))
    for dtype in ("float32", "float16"):
        a, b = (rng.uniform(-1, 1, 32).astype(dtype) for _ in range(2))
        a[0] = 0
        np.testing.assert_array_equal(evaluate("nextafter(a, b)", a, b, out=dtype), np.nextafter(a, b))


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, 3e38], np.float32)


@pytest.mark.parametrize("name", ["isnan", "isinf", "isfinite", "signbit", "isnormal"])
def test_classification(name):
    normal = np.isfinite(SPECIAL) & (np.abs(SPECIAL) >= np.finfo(np.float32).tiny)
    expected = normal if name == "isnormal" else getattr(np, name)(SPECIAL)
    np.testing.assert_array_equal(evaluate(f"{name}(a)", SPECIAL, out="bool"), expected)
    pairs = np.stack([SPECIAL, SPECIAL[::-1]], -1)
    both = evaluate(f"int2({name}(a))", pairs, out="int32:int2:2", types=("float2",))
    np.testing.assert_array_equal(both, np.stack([expected, expected[::-1]], -1))


def test_nan_rules_of_max_and_min():
    y = SPECIAL[::-1].copy()
    np.testing.assert_array_equal(evaluate("fmax(a, b)", SPECIAL, y, out="float32"), np.fmax(SPECIAL, y))
    np.testing.assert_array_equal(evaluate("max(a, b)", SPECIAL, y, out="float32"), np.fmax(SPECIAL, y))
    np.testing.assert_array_equal(evaluate("min(a, b)", SPECIAL, y, out="float32"), np.fmin(SPECIAL, y))
    np.testing.assert_array_equal(
        evaluate("isunordered(a, b)", SPECIAL, y, out="bool"), np.isnan(SPECIAL) | np.isnan(y)
    )


def test_ordered_and_not():
    y = SPECIAL[::-1].copy()
    ordered = ~(np.isnan(SPECIAL) | np.isnan(y))
    np.testing.assert_array_equal(evaluate("isordered(a, b)", SPECIAL, y, out="bool"), ordered)
    pairs = np.stack([SPECIAL, y], -1)
    inverted = evaluate("int2(not(bool2(a > 0)))", pairs, out="int32:int2:2", types=("float2",))
    np.testing.assert_array_equal(inverted, ~(pairs > 0))
    np.testing.assert_array_equal(evaluate("not(a > 0)", SPECIAL, out="bool"), ~(SPECIAL > 0))


CONSTANTS = {
    "E": math.e, "LOG2E": math.log2(math.e), "LOG10E": math.log10(math.e), "LN2": math.log(2), "LN10": math.log(10),
    "PI": math.pi, "PI_2": math.pi / 2, "PI_4": math.pi / 4, "1_PI": 1 / math.pi, "2_PI": 2 / math.pi,
    "2_SQRTPI": 2 / math.sqrt(math.pi), "SQRT2": math.sqrt(2), "SQRT1_2": math.sqrt(0.5),
}  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "kind", "limits"),
    [
        ("F", "float", {"MAXFLOAT": np.finfo(np.float32).max, "HUGE_VALF": np.inf, "INFINITY": np.inf, "NAN": np.nan}),
        ("H", "half", {"MAXHALF": 65504, "HUGE_VALH": np.inf}),
        ("BF", "bfloat", {"MAXBFLOAT": float.fromhex("0x1.fep127"), "HUGE_VALBF": np.inf}),
    ],
)
def test_constants(suffix, kind, limits):
    expected = {f"M_{name}_{suffix}": value for name, value in CONSTANTS.items()} | limits
    checks = "".join(f'static_assert(__is_same(remove_cv_t<decltype({name})>, {kind}), "{name}");' for name in expected)
    cases = "".join(f"case {i}: return {name};" for i, name in enumerate(expected))
    prelude = f"{checks}\nfloat constant_of(int i) {{ switch (i) {{ {cases} }} return 0; }}"
    actual = evaluate("constant_of(a)", np.arange(len(expected), dtype=np.int32), out="float32", prelude=prelude)
    values = np.array(list(expected.values()), np.float32)
    if kind == "half":
        values = values.astype(np.float16)
    elif kind == "bfloat":
        values = from_bfloat(to_bfloat(values))
    np.testing.assert_array_equal(actual, values.astype(np.float32))


def test_half_and_bfloat_round_after_every_operation(rng):
    x, y, z = (rng.standard_normal(256).astype(np.float16) for _ in range(3))
    np.testing.assert_array_equal(evaluate("a * b + c", x, y, z, out="float16"), x * y + z)
    np.testing.assert_array_equal(evaluate("a + b + c - a", x, y, z, out="float16"), x + y + z - x)
    u, v, w = (to_bfloat(rng.standard_normal(256)) for _ in range(3))

    def rounded(values):
        return from_bfloat(to_bfloat(values))

    a, b, c = map(from_bfloat, (u, v, w))
    bf = ("bfloat",) * 3
    product = evaluate("as_type<ushort>(bfloat(a * b + c))", u, v, w, out="uint16", types=bf)
    np.testing.assert_array_equal(from_bfloat(product), rounded(rounded(a * b) + c))
    total = evaluate("as_type<ushort>(bfloat(a + b + c))", u, v, w, out="uint16", types=bf)
    np.testing.assert_array_equal(from_bfloat(total), rounded(rounded(a + b) + c))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_nan_as_an_integer_is_zero(dtype):
    x = np.array([np.nan, 3.75, 1.0], np.float32)
    np.testing.assert_array_equal(evaluate(f"{METAL_TYPES[dtype]}(a)", x, out=dtype), [0, 3, 1])
    vector = f"{METAL_TYPES[dtype]}2"
    pairs = evaluate(f"{vector}(a)", np.stack([x, x], -1), out=f"{dtype}:{vector}:2", types=("float2",))
    np.testing.assert_array_equal(pairs, [[0, 0], [3, 3], [1, 1]])


def test_conversions_between_half_and_bfloat(rng):
    x = rng.standard_normal(64).astype(np.float16)
    there = evaluate("as_type<ushort>(static_cast<bfloat>(a))", x, out="uint16")
    np.testing.assert_array_equal(there, to_bfloat(x))
    back = evaluate("static_cast<half>(a)", there, out="float16", types=("bfloat",))
    np.testing.assert_array_equal(back, from_bfloat(there).astype(np.float16))


def unit(v):
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def refracted(incident, normal, eta):
    cosine = (normal * incident).sum(-1, keepdims=True)
    k = 1 - eta**2 * (1 - cosine**2)
    return np.where(k < 0, 0, eta * incident - (eta * cosine + np.sqrt(np.maximum(k, 0))) * normal)


@pytest.mark.parametrize(
    ("expression", "reference"),
    [
        ("float4(dot(a, b))", lambda a, b: np.repeat((a * b).sum(-1, keepdims=True), 4, -1)),
        ("float4(length(a))", lambda a, b: np.repeat(np.linalg.norm(a, axis=-1, keepdims=True), 4, -1)),
        ("float4(distance(a, b))", lambda a, b: np.repeat(np.linalg.norm(a - b, axis=-1, keepdims=True), 4, -1)),
        ("normalize(a)", lambda a, b: a / np.linalg.norm(a, axis=-1, keepdims=True)),
        ("float4(cross(a.xyz, b.xyz), 0)", lambda a, b: np.append(np.cross(a[:, :3], b[:, :3]), 0 * a[:, :1], -1)),
        ("reflect(a, b)", lambda a, b: a - 2 * (a * (n := unit(b))).sum(-1, keepdims=True) * n),
        ("refract(normalize(a), normalize(b), 0.7f)", lambda a, b: refracted(unit(a), unit(b), 0.7)),
        ("refract(normalize(a), normalize(b), 1.4f)", lambda a, b: refracted(unit(a), unit(b), 1.4)),
        ("float4(length_squared(a))", lambda a, b: np.repeat((a * a).sum(-1, keepdims=True), 4, -1)),
        ("float4(distance_squared(a, b))", lambda a, b: np.repeat(((a - b) ** 2).sum(-1, keepdims=True), 4, -1)),
        ("fast::normalize(a) * precise::length(a) + fast::distance(a, b) - precise::distance(a, b)", lambda a, b: a),
        ("faceforward(a, b, a)", lambda a, b: np.where((a * b).sum(-1, keepdims=True) < 0, a, -a)),
        ("select(a, b, a < b)", np.maximum),
        ("smoothstep(float4(-1), float4(1), a)", lambda a, b: (t := np.clip((a + 1) / 2, 0, 1)) ** 2 * (3 - 2 * t)),
    ],
)
def test_geometric(rng, expression, reference):
    a, b = (rng.standard_normal((32, 4)).astype(np.float32) for _ in range(2))
    actual = evaluate(expression, a, b, out="float32:float4:4", types=("float4", "float4"))
    np.testing.assert_allclose(actual, reference(a.astype(np.float64), b.astype(np.float64)), rtol=1e-5, atol=1e-5)


def test_functions_with_two_results_take_vectors(rng):
    x = (rng.standard_normal((64, 3)) * 10.0 ** rng.integers(-30, 30, (64, 3))).astype(np.float32)
    prelude = """float3 rebuild(float3 x) { int3 e; float3 f = frexp(x, e); return ldexp(f, e); }
float3 fraction(float3 x) { int3 e; return frexp(x, e); }
float3 whole(float3 x) { float3 w; modf(x, w); return w; }
float3 rest(float3 x) { float3 w; return modf(x, w); }
float3 cosine(float3 x) { float3 c; sincos(x, c); return c; }"""

    def run(function, values=x):
        return evaluate(
            f"{function}(float3(a))", values, out="float32:packed_float3:3", types=("packed_float3",), prelude=prelude
        )

    np.testing.assert_array_equal(run("rebuild"), x)
    np.testing.assert_array_equal(run("fraction"), np.frexp(x)[0])
    np.testing.assert_array_equal(run("whole"), np.trunc(x))
    np.testing.assert_array_equal(run("rest"), np.modf(x)[0])
    angles = rng.uniform(-3, 3, (64, 3)).astype(np.float32)
    np.testing.assert_allclose(run("cosine", angles), np.cos(angles), atol=2e-7)
    upwards = evaluate("float3(nextafter(float3(a), float3(INFINITY)))", x, out="float32:packed_float3:3",
                       types=("packed_float3",))  # fmt: skip
    np.testing.assert_array_equal(upwards, np.nextafter(x, np.float32(np.inf)))
