"""The PTX target's maths functions, compiled for this machine: the polynomials and reductions are the same there.

Only the machine's two approximations are replaced, by ones that are off by as much as PTX promises.
"""

import ctypes
import re

import functions
import make_bundle
import numpy as np
import pytest

from mlx_anvil.mslc import Source
from mlx_anvil.mslc.compiler import LANGUAGE_FLAGS
from mlx_anvil.mslc.ptx import compile_ptx
from mlx_anvil.mslc.toolchain import SHIM, link_shared, require, run_tool
from tests.mslc.ptx_interpreter import Kernel

HOST = """
typedef unsigned int uint;
typedef unsigned long ulong;
#define MSLC_INLINE static inline __attribute__((always_inline))
namespace mslc::approx {
// The relative error that PTX allows ex2.approx, 2^-22.5, and rsqrt.approx, 2^-22.9: up or down by the last bit of x.
MSLC_INLINE float exp2(float x) {
  const float sign = __builtin_bit_cast(uint, x) & 1 ? 1.0f : -1.0f;
  return x == __builtin_rintf(x) ? __builtin_exp2f(x) : float(__builtin_exp2((double)x) * (1 + sign * 0x1p-23));
}
MSLC_INLINE float rsqrt(float x) {
  const float sign = __builtin_bit_cast(uint, x) & 1 ? 1.0f : -1.0f;
  return float(1.0 / __builtin_sqrt((double)x) * (1 + sign * 0x1p-23));
}
}  // namespace mslc::approx
#include "gpu/trigonometry_gpu.h"
"""


@pytest.fixture(scope="module")
def host_functions(tmp_path_factory):
    directory = tmp_path_factory.mktemp("math")
    loops = [
        f'extern "C" void math_{name}(const float* a, {"const float* b, " if name in functions.BINARY else ""}float* o, '
        f"long n) {{ for (long i = 0; i < n; ++i) o[i] = "
        f"mslc::target::{name}(a[i]{', b[i]' if name in functions.BINARY else ''}); }}\n"
        for name in (*functions.UNARY, *functions.BINARY)
    ]
    source, compiled, library = (directory / name for name in ("math.cpp", "math.o", "math.so"))
    source.write_text(HOST + "".join(loops))
    # As kernels are compiled. This machine fuses less than the GPU: test_ptx.py looks at what is left to fuse there.
    fusing = [flag for flag in LANGUAGE_FLAGS if flag.startswith("-ffp-contract")]
    flags = ["-std=c++20", "-O2", "-fPIC", "-march=native", *fusing, "-fno-math-errno", f"-I{SHIM}"]
    require(run_tool(["cc", "-x", "c++", *flags, "-c", str(source), "-o", str(compiled)]), "compiling")
    ctypes.CDLL("libm.so.6", ctypes.RTLD_GLOBAL)
    link_shared([str(compiled)], library)
    loaded = ctypes.CDLL(str(library))

    def call(name, *arguments):
        out = np.zeros_like(arguments[0])
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arguments, out)]
        loaded[f"math_{name}"](*pointers, ctypes.c_long(len(out)))
        return out

    return call


def assert_accurate(call, name, allowed, reference, arguments):
    with np.errstate(all="ignore"):
        exact = reference(*(a.astype(np.float64) for a in arguments))
    actual = call(name, *arguments)
    errors = functions.ulp_errors(actual, exact)
    worst = int(np.argmax(errors))
    arguments = ", ".join(repr(a[worst]) for a in arguments)
    assert errors[worst] <= allowed, (
        f"{errors[worst]} ulp at {name}({arguments}) = {actual[worst]!r}, not {exact[worst]}"
    )


@pytest.mark.parametrize("name", functions.UNARY)
def test_accuracy_of_unary_functions(host_functions, rng, name):
    allowed, reference, ranges = functions.UNARY[name]
    x = functions.samples(ranges, 100_000, rng)
    if name in functions.ODD_OR_EVEN:
        x[::2] *= -1
    if name == "tanpi":  # poles have a sign that the reference does not have
        x = x[np.mod(2 * x, 2) != 1]
    assert_accurate(host_functions, name, allowed, reference, (x,))


@pytest.mark.parametrize("name", functions.BINARY)
def test_accuracy_of_binary_functions(host_functions, rng, name):
    allowed, reference, *ranges = functions.BINARY[name]
    arguments = tuple(functions.samples(r, 100_000, rng) for r in ranges)
    assert_accurate(host_functions, name, allowed, reference, arguments)


def test_rsqrt_is_correctly_rounded(host_functions):
    """Checks every mantissa and both parities of the exponent, which determine the result."""
    x = (np.arange(2**24, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    exact = (1 / np.sqrt(x.astype(np.longdouble))).astype(np.float32)
    np.testing.assert_array_equal(host_functions("rsqrt", x), exact)


@pytest.fixture(scope="module")
def compiled_kernels():
    text = compile_ptx(Source.load(make_bundle.math_source())).text
    return dict(re.findall(r"\.entry math_(\w+)\(.*?^\{(.*?)^\}", text, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", ["exp", "exp10", "log", "log10", "log2", "pow", "rsqrt", "tanh"])
def test_accuracy_of_compiled_kernels(compiled_kernels, rng, name):
    """Executes the PTX itself, in which the compiler could have fused or reordered operations."""
    allowed, reference, *ranges = functions.UNARY.get(name) or functions.BINARY[name]
    ranges = [ranges[0]] if name in functions.UNARY else ranges
    kernel = Kernel(compiled_kernels[name])
    arguments = tuple(functions.samples(r, 500, rng) for r in ranges)
    if name == "pow":  # where the sum of a fused product was off by 42 units
        arguments = tuple(np.append(a, np.float32(x)) for a, x in zip(arguments, (0.9049748, -499.7996), strict=True))
    out = np.array([kernel(*values) for values in zip(*arguments, strict=True)], np.float32)
    assert_accurate(lambda *_: out, name, allowed, reference, arguments)


@pytest.mark.parametrize("name", [*functions.SPECIAL, *functions.SPECIAL_PAIRS])
def test_special_values(host_functions, name):
    pairs = functions.SPECIAL_PAIRS.get(name) or [((x,), y) for x, y in functions.SPECIAL[name]]
    for values, expected in pairs:
        arguments = [np.array([value], np.float32) for value in values]
        with np.errstate(all="ignore"):
            wanted = np.float32(
                np.fmod(*(a[0].astype(np.float64) for a in arguments)) if expected is None else expected
            )
        actual = host_functions(name, *arguments)[0]
        same = np.isnan(actual) if np.isnan(wanted) else actual.tobytes() == wanted.tobytes()
        assert same, f"{name}{values} = {actual!r}, not {wanted!r}"
