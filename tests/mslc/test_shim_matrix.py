"""Matrix types and <metal_matrix>, pack and unpack functions."""

import itertools

import numpy as np
import pytest

from mlx_anvil.mslc import CompileError, Library
from mlx_anvil.mslc.lint import lint
from mlx_anvil.mslc.preprocess import Source
from tests.mslc.msl import HEAD, evaluate, library

SHAPES = list(itertools.product((2, 3, 4), (2, 3, 4)))  # columns, rows
# Of one product or sum.
TOLERANCES = {"float": 3e-7, "half": 2e-3}
DTYPES = {"float": np.float32, "half": np.float16}


def run(kind, body, *matrices, outputs):
    """Runs `body`, which fills o[], on matrices a, b, ... given as arrays of [rows, columns]."""
    loads, parameters = [], []
    for i, m in enumerate(matrices):
        rows, columns = m.shape
        name = "abc"[i]
        elements = ", ".join(f"{name}s[{j * rows + k}]" for j in range(columns) for k in range(rows))
        loads.append(f"{kind}{columns}x{rows} {name}({elements});")
        parameters.append(f"const device {kind}* {name}s [[buffer({i})]]")
    source = f"""kernel void k({", ".join(parameters)}, device {kind}* o [[buffer({len(matrices)})]]) {{
  {" ".join(loads)}
  {body}
}}"""
    out = np.zeros(outputs, DTYPES[kind])
    buffers = {i: np.ascontiguousarray(m.T).astype(DTYPES[kind]) for i, m in enumerate(matrices)}
    library(source).run("k", {**buffers, len(matrices): out}, (1,), (1,))
    return out.astype(np.float64)


def random_matrix(rng, kind, columns, rows):
    return rng.uniform(-1, 1, (rows, columns)).astype(DTYPES[kind]).astype(np.float64)


def evaluate_all(kind, cases, *matrices):
    """Checks expressions whose values are vectors (columns = 0) or matrices: {expression: (columns, rows,
    expected)}."""
    body, position = "", 0
    for expression, (columns, rows, _) in cases.items():
        element = "r[i][j]" if columns else "r[j]"
        body += (
            f"  {{ auto r = {expression}; for (int i = 0; i < {max(columns, 1)}; ++i) for (int j = 0; j < {rows}; ++j)"
            f" o[{position} + i * {rows} + j] = {element}; }}\n"
        )
        position += max(columns, 1) * rows
    out, position = run(kind, body, *matrices, outputs=position), 0
    for expression, (columns, rows, expected) in cases.items():
        count = max(columns, 1) * rows
        actual = out[position : position + count].reshape(-1, rows).T
        # Sums of up to four products of numbers below one.
        np.testing.assert_allclose(
            actual, np.reshape(expected, actual.shape), rtol=0, atol=TOLERANCES[kind] * 4, err_msg=expression
        )
        position += count


@pytest.mark.parametrize("kind", ["float", "half"])
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_operators(rng, kind, columns, rows):
    a, b = (random_matrix(rng, kind, columns, rows) for _ in range(2))
    c = random_matrix(rng, kind, 3, columns)
    column, row = random_matrix(rng, kind, 1, columns), random_matrix(rng, kind, 1, rows)
    name = f"{kind}{columns}x{rows}"

    def vector(values):
        return f"{kind}{len(values)}({', '.join(str(float(v)) for v in values[:, 0])})"

    of_columns = ", ".join(f"a[{i}]" for i in range(columns))
    results = {
        "a + b": a + b,
        "a - b": a - b,
        "-a": -a,
        f"a * {kind}(0.75)": a * 0.75,
        f"{kind}(3) * a": a * 3,
        f"({name}(a) += b)": a + b,
        f"({name}(a) -= b)": a - b,
        f"({name}(a) *= {kind}(2))": a * 2,
        f"{name}({kind}(5))": np.eye(rows, columns) * 5,
        f"{name}({of_columns})": a,
        f"matrix<{kind}, {columns}, {rows}>(b)": b,
        f"{name}({'half' if kind == 'float' else 'float'}{columns}x{rows}(a))": a.astype(np.float16),
    }
    cases = {expression: (columns, rows, expected) for expression, expected in results.items()}
    cases["transpose(a)"] = (rows, columns, a.T)
    cases["a * c"] = (3, rows, a @ c)
    cases[f"a * {vector(column)}"] = (0, rows, a @ column)
    cases[f"{vector(row)} * a"] = (0, columns, row.T @ a)
    evaluate_all(kind, cases, a, b, c)


