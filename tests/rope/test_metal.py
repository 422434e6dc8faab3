"""What rope's Metal kernels ask of memory: every element once, whole lines, no threadgroup memory, no barriers."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from metal_profile import profile
from mlx_anvil.mslc.profile import LaunchProfile

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

# metal/rope/params.h
PARAMS = np.dtype(
    [
        ("strides", "i8", (2, 4)),
        ("heads", "i4", 2),
        *((name, "i4") for name in ("batch", "length", "head_dim", "pairs", "chunk", "chunks", "offset_step")),
        *((name, "f4") for name in ("turns_high", "turns_low", "direction")),
    ]
)
Q_HEADS, K_HEADS, LENGTH, HEAD_DIM = 4, 2, 8, 128


def params_of(pairs: int) -> np.ndarray:
    params = np.zeros(1, PARAMS)
    params["strides"] = [(heads * LENGTH * HEAD_DIM, LENGTH * HEAD_DIM, HEAD_DIM, 1) for heads in (Q_HEADS, K_HEADS)]
    params["heads"] = Q_HEADS, K_HEADS
    params["batch"] = params["chunk"] = params["direction"] = 1
    params["length"], params["head_dim"], params["pairs"] = LENGTH, HEAD_DIM, pairs
    params["chunks"] = Q_HEADS + K_HEADS
    turn = 1 / (2 * np.pi)
    params["turns_high"] = turn
    params["turns_low"] = turn - float(np.float32(turn))
    return params


def assert_every_element_once(of: LaunchProfile, bytes_of_tensors: int) -> None:
    """Of the tensors; the frequencies are read again for every row, from the cache."""
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
    offset = np.array([5], np.int32)
    with mx.stream(mx.cpu), mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        expected = mlx_anvil.rope_qk(
            mx.array(q),
            mx.array(k),
            2 * pairs,
            traditional=traditional,
            base=None,
            freqs=mx.array(freqs),
            offset=mx.array(offset),
        )
        mx.eval(expected)
    (event,) = trace.events
    outputs = np.zeros_like(q), np.zeros_like(k)
    of = profile("rope", event, [q, k, offset, freqs, *outputs, params_of(pairs)])
    for ours, want in zip(outputs, expected, strict=True):
        assert np.array_equal(ours, np.array(want)), "what was profiled did not do the work"
    assert_every_element_once(of, q.nbytes + k.nbytes)
    # Two packs of neighbouring pairs lie side by side, so that a SIMD group's first and second access touch the same
    # lines; elements that stay as they are begin a third run of lines.
    most = 1 if pairs == HEAD_DIM // 2 and not traditional else 2
    for site in of.sites:
        if site.buffer in ("q", "k", "q_out", "k_out"):
            assert site.transactions <= most * site.ideal_transactions, site
