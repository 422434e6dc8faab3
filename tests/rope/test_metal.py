"""Memory accesses of rope's Metal kernels: every element once, whole lines, no threadgroup memory, no barriers."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from mlx_anvil.mslc.profile import LaunchProfile

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

Q_HEADS, K_HEADS, LENGTH, HEAD_DIM = 4, 2, 8, 128


def assert_every_element_once(of: LaunchProfile, bytes_of_tensors: int) -> None:
    """Every element of the tensors is accessed once. The frequencies are read again for every row, from the cache."""
    metrics = of.metrics()
    read = sum(site.bytes for site in of.sites if site.buffer in ("q", "k") and site.kind == "read")
    assert read == bytes_of_tensors
    assert metrics["device_bytes_written"] == metrics["device_bytes_written_unique"] == bytes_of_tensors
    assert metrics["bank_conflicts"] == of.barriers == of.threadgroup_memory == 0


@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("pairs", [HEAD_DIM // 2, HEAD_DIM // 4], ids=["whole", "half"])
def test_queries_and_keys(pairs: int, traditional: bool, rng: np.random.Generator):
    q, k = (rng.standard_normal((1, n, LENGTH, HEAD_DIM)).astype(np.float16) for n in (Q_HEADS, K_HEADS))
    freqs = (10000.0 ** (np.arange(pairs) / pairs)).astype(np.float32)
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(
            mlx_anvil.rope_qk(
                mx.array(q),
                mx.array(k),
                2 * pairs,
                traditional=traditional,
                base=None,
                freqs=mx.array(freqs),
                offset=mx.array([5]),
            )
        )
    (of,) = profiles
    assert_every_element_once(of, q.nbytes + k.nbytes)
    # Two packs of neighbouring pairs lie side by side, so that a SIMD group's first and second access touch the same
    # lines; elements that stay as they are begin a third run of lines.
    most = 1 if pairs == HEAD_DIM // 2 and not traditional else 2
    for site in of.sites:
        if site.buffer in ("q", "k", "q_out", "k_out"):
            assert site.transactions <= most * site.ideal_transactions, site
