"""What mla_decode's Metal kernel reads, writes and launches."""

import mlx.core as mx
import pytest

import mlx_anvil
from support import kernel_names
from tests.mla_decode.cases import draw

pytestmark = pytest.mark.cpu_only  # they choose the simulator themselves

HEADS, KEYS, RANK, ROPE = 16, 64, 512, 64


def test_a_latent_is_read_once():
    """For 16 heads, and for the scores and the output together."""
    case = draw(HEADS, (1, KEYS), (RANK, ROPE), mx.float16)
    with mx.stream(mx.cpu), mlx_anvil.simulate(profiled=True) as profiles:
        mx.eval(case.attend())
    (profile,) = profiles
    metrics = profile.metrics()
    assert metrics["device_bytes_read"] == sum(x.nbytes for x in case.arrays)
    assert metrics["device_bytes_written"] == metrics["device_bytes_written_unique"] == 2 * HEADS * RANK
    blocks = KEYS // 16
    assert profile.barriers == 2 * blocks + 2  # two for each block of keys


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_tiles_and_parts(dtype):
    def launched(rank: int, keys: int) -> list[str]:
        case = draw(3, (1, keys), (rank, 8), dtype)
        with mx.stream(mx.cpu), mlx_anvil.simulate(), mlx_anvil.trace() as trace:
            mx.eval(case.attend())
        return kernel_names(trace)

    name = str(dtype).removeprefix("mlx.core.")
    assert launched(1, 40) == launched(256, 200) == [f"mla_decode_{name}_d256"]
    assert launched(257, 40) == [f"mla_decode_{name}_d512"]
    assert launched(512, 300) == [f"mla_decode_{name}_d512", f"flash_attention_decode_combine_{name}"]
