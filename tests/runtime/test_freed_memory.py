"""MLX keeps freed memory for large outputs (csrc/common/freed_memory.h)."""

import sys

import mlx.core as mx
import pytest

from tests.runtime.test_threads import run_script

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(mx.metal.is_available(), reason="with Metal, MLX keeps freed memory by itself"),
]

# Twice an output of 64 MB, of which the first is dropped; `limit` reads MLX's limit without changing it.
PRELUDE = """
import mlx.core as mx
import mlx_anvil
gate = up = mx.ones((4096, 4096))
mx.eval(gate)
def call():
    mx.eval(mlx_anvil.silu_gate(gate, up))
def limit():
    value = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(value)
    return value
"""


def script(code: str) -> str:
    return run_script(PRELUDE + code)


def test_memory_of_a_large_output_is_kept_for_the_next():
    kept, limit, memory_limit = map(
        int, script("call(); print(mx.get_cache_memory(), limit(), mx.get_memory_limit())").split()
    )
    assert kept >= 64 << 20
    assert limit == memory_limit // 4


def test_small_outputs_change_nothing():
    assert script("mx.eval(mlx_anvil.silu_gate(gate[:8], up[:8])); print(limit())") == str(32 << 20)


def test_limit_of_the_program_stays():
    assert script("mx.set_cache_limit(40 << 20); call(); print(limit())") == str(40 << 20)
    assert script("call(); mx.set_cache_limit(40 << 20); call(); print(limit())") == str(40 << 20)


def test_clear_cache_gives_it_back():
    assert script("call(); mx.clear_cache(); print(mx.get_cache_memory())") == "0"


def test_kept_memory_stays_within_the_memory_limit():
    """An output of another size cannot reuse kept memory. Without room for both, the kept memory is released first."""
    code = """
    import time
    call()
    assert mx.get_cache_memory() >= 64 << 20
    time.sleep(0.1)  # the machine's state is looked at now and then
    mx.set_memory_limit(mx.get_active_memory() + (80 << 20))
    mx.eval(mlx_anvil.silu_gate(gate[:2048], up[:2048]))
    print(mx.get_active_memory() + mx.get_cache_memory() <= mx.get_memory_limit())
    """
    assert script("\n".join(line.strip() for line in code.splitlines())) == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_available_memory_is_that_of_the_system():
    from mlx_anvil import _ext

    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    available, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    ours = _ext._available_memory()
    assert 0 < ours <= total
    assert ours <= available + total // 10
