"""Accuracy of the simulator's maths functions: tables 8.1 (float) and 8.3 (half) of the MSL specification, Metal 4."""

import functions
import numpy as np
import pytest

from tests.mslc.msl import from_bfloat, library, to_bfloat

# Units in the last place; 0.5 is correctly rounded. Every half is tried.
HALF = {
    "acos": (1, np.arccos),
    "acosh": (1, np.arccosh),
    "asin": (1, np.arcsin),
    "asinh": (1, np.arcsinh),
    "atan": (1, np.arctan),
    "atanh": (1, np.arctanh),
    "ceil": (0.5, np.ceil),
    "cos": (1, np.cos),
    "cosh": (1, np.cosh),
    "cospi": (1, functions.UNARY["cospi"][1]),
    "exp": (1, np.exp),
    "exp10": (1, lambda x: 10.0**x),
    "exp2": (1, np.exp2),
    "fabs": (0, np.abs),
    "floor": (0.5, np.floor),
    "fract": (1, lambda x: x - np.floor(x)),  # half a unit, or one below 1: a result of 1 is not allowed
    "log": (1, np.log),
    "log10": (1, np.log10),
    "log2": (1, np.log2),
    "rint": (0.5, np.rint),
    "round": (0.5, lambda x: np.trunc(x + np.copysign(0.5, x))),
    "rsqrt": (0.5, lambda x: 1 / np.sqrt(x)),
    "sin": (1, np.sin),
    "sinh": (1, np.sinh),
    "sinpi": (1, functions.UNARY["sinpi"][1]),
    "sqrt": (0.5, np.sqrt),
    "tan": (1, np.tan),
    "tanh": (1, np.tanh),
    "tanpi": (1, functions.UNARY["tanpi"][1]),
    "trunc": (0.5, np.trunc),
}


def tabulate(kind, names, *arguments):
    """Evaluates each function of `names` on all arguments."""
    count, variables = len(arguments[0]), "ab"[: len(arguments)]
    cases = "".join(
        f"o[{row}ul * count + i] = {name}({', '.join(f'{v}[i]' for v in variables)});\n"
        for row, name in enumerate(names)
    )
    parameters = "".join(f"const device {kind}* {v} [[buffer({i})]], " for i, v in enumerate(variables))
    source = f"""kernel void k({parameters}device {kind}* o [[buffer(2)]], constant uint& count [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {{
{cases}}}"""
    out = np.zeros((len(names), count), arguments[0].dtype)
    buffers = dict(enumerate(arguments))
    library(source).run("k", {**buffers, 2: out, 3: count}, (count,), (1024,), dispatch="threads")
    return dict(zip(names, out, strict=True))


def half_ulp_errors(actual, exact):
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.clip(np.abs(exact), 2.0**-14, 65504)))
        errors = np.abs(actual.astype(np.float64) - exact) / 2.0 ** (exponent - 10)
        nearest = exact.astype(np.float16)
    same = (actual == nearest) | (np.isnan(actual) & np.isnan(nearest))
    return np.where(np.isfinite(nearest), errors, np.where(same, 0, np.inf))


def sticky(values):
    """As float32, inexact ones with an odd last bit: rounding that to 16 bits is the only rounding."""
    single = values.astype(np.float32)
    inexact = np.isfinite(values) & (single.astype(values.dtype) != values)
    down = np.where(np.abs(single.astype(values.dtype)) > np.abs(values), np.nextafter(single, np.float32(0)), single)
    return (down.view(np.uint32) | inexact).view(np.float32)


def test_unary_functions_of_half():
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    results = tabulate("half", list(HALF), x)
    for name, (allowed, reference) in HALF.items():
        with np.errstate(all="ignore"):
            exact = reference(x.astype(np.float64))
        if name in ("sinpi", "cospi", "tanpi"):  # the references know no infinity
            exact = np.where(np.isinf(x), np.nan, exact)
        errors = half_ulp_errors(results[name], exact)
        if name == "tanpi":  # poles have a sign that the reference does not have
            errors[np.abs(exact) > 1e6] = 0
        worst = int(np.argmax(errors))
        assert errors[worst] <= allowed, f"{errors[worst]} ulp at {name}({x[worst]!r}) = {results[name][worst]!r}"
    finite = np.isfinite(x)
    assert (results["fract"][finite] < 1).all()
    assert np.isnan(results["fract"][np.isnan(x)]).all()


