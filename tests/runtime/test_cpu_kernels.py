"""The SIMD layer, in every build that this machine can run: conversions, exp over its whole range, agreement."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil import _ext
from mlx_anvil.reference import DTYPES
from support import isas, max_error, on_isa, to_numpy, vjp_of

pytestmark = pytest.mark.cpu_only

ISAS = isas()


@pytest.fixture(params=ISAS)
def isa(request):
    with on_isa(request.param):
        yield request.param


def probe(name: str, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    _ext._probe(name, x, out)
    return out


def every_1024th_float() -> np.ndarray:
    """4 million of the 4 billion floats: all exponents, both signs, NaNs and infinities."""
    bits = np.arange(0, 2**32, 1024, dtype=np.uint64) + np.random.default_rng().integers(0, 1024)
    return bits.astype(np.uint32).view(np.float32)


def to_float32(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def error_in_ulp(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        ulp = np.maximum(np.spacing(np.abs(exact.astype(np.float32))).astype(np.float64), 2.0**-149)
        return np.abs(result.astype(np.float64) - exact) / ulp


def test_exp_over_its_whole_range(isa):
    x = every_1024th_float()
    result = probe("exp", x)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.exp(x.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(result), np.isnan(x))
    finite = exact <= np.finfo(np.float32).max
    assert np.isposinf(result[~finite & ~np.isnan(x)]).all()
    bound = 1.4 if isa == "baseline" else 1.1  # with and without fused multiply-add
    assert error_in_ulp(result[finite], exact[finite]).max() <= bound
    assert probe("exp", np.zeros(1, np.float32))[0] == 1


@pytest.mark.parametrize("name", ["exp_nonpositive", "exp_nonpositive_float16", "exp_nonpositive_bfloat16"])
def test_exp_nonpositive_over_its_whole_range(isa, name):
    x = every_1024th_float()
    x = x[~(x > 0)]
    result = probe(name, x).astype(np.float64)
    inside = x > -87.336
    with np.errstate(invalid="ignore"):
        exact = np.exp(x[inside].astype(np.float64))
    half = 2.0**-17 if isa == "baseline" else 2.0**-18
    bound = {"exp_nonpositive": 1.4 * 2.0**-23, "exp_nonpositive_float16": half, "exp_nonpositive_bfloat16": 2.0**-13}[
        name
    ]
    assert (np.abs(result[inside] - exact) / exact).max() <= bound
    assert (result[~inside] == 0).all()  # NaN among them


@pytest.mark.parametrize("name", ["exp2_bounded", "exp2_bounded_float16"])
def test_exp2_bounded_over_its_whole_range(isa, name):
    x = every_1024th_float()
    x = x[~(x >= 126)]
    result = probe(name, x).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(x))
    inside = x >= -125.5
    exact = np.exp2(x[inside].astype(np.float64))
    bound = {"exp2_bounded": 1.5 * 2.0**-23, "exp2_bounded_float16": 2.0**-18}[name]
    assert (np.abs(result[inside] - exact) / exact).max() <= bound
    assert (np.abs(result[x < -125.5]) <= 2.0**-125).all()
    assert probe(name, np.array([-np.inf], np.float32))[0] == 0
    assert probe(name, np.zeros(1, np.float32))[0] == 1


def test_tanh_over_its_whole_range(isa):
    x = every_1024th_float()
    result = probe("tanh", x)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(x))
    number = ~np.isnan(x)
    assert np.abs(result[number] - np.tanh(x[number].astype(np.float64))).max() <= 2e-7


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_conversions_round_to_nearest_even(isa, dtype):
    """Compares with MLX's conversion for 16 million floats and for every value halfway between two 16-bit ones."""
    sixteen = np.arange(2**16, dtype=np.uint32)
    neighbours = to_float32(mx.array(sixteen.astype(np.uint16)).view(dtype))
    finite = neighbours[np.isfinite(neighbours)].astype(np.float64)
    halfway = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    for x in (every_1024th_float(), neighbours, halfway, np.nextafter(halfway, np.float32(np.inf))):
        name = str(dtype).removeprefix("mlx.core.")
        result = probe(name, x)
        exact = to_float32(mx.array(x).astype(dtype))
        if isa in ("avx512_bf16", "amx") and dtype == mx.bfloat16:  # the instruction takes subnormal numbers for zero
            exact = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), exact)
        np.testing.assert_array_equal(np.isnan(result), np.isnan(x))
        np.testing.assert_array_equal(result[~np.isnan(x)], exact[~np.isnan(x)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_build_is_accurate(isa, dtype):
    gate, up, dy = (mx.random.normal((7, 333)).astype(dtype) for _ in range(3))
    wide = [x.astype(mx.float32) for x in (gate, up, dy)]
    ulp = {mx.float32: 2e-6, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
    exact = [mlx_anvil.reference.silu_gate(*wide[:2]), *vjp_of(mlx_anvil.reference.silu_gate, 2)(*wide)]
    results = [mlx_anvil.silu_gate(gate, up), *vjp_of(mlx_anvil.silu_gate, 2)(gate, up, dy)]
    for result, want in zip(results, exact, strict=True):
        assert max_error(result, want) <= ulp
    # Rounded once: relative to each element, not only to the largest. (The gradient in gate has zeros of its own.)
    for result, want in ((results[0], exact[0]), (results[2], exact[2])):
        error = np.abs(to_numpy(result) - to_numpy(want))
        assert (error <= 1.05 * ulp * np.abs(to_numpy(want)) + 1e-7).all()


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_build_rotates(isa, dtype, traditional):
    """Blocks of bfloat16 have their own order (load_block), also on machines without bfloat16 instructions."""
    x = mx.random.normal((2, 5, 9, 128)).astype(dtype)
    wide = mlx_anvil.reference.rope(x.astype(mx.float32), 128, traditional=traditional, offset=7)
    ulp = {mx.float32: 2e-6, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
    assert max_error(mlx_anvil.rope(x, 128, traditional=traditional, offset=7), wide) <= ulp


def test_unknown_instruction_set():
    with pytest.raises(ValueError, match=r"^\[set_isa\] nonsense is not supported"):
        _ext._set_isa("nonsense")


def run_python(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return run.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ISAS)
def test_instruction_set_from_the_environment(name):
    assert run_python("import mlx_anvil; print(mlx_anvil.info()['isa'])", MLX_ANVIL_ISA=name) == name


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no AMX")
def test_small_signal_stacks_and_tiles():
    """Linux allows one or the other. The stack that exists first stays, and with a lower instruction set any does."""
    code = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

def stacks():
    return ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None)

memory = ctypes.create_string_buffer(4096)
"""
    isa = "import mlx_anvil; isa = mlx_anvil.info()['isa']"
    assert run_python(f"{code}\n{isa}\nprint(isa, stacks())") == "amx -1"
    assert run_python(f"{code}\nbefore = stacks()\n{isa}\nprint(isa, before)") == "avx512_bf16 0"
    assert run_python(f"{code}\n{isa}\nprint(isa, stacks())", MLX_ANVIL_ISA="avx512_bf16") == "avx512_bf16 0"


def test_thread_count_from_the_environment():
    code = """
import hashlib, mlx.core as mx, mlx_anvil
mx.random.seed(1)
gate, up = mx.random.normal((999, 777)), mx.random.normal((999, 777))
print(mlx_anvil.info()["threads"], hashlib.sha256(bytes(memoryview(mlx_anvil.silu_gate(gate, up)))).hexdigest())
"""
    assert_same_on_one_thread(code)


def test_attention_does_not_depend_on_the_thread_count():
    """The bits depend neither on the number of threads nor on the schedule that it selects for the backward."""
    code = """
import hashlib, mlx.core as mx, mlx_anvil
mx.random.seed(1)
digest = hashlib.sha256()
for heads, q_len, kv_len, head_dim in ((3, 333, 400, 64), (1, 129, 203, 40), (4, 3, 5000, 128), (2, 1, 2000, 64)):
    for dtype in (mx.float32, mx.bfloat16):
        q, d_out = (mx.random.normal((1, 2 * heads, q_len, head_dim)).astype(dtype) for _ in range(2))
        k, v = (mx.random.normal((1, heads, kv_len, head_dim)).astype(dtype) for _ in range(2))
        results = mx.vjp(lambda *x: mlx_anvil.flash_attention(*x, mask="causal"), [q, k, v], [d_out])
        for x in (*results[0], *results[1]):
            digest.update(bytes(memoryview(x.astype(mx.float32))))
print(mlx_anvil.info()["threads"], digest.hexdigest())
"""
    assert_same_on_one_thread(code)


def test_quantized_attention_does_not_depend_on_the_thread_count():
    code = """
import hashlib, mlx.core as mx, mlx_anvil
mx.random.seed(1)
digest = hashlib.sha256()
for q_len, kv_len, head_dim in ((1, 5000, 128), (3, 2000, 64), (40, 333, 64)):
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        q = mx.random.normal((1, 4, q_len, head_dim)).astype(dtype)
        k, v = (mx.quantize(mx.random.normal((1, 2, kv_len, head_dim)).astype(dtype)) for _ in range(2))
        out = mlx_anvil.flash_attention(q, k, v, mask="causal")
        digest.update(bytes(memoryview(out.astype(mx.float32))))
print(mlx_anvil.info()["threads"], digest.hexdigest())
"""
    assert_same_on_one_thread(code)


def assert_same_on_one_thread(code: str) -> None:
    """`code` prints the number of threads and a digest of results."""
    one, digest_of_one = run_python(code, OMP_NUM_THREADS="1").split()
    two, digest_of_two = run_python(code, OMP_NUM_THREADS="2").split()
    assert one == "1"
    assert int(two) <= 2
    assert digest_of_one == digest_of_two
