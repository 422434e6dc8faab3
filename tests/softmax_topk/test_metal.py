"""What the Metal kernels of softmax_topk ask of memory: every byte once, no barriers, no threadgroup memory."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil
from metal_profile import profile

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

# metal/softmax_topk/params.h
PARAMS = np.dtype([("rows", "u4"), ("experts", "u4"), ("chosen", "u4")])
ROWS, CHOSEN = 16, 8


@pytest.mark.parametrize("experts", [64, 128, 512])
def test_every_byte_once(experts: int, rng: np.random.Generator):
    logits = rng.standard_normal((ROWS, experts)).astype(np.float16)
    d_weights = rng.standard_normal((ROWS, CHOSEN)).astype(np.float16)
    params = np.array([(ROWS, experts, CHOSEN)], PARAMS)

    def router(x: mx.array) -> tuple[mx.array, mx.array]:
        return mlx_anvil.softmax_topk(x, CHOSEN)

    with mx.stream(mx.cpu), mlx_anvil.simulate(), mlx_anvil.trace() as trace:
        x = mx.array(logits)
        expected = router(x)
        gradient = mx.vjp(lambda x: router(x)[0], [x], [mx.array(d_weights)])[1][0]
        mx.eval(expected)
        mx.eval(gradient)

    weights, indices = np.zeros_like(d_weights), np.zeros((ROWS, CHOSEN), np.uint32)
    d_logits = np.zeros_like(logits)
    forward = profile("softmax_topk", trace.events[0], [logits, weights, indices, params])
    backward = profile("softmax_topk", trace.events[-1], [logits, indices, d_weights, d_logits, params])
    for ours, want in zip((weights, indices, d_logits), (*expected, gradient), strict=True):
        assert np.array_equal(ours, np.array(want)), "what was profiled did not do the work"

    chosen_logits = d_weights.nbytes
    budgets = (
        (forward, logits.nbytes, weights.nbytes + indices.nbytes),
        (backward, chosen_logits + d_weights.nbytes + indices.nbytes, logits.nbytes),
    )
    for of, read, written in budgets:
        metrics = of.metrics()
        assert metrics["device_bytes_read"] == read
        assert metrics["device_bytes_written"] == metrics["device_bytes_written_unique"] == written
        assert metrics["bank_conflicts"] == of.barriers == 0
    assert forward.metrics()["coalescing"] == 1.0
