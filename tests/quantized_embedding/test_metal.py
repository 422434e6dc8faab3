"""Memory accesses of quantized_embedding's Metal kernel: it reads the requested rows once and writes every result
once."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_anvil

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

ROWS, COLUMNS, GROUP = 32, 512, 64


@pytest.mark.parametrize("bits", [4, 8])
def test_only_the_rows_asked_for(bits: int, rng: np.random.Generator):
    ids = rng.choice(ROWS, 6, replace=False).astype(np.uint32)
    with mx.stream(mx.cpu):
        full = mx.array(rng.standard_normal((ROWS, COLUMNS)).astype(np.float16))
        matrix = mx.quantize(full, GROUP, bits)
        with mlx_anvil.simulate(profiled=True) as profiles:
            out = mlx_anvil.quantized_embedding(mx.array(ids), *matrix, group_size=GROUP, bits=bits)
            mx.eval(out)
    (of,) = profiles

    codes = len(ids) * COLUMNS * bits // 8
    assert sum(site.bytes for site in of.sites if site.buffer == "w") == codes
    metrics = of.metrics()
    numbers = 2 * 2 * len(ids) * COLUMNS // GROUP  # a scale and a bias of each group, read again from the cache
    assert metrics["device_bytes_read_unique"] == codes + numbers + ids.nbytes
    assert metrics["device_bytes_written"] == metrics["device_bytes_written_unique"] == out.nbytes
    assert metrics["bank_conflicts"] == of.barriers == of.threadgroup_memory == 0
    for site in of.sites:
        if site.buffer in ("w", "out"):
            assert site.transactions == site.ideal_transactions, site
