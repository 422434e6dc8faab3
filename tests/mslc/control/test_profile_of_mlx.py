"""Profiles of MLX's own kernels, compared with what their algorithms imply."""

import numpy as np
import pytest

from mlx_anvil.mslc import PROFILED, Library
from tests.mslc.control.mlx_kernels import include_dir, source
from tests.mslc.control.test_attention import ATTENTION_PARAMS


def profiled(headers, instances, constants=None):
    return Library(
        source(headers, instances), [include_dir()], constants, defines={"MLX_METAL_JIT": 1}, options=PROFILED
    )


@pytest.mark.parametrize(("size", "looped"), [(1000, False), (4099, True)])
def test_softmax(rng, size, looped):
    """MLX's kernel for short rows reads a row once; the one for long rows reads it twice. Both write it once."""
    function = "softmax_looped" if looped else "softmax_single_row"
    kernels = profiled(["softmax.h"], [("softmax", function, "float", "float")])
    x = rng.standard_normal((2, size)).astype(np.float32)
    out = np.zeros_like(x)
    threads = 1024 if looped else 256
    report = kernels.run("softmax", {0: x, 1: out, 2: size}, (2 * threads,), (threads,), dispatch="threads")
    m = report.profile.metrics()
    assert m["device_bytes_read_unique"] == m["device_bytes_written_unique"] == m["device_bytes_written"] == x.nbytes
    assert m["device_bytes_read"] == (2 if looped else 1) * x.nbytes
    # Four elements a thread, one by one: four lines for each access, of which a whole one would do for 32 elements.
    assert m["lines_per_access"] > 3
    assert m["transcendentals"] >= x.size
    assert m["barriers"] > 0
    assert m["collectives"] > 0
    expected = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, expected / expected.sum(1, keepdims=True), rtol=1e-4)


def test_steel_attention(rng):
    """64 queries and keys of 64 elements, in blocks of 32 by 32: each block of queries reads all keys and values, once,
    and both products are done in matrices of 8 by 8."""
    length = head_dim = 64
    block = 32
    kernels = profiled(
        ["steel/attn/kernels/steel_attention.h"],
        [("attention", "attention", "half", block, block, head_dim, head_dim, 4, 1, "bool", "float")],
        {200: True, 201: True, 300: False, 301: False, 302: False, 303: False},
    )
    q, k, v = (rng.standard_normal((length, head_dim)).astype(np.float16) for _ in range(3))
    out = np.zeros_like(q)
    params = np.zeros(1, ATTENTION_PARAMS)
    strides = [[length * head_dim, length * head_dim, head_dim]] * 4
    params[0] = (1, 1, head_dim, length, length, 1, 0.125, 2, 2, 2, 2, 0, 0, 0, strides)
    report = kernels.run("attention", {0: q, 1: k, 2: v, 3: out, 4: params}, (2, 1, 1), (32, 4, 1))
    m = report.profile.metrics()
    assert m["matrix_multiplies"] == 2 * length * length * head_dim // 8**3
    assert m["device_bytes_read_unique"] == 3 * q.nbytes
    assert m["device_bytes_read"] == q.nbytes + 2 * (k.nbytes + v.nbytes)
    assert m["device_bytes_written"] == m["device_bytes_written_unique"] == out.nbytes
    assert m["transcendentals"] >= length * length
    assert m["access_utilisation"] == m["collective_utilisation"] == 1
    assert m["divergent_collectives"] == 0
    assert 0 < m["threadgroup_memory"] <= 32768
    # Rows of the tiles are padded by 16 bytes, so that the fragments of the matrices are read without bank conflicts.
    reads = [site for site in report.profile.sites if site.memory == "threadgroup" and site.kind == "read"]
    assert sum(site.accesses for site in reads) > 0
    assert sum(site.excess for site in reads) == 0
