"""simulate(): where it applies, and that the Metal kernel runs."""

import os
import re
import subprocess
import sys
import threading

import mlx.core as mx
import pytest

import mlx_anvil
from mlx_anvil.mslc import install_command
from mlx_anvil.reference import DTYPES
from support import assert_same_bits, max_error, vjp_of

pytestmark = pytest.mark.cpu_only  # each test says itself where it simulates


def devices(trace: mlx_anvil.Trace) -> set[str]:
    return {event.device for event in trace.events}


def pair(dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    arrays = [mx.random.normal((37, 101)).astype(dtype) for _ in range(2)]
    mx.eval(arrays)
    return arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_metal_and_cpu_kernels_agree(dtype):
    gate, up = pair(dtype)
    cotangent = pair(dtype)[0]
    native = [mlx_anvil.silu_gate(gate, up), *vjp_of(mlx_anvil.silu_gate, 2)(gate, up, cotangent)]
    with mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        simulated = [mlx_anvil.silu_gate(gate, up), *vjp_of(mlx_anvil.silu_gate, 2)(gate, up, cotangent)]
        mx.eval(simulated)
    assert devices(trace) == {"simulator"}
    tolerance = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
    for a, b in zip(simulated, native, strict=True):
        assert max_error(a, b) <= tolerance


def test_the_schedule_does_not_matter():
    gate, up = pair()
    results = []
    for seed in (0, 1, 2):
        with mlx_anvil.simulate(seed=seed):
            results.append(mlx_anvil.silu_gate(gate, up.T.reshape(up.shape)))
            mx.eval(results)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_an_op_remembers_where_it_was_called():
    gate, up = pair()
    with mlx_anvil.simulate():
        inside = mlx_anvil.silu_gate(gate, up)
    outside = mlx_anvil.silu_gate(gate, up)
    with mlx_anvil.trace() as trace:
        mx.eval(inside)
    assert devices(trace) == {"simulator"}
    with mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        mx.eval(outside)
    assert devices(trace) == {f"cpu ({mlx_anvil.info()['isa']})"}


def test_derivatives_are_simulated_too():
    gate, up = pair()

    def op(g, u):
        with mlx_anvil.simulate():
            return mlx_anvil.silu_gate(g, u)

    for transformed in (
        lambda: mx.vjp(op, [gate, up], [up])[1],
        lambda: mx.jvp(op, [gate, up], [gate, up])[1],
        lambda: mx.vmap(op)(gate, up),
        lambda: mx.compile(op)(gate, up),
    ):
        with mlx_anvil.trace() as trace:
            mx.eval(transformed())
        assert devices(trace) == {"simulator"}


def test_compiled_calls_inside_and_outside_stay_apart():
    gate, up = pair()

    @mx.compile
    def both(g, u):
        with mlx_anvil.simulate():
            simulated = mlx_anvil.silu_gate(g, u)
        return simulated + mlx_anvil.silu_gate(g, u)

    with mlx_anvil.trace() as trace:
        mx.eval(both(gate, up))
    assert len(trace.kernels) == 2


def test_other_threads_are_not_simulated():
    gate, up = pair()
    seen = []

    def work():
        with mlx_anvil.trace() as trace:
            mx.eval(mlx_anvil.silu_gate(gate, up, stream=mx.new_stream(mx.cpu)))
        seen.append(devices(trace))

    with mlx_anvil.simulate():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [{f"cpu ({mlx_anvil.info()['isa']})"}]


def test_ended_by_an_exception():
    with pytest.raises(KeyError), mlx_anvil.simulate():
        raise KeyError
    with mlx_anvil.trace() as trace:
        mx.eval(mlx_anvil.silu_gate(*pair()))
    assert "simulator" not in devices(trace)


def test_a_profile_of_each_launch():
    gate, up = pair()
    with mlx_anvil.simulate(profiled=True) as profiles, mlx_anvil.trace() as trace:
        product = mlx_anvil.silu_gate(gate, up)
        (gradient,) = mx.vjp(lambda x: mlx_anvil.silu_gate(x, up), [gate], [up])[1]
        assert profiles == []
        mx.eval(product, gradient)
    assert_same_bits(product, simulated_product(gate, up))
    assert sorted(p.kernel for p in profiles) == sorted(re.sub(r"(_c\d+[tf])+$", "", name) for name in trace.kernels)
    forward = next(p for p in profiles if "forward" in p.kernel)
    assert forward.metrics()["device_bytes_read_unique"] == gate.nbytes + up.nbytes
    assert forward.metrics()["device_bytes_written_unique"] == product.nbytes
    with mlx_anvil.simulate(profiled=True) as later:
        mx.eval(mlx_anvil.silu_gate(gate, up))
    assert len(later) == 1
    with mlx_anvil.simulate() as none:
        mx.eval(mlx_anvil.silu_gate(gate, up))
    assert none == []


def simulated_product(gate: mx.array, up: mx.array) -> mx.array:
    with mlx_anvil.simulate():
        product = mlx_anvil.silu_gate(gate, up)
        mx.eval(product)
        return product


def test_checks_or_a_profile():
    with pytest.raises(ValueError, match=r"^\[simulate\] checked and profiled are both True; allowed: at most one"):
        mlx_anvil.simulate(checked=True, profiled=True)


def test_bad_seed():
    with pytest.raises(ValueError, match=r"^\[simulate\] seed is -1; allowed: 0 to 2"), mlx_anvil.simulate(seed=-1):
        pass


def test_without_a_compiler():
    code = "import sys; sys.modules['ziglang'] = None; import mlx_anvil\nwith mlx_anvil.simulate(): pass"
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith(f"is not installed: {install_command('sim')}")


FAULTY_KERNEL = """
import mlx.core as mx, mlx_anvil
from mlx_anvil import _ext
one_kernel = _ext._kernel_source
source = one_kernel("silu_gate_forward_float32_flat")
whole = source.replace("at < size)", "at < size + 8)").replace("metal::min(long(kSize), size - at)", "1")
assert whole != source
_ext._kernel_source = lambda name: whole
x = mx.ones((1024,))
with mlx_anvil.simulate(checked=True):
    try:
        mx.eval(mlx_anvil.silu_gate(x, x))
        print("nothing found")
    except RuntimeError as error:
        print(error)
_ext._kernel_source = one_kernel
native = mlx_anvil.silu_gate(x, x)
mx.eval(native)
with mlx_anvil.simulate(checked=True):
    print("after:", mx.allclose(mlx_anvil.silu_gate(x[1:], x[1:]), native[1:]).item())
"""


def test_a_finding_names_its_place_and_spoils_nothing():
    run = subprocess.run([sys.executable, "-c", FAULTY_KERNEL], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert "[silu_gate] simulation of silu_gate_forward_float32_flat:" in lines
    place = re.compile(r"metal/common/strided_pack\.h:\d+:\d+: .*out of bounds.*buffer '(gate|up|out)'")
    assert place.search(run.stdout), run.stdout
    assert lines[-1] == "after: True"
