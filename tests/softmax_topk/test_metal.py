"""Memory accesses of softmax_topk's Metal kernels: every byte once, no barriers, no threadgroup memory."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

ROWS, CHOSEN = 16, 8


@pytest.mark.parametrize("experts", [64, 128, 512])
def test_every_byte_once(experts: int, rng: np.random.Generator):
    logits = rng.standard_normal((ROWS, experts)).astype(np.float16)
    d_weights = rng.standard_normal((ROWS, CHOSEN)).astype(np.float16)

    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        x = mx.array(logits)
        mx.eval(mlx_anvil.softmax_topk(x, CHOSEN))
        mx.eval(mx.vjp(lambda x: mlx_anvil.softmax_topk(x, CHOSEN)[0], [x], [mx.array(d_weights)])[1])
    forward, backward = profiles[0], profiles[-1]
    assert forward.kernel.startswith("softmax_topk_forward")
    assert backward.kernel.startswith("softmax_topk_backward")

    chosen_logits, indices = d_weights.nbytes, 4 * ROWS * CHOSEN
    budgets = (
        (forward, logits.nbytes, d_weights.nbytes + indices),
        (backward, chosen_logits + d_weights.nbytes + indices, logits.nbytes),
    )
    for of, read, written in budgets:
        metrics = of.metrics()
        assert metrics["device_bytes_read"] == read
        assert metrics["device_bytes_written"] == metrics["device_bytes_written_unique"] == written
        assert metrics["bank_conflicts"] == of.barriers == 0
    assert forward.metrics()["coalescing"] == 1.0