@pytest.mark.parametrize("kind", ["float", "half"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_determinant(rng, kind, size):
    for _ in range(5):
        a = random_matrix(rng, kind, size, size)
        cases = {f"{kind}2(determinant(a))": (0, 2, [np.linalg.det(a)] * 2), "(a *= a)": (size, size, a @ a)}
        evaluate_all(kind, cases, a)


def test_columns_and_elements_in_every_address_space(rng):
    source = """kernel void k(device float3x3* d [[buffer(0)]], constant half3x3& c [[buffer(1)]], device float4x3& e [[buffer(2)]]) {
  threadgroup float3x3 t;
  float3x3 m = d[0];
  m[1] = float3(2);
  m[0][2] = 7;
  m[2].xy = m[2].yx;
  t = m;
  d[1] = t * float3x3(c);
  e[3] = d[0][1];
  e[0].z = c[2][1];
}"""
    d = np.zeros((2, 3, 4), np.float32)  # columns of three, padded to four
    d[0] = rng.standard_normal((3, 4))
    c = rng.standard_normal((3, 4)).astype(np.float16)
    e = np.zeros((4, 4), np.float32)
    m = d[0].copy()
    library(source).run("k", {0: d, 1: c, 2: e}, (1,), (1,))
    m[1, :3], m[0, 2] = 2, 7
    m[2, :2] = m[2, 1::-1]
    product = m[:, :3].T.astype(np.float64) @ c[:, :3].T
    np.testing.assert_allclose(d[1][:, :3].T, product, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(e[3, :3], d[0][1, :3])
    assert e[0, 2] == c[2, 1]
    assert lint(Source(HEAD + source)) == []


def test_layout_of_the_specification():
    sizes = {"half": (2, {2: 4, 3: 8, 4: 8}), "float": (4, {2: 8, 3: 16, 4: 16})}
    checks = [
        f'static_assert(sizeof({kind}{c}x{r}) == {c * column[r]} && alignof({kind}{c}x{r}) == {column[r]}, "");'
        for kind, (_, column) in sizes.items()
        for c, r in SHAPES
    ]
    assert evaluate("a", np.arange(2, dtype=np.int32), out="int32", prelude="\n".join(checks)).tolist() == [0, 1]


@pytest.mark.parametrize(
    "declaration",
    ["float2x3 m(float2(1), 2.0f, float2(3), 4.0f)", "float2x2 m(1.0f, 2.0f, 3.0f)", "float2x2 m = 1.0f",
     "float2x2 m(float3(1), float3(2))", "float3x3 m(float2x2(1.0f))"],
)  # fmt: skip
def test_wrong_constructors_are_errors(declaration):
    with pytest.raises(CompileError, match=r"no matching constructor|no viable conversion"):
        Library(f"{HEAD}kernel void k(device float* o [[buffer(0)]]) {{ {declaration}; o[0] = m[0][0]; }}")


# ---- pack and unpack: the conversion rules of the specification's tables 8.6 and 8.7

LAYOUTS = {"4x8": (8, 8, 8, 8), "2x16": (16, 16), "10a2": (10, 10, 10, 2), "565": (5, 6, 5)}
FORMATS = [(sign, name) for name in LAYOUTS for sign in ("unorm", "snorm") if (sign, name) != ("snorm", "565")]


def shifts(name):
    widths = LAYOUTS[name]
    if name == "565":  # red is the highest
        return list(zip((11, 5, 0), widths, strict=True))
    return list(zip(np.cumsum([0, *widths[:-1]]).tolist(), widths, strict=True))


def reference_pack(values, sign, name):
    packed = np.zeros(len(values), np.uint64)
    for v, (shift, width) in zip(values.astype(np.float32).T, shifts(name), strict=True):
        largest = np.float32(2 ** (width - (sign == "snorm")) - 1)
        code = np.rint(np.clip(np.nan_to_num(v * largest, nan=0), -largest if sign == "snorm" else 0, largest))
        packed |= (code.astype(np.int64) & (2**width - 1)).astype(np.uint64) << np.uint64(shift)
    return packed


def reference_unpack(codes, sign, name):
    parts = []
    for shift, width in shifts(name):
        code = codes.astype(np.int64) >> shift & (2**width - 1)
        if sign == "snorm":
            code = np.where(code >> (width - 1), code - 2**width, code)
        parts.append(np.maximum(code / (2 ** (width - (sign == "snorm")) - 1), -1))
    return np.stack(parts, -1)


@pytest.mark.parametrize("kind", ["float", "half"])
@pytest.mark.parametrize(("sign", "name"), FORMATS)
def test_pack_and_unpack(rng, kind, sign, name):
    dtype, size = DTYPES[kind], len(LAYOUTS[name])
    vector = f"{kind}{size}" if size != 3 else f"packed_{kind}3"
    code = "ushort" if name == "565" else "uint"
    values = rng.uniform(-1.3, 1.3, (2000, size)).astype(dtype)
    values[:4] = [[np.nan], [np.inf], [-np.inf], [-1]]
    packed = evaluate(
        f"pack_{kind}_to_{sign}{name}({kind}{size}(a))", values, out=f"{'uint16' if code == 'ushort' else 'uint32'}",
        types=(vector,)
    )  # fmt: skip
    np.testing.assert_array_equal(packed, reference_pack(values, sign, name))

    codes = rng.integers(0, 2**16 if name == "565" else 2**32, 2000).astype(f"uint{16 if name == '565' else 32}")
    actual = evaluate(f"unpack_{sign}{name}_to_{kind}(a)", codes, out=f"{np.dtype(dtype).name}:{vector}:{size}")
    # 1.5 units in the last place, as the specification bounds it.
    expected = reference_unpack(codes, sign, name)
    np.testing.assert_allclose(actual, expected, rtol=1.5 * np.finfo(dtype).eps, atol=6e-8 if kind == "half" else 0)
    np.testing.assert_array_equal(
        evaluate(f"unpack_{sign}{name}_to_{kind}(a)", np.array([0, 2**16 - 1 if name == "565" else 2**32 - 1], codes.dtype),
                 out=f"{np.dtype(dtype).name}:{vector}:{size}")[0], 0)  # fmt: skip


@pytest.mark.parametrize("kind", ["float", "half"])
def test_pack_and_unpack_srgb(rng, kind):
    codes = np.arange(256, dtype=np.uint32) * np.uint32(0x01010101)
    actual = evaluate(f"float4(unpack_unorm4x8_srgb_to_{kind}(a))", codes, out="float32:float4:4")
    encoded = np.arange(256) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    bound = 2e-6 if kind == "float" else 1e-3
    np.testing.assert_allclose(actual[:, :3], np.stack([linear] * 3, -1), rtol=bound, atol=1e-7)
    np.testing.assert_allclose(actual[:, 3], encoded, rtol=bound)
    # Every code comes back.
    there_and_back = f"pack_{kind}_to_srgb_unorm4x8(unpack_unorm4x8_srgb_to_{kind}(a))"
    np.testing.assert_array_equal(evaluate(there_and_back, codes, out="uint32"), codes)