def test_fma_of_half_rounds_once(rng):
    bits = rng.integers(0, 2**16, (3, 200_000)).astype(np.uint16)
    # A product in the middle between two halves, and something small that decides: 2^10 (1 + 2^-10)(1 + 2^-1) + tiny.
    hard = np.array([[1025.0, 1.5, 2.0**-14], [1025.0, 1.5, -(2.0**-14)], [1025.0, 1.5, 0]], np.float16)
    x, y, z = np.concatenate([bits.view(np.float16), hard.T], 1)
    source = """kernel void k(const device half* x [[buffer(0)]], const device half* y [[buffer(1)]],
    const device half* z [[buffer(2)]], device half* o [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  o[i] = fma(x[i], y[i], z[i]);
}"""
    out = np.zeros_like(x)
    library(source).run("k", {0: x, 1: y, 2: z, 3: out}, (len(x),), (1024,), dispatch="threads")
    with np.errstate(all="ignore"):  # exact in 64 bits of mantissa where the result is finite
        exact = x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)
        np.testing.assert_array_equal(out, sticky(exact).astype(np.float16))


def test_functions_of_float(rng):
    for name, (allowed, reference, ranges) in functions.UNARY.items():
        x = functions.samples(ranges, 50_000, rng)
        if name in functions.ODD_OR_EVEN:
            x[::2] *= -1
        check_float(name, allowed, reference, x)
    for name, (allowed, reference, *ranges) in functions.BINARY.items():
        check_float(name, allowed, reference, *(functions.samples(r, 50_000, rng) for r in ranges))


def check_float(name, allowed, reference, *arguments):
    actual = tabulate("float", [name], *arguments)[name]
    with np.errstate(all="ignore"):
        exact = reference(*(a.astype(np.float64) for a in arguments))
    errors = functions.ulp_errors(actual, exact)
    worst = int(np.argmax(errors))
    where = [a[worst] for a in arguments]
    assert errors[worst] <= allowed, f"{errors[worst]} ulp at {name}({where}) = {actual[worst]!r}, not {exact[worst]}"


def test_rsqrt_is_correctly_rounded():
    """Checks every mantissa and both parities of the exponent, which determine the result."""
    x = (np.arange(2**24, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    actual = tabulate("float", ["rsqrt"], x)["rsqrt"]
    np.testing.assert_array_equal(actual, (1 / np.sqrt(x.astype(np.longdouble))).astype(np.float32))


def test_ldexp_rounds_once(rng):
    x = rng.uniform(1, 2, 20_000).astype(np.float32) * np.exp2(rng.integers(-60, 60, 20_000)).astype(np.float32)
    powers = rng.integers(-210, -80, 20_000).astype(np.int32)
    source = """kernel void k(const device float* x [[buffer(0)]], const device int* e [[buffer(1)]],
    device float* o [[buffer(2)]], uint i [[thread_position_in_grid]]) { o[i] = ldexp(x[i], e[i]); }"""
    out = np.zeros_like(x)
    library(source).run("k", {0: x, 1: powers, 2: out}, (len(x),), (1024,), dispatch="threads")
    np.testing.assert_array_equal(out, np.ldexp(x.astype(np.float64), powers).astype(np.float32))


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_arithmetic_of_16_bit_types_is_correctly_rounded(rng, kind):
    """Tables 8.3 and 8.4: sums, differences, products and quotients."""
    bits = rng.integers(0, 2**16, (2, 100_000)).astype(np.uint16)

    def decode(values):
        return values.view(np.float16) if kind == "half" else from_bfloat(values)

    def encode(values):
        single = sticky(values)
        return single.astype(np.float16) if kind == "half" else from_bfloat(to_bfloat(single))

    source = f"""kernel void k(const device {kind}* x [[buffer(0)]], const device {kind}* y [[buffer(1)]],
    device float* o [[buffer(2)]], constant uint& count [[buffer(3)]], uint i [[thread_position_in_grid]]) {{
  o[i] = {kind}(x[i] + y[i]);
  o[count + i] = {kind}(x[i] - y[i]);
  o[2 * count + i] = {kind}(x[i] * y[i]);
  o[3 * count + i] = {kind}(x[i] / y[i]);
}}"""
    out = np.zeros((4, bits.shape[1]), np.float32)
    library(source).run("k", {0: bits[0], 1: bits[1], 2: out, 3: bits.shape[1]}, (bits.shape[1],), (1024,),
                        dispatch="threads")  # fmt: skip
    with np.errstate(all="ignore"):
        x, y = (decode(b).astype(np.float64) for b in bits)
        for row, exact in zip(out, (x + y, x - y, x * y, x / y), strict=True):
            expected = encode(exact).astype(np.float32)
            # The specification lets subnormal results be flushed, and processors with instructions for bfloat do.
            flushed = (np.abs(exact) < np.finfo(np.float32).tiny) & (row == 0)
            wrong = (row != expected) & ~np.isnan(exact) & ~flushed
            assert not wrong.any(), f"{row[wrong][0]} where {exact[wrong][0]} is exact"
            assert np.isnan(row[np.isnan(exact)]).all()
